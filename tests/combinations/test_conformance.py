"""A pairwise sample of (rule, storage, placement, schedule, backend): all train as a plain step does, which is checked.

The plain step is compared with the rule's own code in float64, by the engine of `tilestep check`. The others give its
bits where nothing but placement or time differs and no sum is split, and else its numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pairwise import pairs_of, pairwise
from rank_processes import each_passes
from ways import SCHEDULES, Weights, attached, backward, goes_together, gradients_of, placed, whole

import tilestep
from tilestep.backends import registry
from tilestep.checking.items import Subject, Training, trace_all

RULES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.05},
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Lion": {"lr": 0.01},
    "LAMB": {"lr": 0.05},
    "Adafactor": {"lr": 0.05},
    "Muon": {"lr": 0.05},
    "SOAP": {"lr": 0.01},
}
STORAGES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "float64": (torch.float64, {}),
    "bfloat16": (torch.bfloat16, {}),
    "masters": (torch.bfloat16, {"master_weights": True}),
    "remainders": (torch.bfloat16, {"master_weights": "remainder"}),
    "kahan": (torch.bfloat16, {"master_weights": "kahan"}),
    "corrections": (torch.bfloat16, {"master_weights": "int8"}),
    "states in bfloat16": (torch.float32, {"state_dtype": torch.bfloat16}),
    "states in int8": (torch.float32, {"state_dtype": "int8"}),
    "states in float8": (torch.float32, {"state_dtype": "float8_e4m3"}),
    "states in int4": (torch.float32, {"state_dtype": "int4"}),
    "rounded at random": (torch.bfloat16, {"rounding": "stochastic"}),
    "rounded at random, states in int8": (torch.bfloat16, {"rounding": "stochastic", "state_dtype": "int8"}),
}
PLACEMENTS = ("plain", "fsdp2", "shard")
BACKENDS = ("cpp", "eager")
AXES: tuple[tuple[str, ...], ...] = (tuple(RULES), tuple(STORAGES), PLACEMENTS, SCHEDULES, BACKENDS)

NEED_KERNELS = ("LAMB", "Adafactor", "Muon", "SOAP")
"""Their reductions and matrices are parted among ranks, which eager PyTorch refuses."""

EAGER = ("at the step", "backward", "forward")
"""Others update a chunk at a time, which eager PyTorch refuses too."""

SHAPES = [(6, 9), (70, 65), (9, 6), (7,)]
LARGE = [(40, 130), (48, 256), (5120,), (7,), (36, 256)]
"""For states in blocks, which small tensors are not kept in."""

STEPS = 3
Choice = tuple[str, ...]


def is_one(choice: Choice) -> bool:
    """Whether a combination is one; the others are refused, which test_pairs.py holds."""
    rule, storage, placement, schedule, engine = choice
    if rule == "SOAP" and ("states in" in storage or "random" in storage):
        return False  # what it turns into its bases is kept in float32
    if engine == "eager" and (schedule not in EAGER or (rule in NEED_KERNELS and placement != "plain")):
        return False
    return goes_together(placement, schedule)


@contextmanager
def backend(name: str) -> Iterator[None]:
    before = dict(registry.BACKENDS)
    if name == "eager":
        registry.BACKENDS.clear()
    try:
        yield
    finally:
        registry.BACKENDS.update(before)


class Case:
    """One combination; found again by the processes that run it."""

    def __init__(self, choice: Choice) -> None:
        self.choice, self.__name__ = choice, ", ".join(choice)

    def __call__(self) -> None:
        name, storage, placement, _, engine = self.choice
        dtype, options = STORAGES[storage]
        rule, cpu = tilestep.registry[name], torch.device("cpu")
        shapes = [shape for shape in (LARGE if "states in" in storage else SHAPES) if len(shape) == 2 or not self.is_2d]
        graphs: Any = {}
        trace_all(rule, {**rule.hyperparameters, **RULES[name]}, graphs)
        plain = Weights(shapes, dtype)
        trial = Training(Subject(rule, RULES[name], cpu, graphs), plain.weights, options)
        # Blocks that are rounded at random may be twice as far off as the nearest; Muon makes much of a last place.
        is_near = "states in" not in storage or not (name == "Muon" or "random" in storage)
        for step in range(STEPS):
            for param, gradient in zip(plain.weights, gradients_of(plain, step)):
                param.grad = gradient
            trial.compared_step() if is_near else trial.step()
        with backend(engine):
            updated = self.trained(placed(Weights(shapes, dtype), placement))
        is_exact = engine == "cpp" and (placement == "plain" or name in ("AdamW", "SGD", "Lion"))
        near = {"rtol": 2.0**-6, "atol": 1e-3} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        if "states in" in storage:
            near = {"rtol": 1e-2, "atol": 1e-2}
        for mine, wanted in zip(updated, plain.weights):
            torch.testing.assert_close(mine, wanted.detach(), **({"rtol": 0, "atol": 0} if is_exact else near))

    @property
    def is_2d(self) -> bool:
        return self.choice[0] in ("Muon", "SOAP")

    def trained(self, model: Weights) -> list[torch.Tensor]:
        """Parameters after steps, whole."""
        name, storage, placement, schedule, _ = self.choice
        optimizer: Any = tilestep.Optimizer(model.named, name, **RULES[name], **STORAGES[storage][1])
        attached(optimizer, model, placement, schedule, 0.001)
        for step in range(STEPS):
            backward(model, gradients_of(model, step))
            optimizer.step()
            optimizer.zero_grad()
        if hasattr(optimizer, "wait"):
            optimizer.wait()
        return [whole(param) for param in model.parameters()]


def what_needs_kernels_is_refused() -> None:
    for name, schedule in itertools.product(NEED_KERNELS, EAGER):
        case = Case((name, "float32", "fsdp2", schedule, "eager"))
        with backend("eager"), pytest.raises(tilestep.TilestepError, match=r"a C\+\+ compiler"):
            case.trained(placed(Weights(SHAPES[:3]), "fsdp2"))
    for schedule in SCHEDULES[len(EAGER) :]:
        case = Case(("AdamW", "float32", "plain", schedule, "eager"))
        with (
            backend("eager"),
            pytest.raises(tilestep.OffloadError, match=r"eager PyTorch has none|need a C\+\+ compiler"),
        ):
            case.trained(Weights(SHAPES))


CASES = [Case(choice) for choice in pairwise(*AXES, allowed=is_one)]

# Where nothing is parted a second rank would do the same again.
test_plain_cases = each_passes([case for case in CASES if case.choice[2] == "plain"], 1)
test_parted_cases = each_passes(
    [*(case for case in CASES if case.choice[2] != "plain"), what_needs_kernels_is_refused], 2
)


def test_every_pair_is_in_the_sample() -> None:
    covered = set().union(*(pairs_of(case.choice) for case in CASES))
    wanted = set().union(*(pairs_of(choice) for choice in itertools.product(*AXES) if is_one(choice)))
    assert covered == wanted
    missing = set().union(*map(pairs_of, itertools.product(*AXES))) - covered
    refused = {(one[1], two[1]) for one, two in missing if one[1] != "SOAP"}
    ways = [("shard", schedule) for schedule in SCHEDULES if not goes_together("shard", schedule)]
    assert refused == {*ways, *((schedule, "eager") for schedule in SCHEDULES if schedule not in EAGER)}
