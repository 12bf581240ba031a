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
from torch import nn
from torch.distributed.fsdp import fully_shard

import tilestep
from tilestep.backends import registry
from tilestep.checking.items import Subject, Trial, draw, trace_all

RULES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.05},
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Lion": {"lr": 0.01},
    "LAMB": {"lr": 0.05},
    "Adafactor": {"lr": 0.05},
    "Muon": {"lr": 0.05},
}
STORAGES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "masters": (torch.bfloat16, {"master_weights": True}),
    "remainders": (torch.bfloat16, {"master_weights": "remainder"}),
    "kahan": (torch.bfloat16, {"master_weights": "kahan"}),
    "states in bfloat16": (torch.float32, {"state_dtype": torch.bfloat16}),
    "rounded at random": (torch.bfloat16, {"rounding": "stochastic"}),
}
PLACEMENTS = ("plain", "fsdp2", "shard")
SCHEDULES = ("at the step", "backward", "forward", "offload")
BACKENDS = ("cpp", "eager")
AXES: tuple[tuple[str, ...], ...] = (tuple(RULES), tuple(STORAGES), PLACEMENTS, SCHEDULES, BACKENDS)

NEED_KERNELS = ("LAMB", "Adafactor", "Muon")
"""Their reductions and matrices are parted among ranks, which eager PyTorch refuses."""

SHAPES = [(6, 9), (70, 65), (9, 6), (7,)]
STEPS = 3
Choice = tuple[str, ...]


def goes_together(choice: Choice) -> bool:
    """Whether a combination is one; the others are refused, which test_pairs.py holds."""
    rule, _, placement, schedule, engine = choice
    if placement == "shard" and schedule in ("backward", "forward"):
        return False
    return not (engine == "eager" and placement != "plain" and rule in NEED_KERNELS)


class Weights(nn.Module):
    """Parameters whose gradients are what a forward is given."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        cpu = torch.device("cpu")
        drawn = [draw(shape, dtype, cpu, seed) for seed, shape in enumerate(shapes, start=1)]
        self.weights = nn.ParameterList(map(nn.Parameter, drawn))

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return sum((weight * gradient).sum() for weight, gradient in zip(self.weights, gradients))  # type: ignore[return-value]


@contextmanager
def backend(name: str) -> Iterator[None]:
    known = dict(registry.BACKENDS)
    if name == "eager":
        registry.BACKENDS.clear()
    try:
        yield
    finally:
        registry.BACKENDS.update(known)


class Case:
    """One combination; found again by the processes that run it."""

    def __init__(self, choice: Choice) -> None:
        self.choice, self.__name__ = choice, ", ".join(choice)

    def __call__(self) -> None:
        name, storage, placement, schedule, engine = self.choice
        dtype, options = STORAGES[storage]
        rule, cpu = tilestep.registry[name], torch.device("cpu")
        shapes = [shape for shape in SHAPES if name != "Muon" or len(shape) == 2]
        graphs: Any = {}
        trace_all(rule, {**rule.hyperparameters, **RULES[name]}, graphs)
        plain = Weights(shapes, dtype)
        trial = Trial(Subject(rule, RULES[name], cpu, graphs), plain.weights, options)
        gradients: list[list[torch.Tensor]] = []
        for _ in range(STEPS):
            trial.set_gradients()
            gradients.append([param.grad.clone() for param in plain.weights])
            trial.compared_step()
        with backend(engine):
            found = self.trained(Weights(shapes, dtype), gradients, placement, schedule, options)
        is_exact = engine == "cpp" and (placement == "plain" or name in ("AdamW", "SGD", "Lion"))
        near = {"rtol": 2.0**-6, "atol": 1e-3} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        if storage == "states in bfloat16":
            near = {"rtol": 1e-3, "atol": 1e-3}
        for mine, wanted in zip(found, plain.weights):
            torch.testing.assert_close(mine, wanted.detach(), **({"rtol": 0, "atol": 0} if is_exact else near))

    def trained(
        self, model: Weights, gradients: list[list[torch.Tensor]], placement: str, schedule: str, options: Any
    ) -> list[torch.Tensor]:
        """Parameters after steps, whole."""
        if placement == "fsdp2":
            fully_shard(model)
        name = self.choice[0]
        optimizer: Any = tilestep.Optimizer(model.parameters(), name, **RULES[name], **options)
        if placement == "shard":
            optimizer = tilestep.shard(optimizer, model)
        if schedule == "offload":
            optimizer = tilestep.offload(optimizer)
        elif schedule != "at the step":
            optimizer = tilestep.overlap(optimizer, model, during=schedule)
        for given in gradients:
            model(given).backward()
            optimizer.step()
            optimizer.zero_grad()
        if hasattr(optimizer, "wait"):
            optimizer.wait()
        values: Any = [param.detach() for param in model.parameters()]
        return [value.full_tensor() if placement == "fsdp2" else value for value in values]


def what_needs_kernels_is_refused() -> None:
    for name, schedule in itertools.product(NEED_KERNELS, SCHEDULES):
        case = Case((name, "float32", "fsdp2", schedule, "eager"))
        with backend("eager"), pytest.raises(tilestep.TilestepError, match=r"needs a C\+\+ compiler"):
            gradients = [torch.ones(shape) for shape in SHAPES[:3]]
            case.trained(Weights(SHAPES[:3], torch.float32), [gradients], "fsdp2", schedule, {})


CASES = [Case(choice) for choice in pairwise(*AXES, allowed=goes_together)]

test_cases = each_passes([*CASES, what_needs_kernels_is_refused], 2)


def test_every_pair_is_in_the_sample() -> None:
    covered = set().union(*(pairs_of(case.choice) for case in CASES))
    for (place, one), (other, two) in itertools.combinations(
        [(axis, value) for axis, values in enumerate(AXES) for value in values], 2
    ):
        refused = {one, two} in ({"shard", "backward"}, {"shard", "forward"})  # test_pairs.py has these
        assert place == other or refused or ((place, one), (other, two)) in covered, (one, two)
