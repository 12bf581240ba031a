"""Optimizers of the same parameters in turn: one that takes gradients in backward leaves the other none."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

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
    with pytest.raises(tilestep.GradientError, match="another optimizer of these parameters"):
        train(model, second)
    if before == "backward":
        first.step()
    del first
    start = [param.detach().clone() for param in model.parameters()]
    train(model, second)
    assert not any(map(torch.equal, model.parameters(), start))


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
