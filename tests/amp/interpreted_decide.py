"""Run by test_decide.py under TRITON_INTERPRET=1: the GPU's decision on CPU tensors, against the host's."""

from __future__ import annotations

import copy
import itertools
import warnings

import torch
from amp_runs import INF, NAN

from tilestep.backends.spec import CLIP, CONTROL_SIZE, LARGEST_SUM, NORM, SKIP, SKIPPED
from tilestep.backends.triton.run import decide_on_device, limit_on_device
from tilestep.errors import GradientError
from tilestep.optimizer.control import decide_on_host, limit_on_host
from tilestep.runtime.limits import Sigma, StepInputs, ZClip

REMEMBERED = [(0.0, 0.0), (2.0, 3.0), (2.0, 4.0), (0.0, 9.0)]
LIMITS = [{}, {"skip_above": 3.0}, {"mean_factor": 1.5, "mean_decay": 0.5, "mean_warmup": 4.0}]
FLAGS = [{}, {"skip_nonfinite": True}, {"check_overflow": True}]


def number(value: float | None, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
    return None if value is None else torch.tensor([value], dtype=dtype)


def both(decision: StepInputs, remembered: tuple[float, float]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    results = []
    for decide in (decide_on_host, decide_on_device):
        own = copy.deepcopy(decision)
        control = torch.zeros(CONTROL_SIZE, dtype=torch.float64)
        control[4], control[5], control[6] = 7.0, *remembered
        decide(control, own)
        results.append([control, torch.zeros(()) if own.overflow is None else own.overflow])
    return results[0], results[1]


def main() -> None:
    seen = set()
    for power_sum, scale, found_inf, limits, flags, remembered in itertools.product(
        [None, 0.0, 6.25, 1e300, LARGEST_SUM, INF, NAN], [None, 0.5], [None, 0.0, 2.0], LIMITS, FLAGS, REMEMBERED
    ):
        if "mean_factor" not in limits and remembered != REMEMBERED[1]:
            continue  # it is left alone
        overflow = torch.full((), 5.0) if flags.get("check_overflow") else None
        decision = StepInputs(
            number(power_sum, torch.float64), number(scale), number(found_inf), overflow=overflow, **limits, **flags
        )
        mine, theirs = both(decision, remembered)
        torch.testing.assert_close(theirs, mine, rtol=1e-12, atol=0, equal_nan=True, msg=str(decision))
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
        decide_on_device(control, decision)
        # Nobody can raise on a GPU: the step is skipped and counted.
        assert control[SKIP] == 1 and control[4] == 1 and control[6] == 0, scale


ADAPTIVE = [
    *(ZClip(warmup=4, option=option, factor=0.9, max_norm=None) for option in ("adaptive", "mean", "percentile")),
    *(Sigma(3, window=window, warmup=4, both_sides=both) for window in (5, 8) for both in (False, True)),
]


def compare_limits() -> None:
    """Thirty steps of every adaptive limit, with spikes, norms that are not finite, skipped steps and losses."""
    generator = torch.Generator().manual_seed(0)
    norms = (2 + 0.1 * torch.randn(30, generator=generator, dtype=torch.float64)).tolist()
    norms[9], norms[12], norms[15], norms[20], norms[25] = 40.0, INF, NAN, 0.1, 9.0
    for limit in ADAPTIVE:
        memories = [torch.zeros(limit.size, dtype=torch.float64) for _ in range(2)]
        outcomes, launchers = set(), {}
        for step, norm in enumerate(norms):
            controls = []
            loss = torch.tensor([1.0 + step % 3 + 50 * (step == 17)], dtype=torch.float64) if step % 2 else None
            for memory, on_device in zip(memories, (False, True)):
                control = torch.zeros(CONTROL_SIZE, dtype=torch.float64)
                control[NORM], control[SKIP], control[SKIPPED], control[CLIP] = norm, float(step == 22), 7.0, INF
                if on_device:
                    limit_on_device(control, limit, memory, loss, launchers)
                else:
                    limit_on_host(control, limit, memory, loss)
                controls.append(control)
            torch.testing.assert_close(
                controls[1], controls[0], rtol=1e-12, atol=0, equal_nan=True, msg=f"{limit} {step}"
            )
            torch.testing.assert_close(memories[1], memories[0], rtol=1e-12, atol=0, msg=f"{limit} {step}")
            outcomes.add((float(controls[0][SKIP]), float(controls[0][CLIP]) < INF))
        assert len(outcomes) > 1, limit


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
    compare_limits()
    print("all equal")
