"""This rank's pieces of a sharded optimizer with their state on the host, on two gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from offloaded_pairs import streamed
from rank_processes import each_passes
from sharded_twins import TINY, Elementwise, Pair, inputs, train
from torch import nn

import tilestep


def adamw(params: Any) -> tilestep.Optimizer:
    return tilestep.AdamW(params, lr=0.01, eps=0.1)


def loss_of(data: torch.Tensor) -> Callable[[nn.Module], torch.Tensor]:
    return lambda model: (model(data) * data).sum()


def offloaded(pair: Pair) -> Any:
    before = pair.optimizer
    pair.optimizer = streamed(64, 2)(pair.optimizer)
    assert pair.optimizer is before
    return pair.optimizer


def checkpoints_come_and_go() -> None:
    pair = Pair(Elementwise(size=50), adamw, bucket_cap_mb=TINY)
    optimizer = offloaded(pair)
    train(pair, [loss_of(inputs(5, 50))])
    saved = optimizer.full_state_dict()
    train(pair, [loss_of(inputs(5, 50))])
    optimizer.load_state_dict(saved)
    pair.twin_optimizer.load_state_dict(saved)
    home = optimizer.memory
    for state in optimizer.state.values():
        assert all(home.contains(value, value) for name, value in state.items() if name != "step")
    pair.compare_states()
    with torch.no_grad():
        for mine, theirs in zip(pair.model.parameters(), pair.twin.parameters()):
            mine.copy_(theirs)
    train(pair, [loss_of(inputs(5, 50))])
    pair.compare()


def the_order_of_wrappers_is_said() -> None:
    model = Elementwise()
    optimizer = streamed()(adamw(model.parameters()))
    with pytest.raises(ValueError, match="shard it first, then offload it"):
        tilestep.shard(optimizer, model)
    sharded = tilestep.shard(adamw(model.parameters()), model)
    with pytest.raises(tilestep.OffloadError, match="keeps its gradients on the device"):
        tilestep.offload(sharded, gradients=True)
    assert tilestep.offload(sharded).offload_report().where == "here"


CHECKS = [
    checkpoints_come_and_go,
    the_order_of_wrappers_is_said,
]


test_two_ranks = each_passes(CHECKS, 2)
