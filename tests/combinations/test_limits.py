"""Limits and norms under every placement, schedule and memory: each step is decided as a plain optimizer decides it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import ways
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


def groups_of(model: Weights) -> list[dict[str, Any]]:
    first, second, third, left_out = model.weights
    return [
        {"params": [first, second], "lr": lambda step: 0.1 / (1 + step)},
        {"params": [third]},
        {"params": [left_out], "in_norm": False},
    ]


def made(model: Weights, name: str) -> Any:
    return tilestep.AdamW(groups_of(model), lr=0.05, **LIMITS[name])


def compare(name: Any, optimizer: Any, expected: Any, model: Weights, plain: Weights) -> None:
    torch.testing.assert_close(float(optimizer.grad_norm), float(expected.grad_norm), rtol=1e-6, atol=0, msg=str(name))
    assert int(optimizer.skipped_steps) == int(expected.skipped_steps), name
    for group in range(3):
        got, wanted = optimizer.current("lr", group), expected.current("lr", group)
        assert got == wanted, (name, group, got, wanted)
    for mine, its in zip(model.weights, plain.weights):
        torch.testing.assert_close(whole(mine), its.detach(), rtol=1e-5, atol=1e-6, msg=str(name))


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
        for turn, way in enumerate(WAYS):
            plain, model = Weights(SHAPES), placed(Weights(SHAPES), way[0])
            expected, optimizer = made(plain, name), made(model, name)
            for number in range(len(SIZES)):
                if number == turn % 2 * 3:
                    # Some go on from the steps of a plain optimizer.
                    attached(optimizer, model, way)
                if number == 6:
                    optimizer.load_state_dict(optimizer.state_dict())
                loss = 2.0 if number != 8 else 50.0
                given = {"loss": loss} if name == "Sigma" else {}
                step(expected, plain, number, **given)
                # A loss of each rank; those that decide together average them.
                own = 0.5 - dist.get_rank() if way[0] != "plain" and number >= turn % 2 * 3 else 0.0
                step(optimizer, model, number, **({"loss": loss + own} if given else {}))
                if name not in ("AdaGC",):
                    compare((name, way, number), optimizer, expected, model, plain)
            if name in ("Sigma", "TimesMean"):
                assert 0 < int(expected.skipped_steps) < len(SIZES)
            for mine, its in zip(model.weights, plain.weights):
                torch.testing.assert_close(whole(mine), its.detach(), rtol=1e-5, atol=1e-6, msg=str((name, way)))


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
    for turn, way in enumerate(WAYS):
        plain, model = Weights(SHAPES), placed(Weights(SHAPES), way[0])
        pairs = [
            [tilestep.AdamW(net.weights[:2], lr=0.05, max_grad_norm=5.0) for net in (plain, model)],
            [tilestep.SGD(net.weights[2:], lr=0.05, skip_nonfinite=True) for net in (plain, model)],
        ]
        expected, mine = ([pair[place] for pair in pairs] for place in (0, 1))
        tilestep.joint_norm(expected)
        if turn % 2:
            tilestep.joint_norm(mine)
        for optimizer in mine:
            attached(optimizer, model, way)
        if not turn % 2:
            tilestep.joint_norm(mine)
        for number in range(6):
            for chosen, optimizers in ((plain, expected), (model, mine)):
                gradients = gradients_of(number)
                if number == 3:
                    gradients[1][0, 0] = torch.inf
                chosen(gradients).backward()
                for optimizer in optimizers:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            for one, other in zip(mine, expected):
                assert int(one.skipped_steps) == int(other.skipped_steps) == (number >= 3), (way, number)
                norms = float(one.grad_norm), float(other.grad_norm)
                torch.testing.assert_close(*norms, rtol=1e-6, atol=0, equal_nan=True, msg=str((way, number, norms)))
            for got, its in zip(model.weights, plain.weights):
                torch.testing.assert_close(whole(got), its.detach(), rtol=1e-5, atol=1e-6, msg=str((way, number)))


def ranks_without_a_piece_of_a_group_know_its_step() -> None:
    """A matrix whose rule works on whole ones is one rank's."""
    model = Weights(SHAPES)
    matrix, rest = model.weights[0], list(model.weights[1:])
    groups = [{"params": [matrix], "rule": "Muon", "lr": lambda step: 1 / (1 + step)}, {"params": rest}]
    optimizer: Any = tilestep.shard(tilestep.SGD(groups, lr=0.1), model)
    for number in range(3):
        assert optimizer.current("lr").item() == 1 / (1 + max(number, 1))
        step(optimizer, model, number)


CHECKS = [
    *(Limit(name) for name in LIMITS),
    one_norm_for_two,
    losses_that_ranks_have_remembered_alone_are_the_first_ranks,
    ranks_without_a_piece_of_a_group_know_its_step,
]

test_on_two_ranks = each_passes(CHECKS, 2)
