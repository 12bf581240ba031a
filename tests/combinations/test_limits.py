"""Limits and norms under every placement, schedule and memory: each step is decided as a plain optimizer decides it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import ways
from own_limits import SpikesBeyond
from rank_processes import each_passes
from ways import Weights, placed, whole

import tilestep

SHAPES = [(6, 9), (40, 33), (7,), (3,)]
SIZES = [1.0, 1.2, 0.9, 1.1, 30.0, 1.0, 0.01, 1.3, 9.0, 1.0]
"""Of the gradients of each step: two of them are outliers."""

LIMITS: dict[str, dict[str, Any]] = {
    "ZClip": {"max_grad_norm": tilestep.ZClip(z=1.5, warmup=3, max_norm=60.0)},
    "AdaGC": {"max_grad_norm": tilestep.AdaGC(warmup=3)},
    "Sigma": {"skip_above": tilestep.Sigma(2.0, window=8, warmup=4)},
    "TimesMean": {"skip_above": tilestep.TimesMean(3.0, warmup=3)},
    "SpikesBeyond": {"max_grad_norm": SpikesBeyond(2.5)},
    "norm": {"track_grad_norm": True},
}
WAYS = [
    ("plain", "backward"),
    ("plain", "forward"),
    ("plain", "on the host"),
    ("fsdp2", "at the step"),
    ("fsdp2", "backward"),
    ("fsdp2", "streamed gradients"),
    ("hsdp", "at the step"),
    ("shard", "at the step"),
    ("shard", "streamed"),
]


def gradients_of(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [SIZES[step % len(SIZES)] * torch.randn(shape, generator=generator) for shape in SHAPES]


def attached(optimizer: Any, model: Weights, way: tuple[str, str]) -> Any:
    return ways.attached(optimizer, model, *way, bucket_cap_mb=0.001)


def decayed(step: Any) -> Any:
    """One function for all optimizers, whose rule is traced once."""
    return 0.1 / (1 + step)


def groups_of(model: Weights) -> list[dict[str, Any]]:
    first, second, third, left_out = model.weights
    return [
        {"params": [first, second], "lr": decayed},
        {"params": [third]},
        {"params": [left_out], "in_norm": False},
    ]


def made(model: Weights, name: str) -> Any:
    return tilestep.AdamW(groups_of(model), lr=0.05, **LIMITS[name])


class Numbers(NamedTuple):
    """What a plain optimizer has decided in a step, and the parameters after it."""

    norm: float | None
    """None where the limit needs none of all gradients."""
    skipped: int
    rates: list[Any]
    weights: list[torch.Tensor]


def numbers(optimizer: Any, model: Weights, groups: int, has_norm: bool = True) -> Numbers:
    rates = [optimizer.current("lr", group) for group in range(groups)]
    weights = [whole(param) for param in model.weights]
    return Numbers(float(optimizer.grad_norm) if has_norm else None, int(optimizer.skipped_steps), rates, weights)


def compare(name: Any, optimizer: Any, model: Weights, expected: Numbers) -> None:
    torch.testing.assert_close(float(optimizer.grad_norm), expected.norm, rtol=1e-6, atol=0, msg=str(name))
    assert int(optimizer.skipped_steps) == expected.skipped, name
    for group, wanted in enumerate(expected.rates):
        got = optimizer.current("lr", group)
        assert got == wanted, (name, group, got, wanted)
    compare_weights(name, model, expected)


def compare_weights(name: Any, model: Weights, expected: Numbers) -> None:
    for mine, wanted in zip(model.weights, expected.weights):
        torch.testing.assert_close(whole(mine), wanted, rtol=1e-5, atol=1e-6, msg=str(name))


def step(optimizer: Any, model: Weights, number: int, **given: Any) -> None:
    model(gradients_of(number)).backward()
    optimizer.step(**given)
    optimizer.zero_grad()


class Limit:
    """A limit over all ways, with a checkpoint in the middle."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self) -> None:
        name = self.__name__
        expected = self.plain()
        for turn, way in enumerate(WAYS):
            model = placed(Weights(SHAPES), way[0])
            optimizer = made(model, name)
            for number in range(len(SIZES)):
                if number == turn % 2 * 3:
                    # Some go on from the steps of a plain optimizer.
                    attached(optimizer, model, way)
                if number == 6:
                    optimizer.load_state_dict(optimizer.state_dict())
                given = self.given(number)
                # A loss of each rank; those that decide together average them.
                own = 0.5 - dist.get_rank() if way[0] != "plain" and number >= turn % 2 * 3 else 0.0
                step(optimizer, model, number, **{key: loss + own for key, loss in given.items()})
                if name not in ("AdaGC",):
                    compare((name, way, number), optimizer, model, expected[number])
            compare_weights((name, way), model, expected[-1])

    def plain(self) -> list[Numbers]:
        """What is decided without any of the ways."""
        plain = Weights(SHAPES)
        optimizer = made(plain, self.__name__)
        decided = []
        for number in range(len(SIZES)):
            step(optimizer, plain, number, **self.given(number))
            decided.append(numbers(optimizer, plain, 3, has_norm=self.__name__ != "AdaGC"))
        if self.__name__ in ("Sigma", "TimesMean", "SpikesBeyond"):
            assert 0 < decided[-1].skipped < len(SIZES)
        return decided

    def given(self, number: int) -> dict[str, float]:
        return {"loss": 2.0 if number != 8 else 50.0} if self.__name__ in ("Sigma", "SpikesBeyond") else {}


def losses_that_ranks_have_remembered_alone_are_the_first_ranks() -> None:
    model = Weights(SHAPES)
    optimizer = made(model, "Sigma")
    for number in range(4):
        step(optimizer, model, 0, loss=1.0 + (number % 2) * (1 + 100 * dist.get_rank()))
    tilestep.shard(optimizer, model)
    step(optimizer, model, 0, loss=10.0)
    skipped = torch.tensor([int(optimizer.skipped_steps)])
    everyone = [torch.zeros_like(skipped) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, skipped)
    assert everyone == [1, 1]


def one_norm_for_two() -> None:
    """Their gradients are all there when the first steps; the second uses what that has worked out."""

    def pair(model: Weights) -> list[Any]:
        return [
            tilestep.AdamW(model.weights[:2], lr=0.05, max_grad_norm=5.0),
            tilestep.SGD(model.weights[2:], lr=0.05, skip_nonfinite=True),
        ]

    def joint_step(model: Weights, optimizers: list[Any], number: int) -> list[Numbers]:
        gradients = gradients_of(number)
        if number == 3:
            gradients[1][0, 0] = torch.inf
        model(gradients).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return [numbers(optimizer, model, 0) for optimizer in optimizers]

    plain = Weights(SHAPES)
    alone = pair(plain)
    tilestep.joint_norm(alone)
    expected = [joint_step(plain, alone, number) for number in range(6)]
    for turn, way in enumerate(WAYS):
        model = placed(Weights(SHAPES), way[0])
        optimizers = pair(model)
        if turn % 2:
            tilestep.joint_norm(optimizers)
        for optimizer in optimizers:
            attached(optimizer, model, way)
        if not turn % 2:
            tilestep.joint_norm(optimizers)
        for number, wanted in enumerate(expected):
            decided = joint_step(model, optimizers, number)
            for one, other in zip(decided, wanted, strict=True):
                assert one.skipped == other.skipped == (number >= 3), (way, number)
                norms = one.norm, other.norm
                torch.testing.assert_close(*norms, rtol=1e-6, atol=0, equal_nan=True, msg=str((way, number, norms)))
            compare_weights((way, number), model, wanted[-1])


def ranks_without_a_piece_of_a_group_know_its_step() -> None:
    """A matrix whose rule works on whole ones is one rank's; a group that never trains is before its first step."""
    model = Weights(SHAPES)
    matrix, second, third, frozen = model.weights
    frozen.requires_grad_(False)
    groups = [
        {"params": [matrix], "rule": "Muon", "lr": lambda step: 1 / (1 + step)},
        {"params": [second, third]},
        {"params": [frozen], "lr": decayed},
    ]
    optimizer: Any = tilestep.shard(tilestep.SGD(groups, lr=0.1), model)
    for number in range(3):
        assert optimizer.current("lr").item() == 1 / (1 + max(number, 1))
        assert optimizer.current("lr", 2).item() == decayed(1)
        step(optimizer, model, number)


CHECKS = [
    *(Limit(name) for name in LIMITS),
    one_norm_for_two,
    losses_that_ranks_have_remembered_alone_are_the_first_ranks,
    ranks_without_a_piece_of_a_group_know_its_step,
]

test_on_two_ranks = each_passes(CHECKS, 2)
