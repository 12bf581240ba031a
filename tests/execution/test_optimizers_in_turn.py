"""Optimizers of the same parameters in turn: one that takes gradients in backward leaves the other none."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from ways import attached

import tilestep


def made(model: nn.Module, way: str) -> Any:
    optimizer: Any = tilestep.SGD(model.parameters(), lr=0.1, momentum=0.9)  # type: ignore[attr-defined]
    if way == "shard":
        return tilestep.shard(optimizer, model)
    return optimizer if way == "plain" else tilestep.overlap(optimizer, model, during=way)  # type: ignore[arg-type]


def train(model: nn.Module, optimizer: Any) -> None:
    model(torch.arange(12.0).view(3, 4) / 8).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("before", "way"), [("shard", "plain"), ("shard", "forward"), ("backward", "plain")])
def test_another_optimizer_has_the_gradients(before: str, way: str, one_rank: None) -> None:
    """Its steps did nothing, and said nothing."""
    model = nn.Linear(4, 2)
    first = made(model, before)
    train(model, first)
    second = made(model, way)
    with pytest.raises(tilestep.GradientError, match="another sharded, overlapped or offloaded optimizer"):
        train(model, second)
    if before == "backward":
        first.step()
    del first
    start = [param.detach().clone() for param in model.parameters()]
    train(model, second)
    assert not any(map(torch.equal, model.parameters(), start))


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (("shard", "at the step"), "shard.* has reduced it"),
        (("plain", "backward"), "overlap.* has consumed it"),
        (("plain", "streamed gradients"), "offload.* has moved it"),
        (("plain", "gradients on the host"), "offload.* has moved it"),
    ],
)
def test_gradients_that_are_taken_cannot_be_clipped(way: tuple[str, str], message: str, one_rank: None) -> None:
    model = nn.Linear(4, 2)
    optimizer = attached(made(model, "plain"), model, *way)
    for _ in range(2):
        model(torch.ones(3, 4)).square().mean().backward()
        for clip in (torch.nn.utils.clip_grad_norm_, tilestep.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
            with pytest.raises(tilestep.GradientError, match=f"parameter 0 cannot be clipped now: {message}"):
                clip(model.parameters(), 1.0)
        optimizer.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


TAKING = {"backward", "shard"}
WAYS = [
    ways for ways in itertools.product(("plain", "forward", *sorted(TAKING)), repeat=2) if TAKING.intersection(ways)
]


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("order", [(1, 0), (0, 0)])
def test_turns_after_steps_of_the_first_are_right_or_refused(
    ways: tuple[str, str], order: tuple[int, ...], one_rank: None
) -> None:
    """One that had stepped before the other came did nothing from then on; two that took gradients shared them out."""
    results = []
    for pair in (("plain", "plain"), ways):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizers = [made(model, pair[0])]
        for _ in range(2):
            train(model, optimizers[0])
        optimizers.append(made(model, pair[1]))
        try:
            for turn in order:
                train(model, optimizers[turn])
        except tilestep.GradientError as error:
            assert "optimizer of these parameters" in str(error) or "two optimizers consume" in str(error)
            return
        for optimizer in optimizers:
            getattr(optimizer, "wait", getattr(optimizer, "synchronize", int))()
        results.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("way", ["plain", "forward", "shard"])
def test_gradients_of_some_parameters_that_another_optimizer_has_are_missed(way: str, one_rank: None) -> None:
    """Beside parameters of its own, which it updated."""
    model, extra = nn.Linear(4, 2), nn.Linear(4, 2)
    both = nn.ModuleList([model, extra])
    # Of two sharded ones the later has the gradients.
    second = made(both, way) if way == "shard" else None
    first = made(model, "shard")
    second = second or made(both, way)
    with pytest.raises(tilestep.GradientError, match="another sharded, overlapped or offloaded optimizer"):
        for _ in range(2):
            (model(torch.ones(3, 4)) + extra(torch.ones(3, 4))).sum().backward()
            second.step()
    assert first is not None


@pytest.mark.parametrize("ways", [*itertools.product(("plain", "forward"), repeat=2)])
def test_optimizers_that_leave_gradients_take_turns(ways: tuple[str, str]) -> None:
    results = []
    for pair in (ways, ("plain", "plain")):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizers = [made(model, way) for way in pair]
        for step in range(4):
            train(model, optimizers[step % 2])
        results.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *results))
