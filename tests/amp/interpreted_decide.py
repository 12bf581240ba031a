"""A GPU's decision against the host's, to the bit: by test_decide.py in Triton's interpreter, and by tests/gpu."""

from __future__ import annotations

import copy
import itertools
import os
import warnings
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from amp_runs import INF, NAN
from own_limits import Everything, SpikesBeyond

from tilestep import Limit, Sigma, TimesMean, ZClip
from tilestep.backends.triton.run import DecisionLaunchers, decide_on_device
from tilestep.errors import GradientError
from tilestep.kernels.spec import CLIP, CONTROL_SIZE, LARGEST_SUM, SKIP, SKIPPED
from tilestep.optimizer.control import DeviceControl, decide
from tilestep.runtime.decision import StepHistory, StepInputs

CPU = torch.device("cpu")
DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") else "cuda:0")
FLAGS = [{}, {"skip_nonfinite": True}, {"check_overflow": True}]


def number(value: float | None, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
    return None if value is None else torch.tensor([value], dtype=dtype)


def decide_on_host(control: torch.Tensor, inputs: StepInputs) -> None:
    device_control = DeviceControl(CPU)
    device_control.numbers = control
    inputs.needs_norm = True
    device_control.update(inputs)


def decide_there(control: torch.Tensor, inputs: StepInputs, launchers: DecisionLaunchers | None = None) -> None:
    """`decide_on_device`, with its tensors moved there, and what is written moved back."""
    own, there = copy.copy(inputs), control.to(DEVICE)
    for field in fields(StepInputs):
        value = getattr(inputs, field.name)
        if isinstance(value, torch.Tensor):
            setattr(own, field.name, value.to(DEVICE))
    decide_on_device(decide, there, own, {} if launchers is None else launchers)
    control.copy_(there)
    if inputs.overflow is not None:
        inputs.overflow.copy_(own.overflow)


def both(decision: StepInputs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    results = []
    for run in (decide_on_host, decide_there):
        own = copy.deepcopy(decision)
        control = torch.zeros(CONTROL_SIZE, dtype=torch.float64)
        control[SKIPPED] = 7.0
        run(control, own)
        results.append([control, torch.zeros(()) if own.overflow is None else own.overflow])
    return results[0], results[1]


def compare_decisions() -> None:
    seen = set()
    for power_sum, scale, found_inf, above, flags in itertools.product(
        [None, 0.0, 6.25, 1e300, LARGEST_SUM, INF, NAN], [None, 0.5], [None, 0.0, 2.0], [INF, 3.0], FLAGS
    ):
        overflow = torch.full((), 5.0) if flags.get("check_overflow") else None
        decision = StepInputs(
            number(power_sum, torch.float64),
            number(scale),
            number(found_inf),
            overflow=overflow,
            skip_above=above,
            **flags,
        )
        mine, theirs = both(decision)
        torch.testing.assert_close(theirs, mine, rtol=0, atol=0, equal_nan=True, msg=str(decision))
        seen.add(float(mine[0][SKIP]))
    assert seen == {0.0, 1.0}
    for scale in (0.0, INF, NAN, -1.0):
        control = torch.zeros(CONTROL_SIZE, dtype=torch.float64)
        decision = StepInputs(number(4.0, torch.float64), number(scale))
        try:
            decide_on_host(control, decision)
        except GradientError:
            assert not control.any()
        else:
            raise AssertionError(scale)
        decide_there(control, decision)
        # Nobody can raise on a GPU: the step is skipped and counted.
        assert control[SKIP] == 1 and control[SKIPPED] == 1, scale


@dataclass(frozen=True)
class NoNorm(Limit):
    """Clips to what is no norm from the third step on; a step on a CPU raises then."""

    wrong: float = -1.0
    memory: ClassVar[Any] = {"steps": 0.0}

    def decide(self, norm: float, loss: float | None, memory: Any) -> tuple[bool, float]:
        memory.steps += 1
        return False, self.wrong if memory.steps > 2 else 1.0


def skip_what_is_no_norm() -> None:
    for wrong in (-1.0, NAN):
        history = StepHistory()
        control = torch.zeros(CONTROL_SIZE, dtype=torch.float64)
        inputs = StepInputs(number(4.0, torch.float64), limits=(NoNorm(wrong),), memory=history)
        skips = []
        for _ in range(4):
            decide_there(control, inputs)
            skips.append(float(control[SKIP]))
        assert skips == [0.0, 0.0, 1.0, 1.0] and control[SKIPPED] == 2


ADAPTIVE: list[Limit] = [
    *(ZClip(warmup=4, option=option, factor=0.9, max_norm=None) for option in ("adaptive", "mean", "percentile")),
    ZClip(warmup=4),
    TimesMean(1.5, decay=0.5, warmup=4),
    Sigma(3, window=5, warmup=4),
    Sigma(3, window=8, warmup=4, both_sides=True),
    SpikesBeyond(),
    Everything(),
    Everything(factor=3.0, name="one"),
]


def compare_limits() -> None:
    """Thirty steps of every limit, with spikes, norms that are not finite, overflows and losses."""
    generator = torch.Generator().manual_seed(0)
    norms = (2 + 0.1 * torch.randn(30, generator=generator, dtype=torch.float64)).tolist()
    # One infinite norm is in the warm-up.
    norms[2], norms[9], norms[12], norms[15], norms[20], norms[25] = INF, 40.0, INF, NAN, 0.1, 9.0
    for limit in ADAPTIVE:
        histories = StepHistory(), StepHistory()
        outcomes, launchers = set(), {}
        # Sums over windows are added in another order.
        exact = {"rtol": 1e-12 if "Window" in str(limit.memory) else 0, "atol": 0, "equal_nan": True}
        for step, norm in enumerate(norms):
            controls = []
            loss = torch.tensor([1.0 + step % 3 + 50 * (step == 17)], dtype=torch.float64) if step % 2 else None
            for history, on_device in zip(histories, (False, True)):
                # A sum of 1e309 is a finite one, whose root is infinite.
                power_sum = number(LARGEST_SUM if step == 12 else norm * norm, torch.float64)
                found = number(float(step == 22))
                inputs = StepInputs(power_sum, found_inf=found, limits=(limit,), memory=history, loss=loss)
                control = torch.zeros(CONTROL_SIZE, dtype=torch.float64)
                control[SKIPPED] = 7.0
                if on_device:
                    decide_there(control, inputs, launchers)
                else:
                    decide_on_host(control, inputs)
                controls.append(control)
            torch.testing.assert_close(controls[1], controls[0], msg=f"{limit} {step} {controls}", **exact)
            memories = [histories[0].of(limit, CPU), histories[1].of(limit, DEVICE).cpu()]
            torch.testing.assert_close(memories[1], memories[0], msg=f"{limit} {step} {memories}", **exact)
            outcomes.add((float(controls[0][SKIP]), float(controls[0][CLIP]) < INF))
        assert len(outcomes) > 1, limit
        assert len(launchers) == 2


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    compare_decisions()
    compare_limits()
    skip_what_is_no_norm()
    print("all equal")
