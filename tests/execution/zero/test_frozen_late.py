"""Parameters that are frozen where others would not expect it: ranks that have updated them still send them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from rank_processes import each_passes
from sharded_twins import TINY, Pair, inputs, sgd
from torch import nn

import tilestep
from tilestep.errors import GradientError
from tilestep.rules.compose import ema


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def averaged_sgd(params: Any) -> tilestep.Optimizer:
    return tilestep.Optimizer(params, ema(tilestep.registry["SGD"], 0.5), lr=0.125)


def backward(pair: Pair) -> None:
    data = inputs(3, 4)
    pair.backward(lambda model: model(data).square().sum())


def train(pair: Pair, steps: int = 1) -> None:
    for _ in range(steps):
        backward(pair)
        pair.step()


def freeze(pair: Pair, *, frozen: bool = True) -> None:
    for model in (pair.model, pair.twin):
        model[1].requires_grad_(not frozen)


def between_backward_and_step() -> None:
    for buffer in ("contiguous", "bucket"):
        pair = Pair(layers(), sgd, bucket_cap_mb=TINY, grad_buffer=buffer)
        train(pair, 3)
        before = pair.twin[1].weight.clone()
        backward(pair)
        freeze(pair)
        pair.step()
        assert not torch.equal(before, pair.twin[1].weight)
        pair.compare(rtol=1e-5, atol=1e-6)
        # Without gradients it stays as it is, whether others go on or not.
        train(pair, 2)
        freeze(pair, frozen=False)
        train(pair, 2)
        pair.compare(rtol=1e-5, atol=1e-6)


def while_gradients_are_dropped_here_alone() -> None:
    pair = Pair(layers(), sgd, bucket_cap_mb=TINY)
    train(pair, 2)
    backward(pair)
    freeze(pair)
    # Whoever drops its gradients has nothing to update, and is sent what the others have updated.
    if torch.distributed.get_rank() == 0:
        pair.optimizer.zero_grad()
    pair.optimizer.step()
    pair.optimizer.wait()
    for param in pair.model.parameters():
        first = param.detach().clone()
        torch.distributed.broadcast(first, 0)
        assert torch.equal(first, param)


def compare_weights_to_evaluate(pair: Pair, *, training: bool) -> None:
    for optimizer in (pair.optimizer, pair.twin_optimizer):
        optimizer.train(training)
    pair.compare(rtol=1e-5, atol=1e-6)


def around_weights_to_evaluate() -> None:
    pair = Pair(layers(), averaged_sgd, bucket_cap_mb=TINY)
    train(pair, 3)
    freeze(pair)
    train(pair)
    compare_weights_to_evaluate(pair, training=False)
    compare_weights_to_evaluate(pair, training=True)
    freeze(pair, frozen=False)
    train(pair)
    compare_weights_to_evaluate(pair, training=False)
    freeze(pair)
    compare_weights_to_evaluate(pair, training=True)
    freeze(pair, frozen=False)
    train(pair, 2)
    pair.compare(rtol=1e-5, atol=1e-6)


def with_gradients_that_no_message_has_taken() -> None:
    for grad_dtype in (None, torch.float64):
        pair = Pair(layers(), sgd, bucket_cap_mb=TINY, grad_sync_dtype=grad_dtype)
        train(pair, 2)
        with pair.optimizer.no_sync():
            backward(pair)
        freeze(pair)
        backward(pair)
        before = pair.model[1].weight.clone()
        with pytest.raises(GradientError, match=r"1\.bias has a gradient and is frozen"):
            pair.optimizer.step()
        assert torch.equal(before, pair.model[1].weight)
        pair.optimizer.zero_grad()
        pair.twin_optimizer.zero_grad()
        train(pair, 2)
        pair.compare(rtol=1e-5, atol=1e-6)


def one_that_another_rank_alone_has_used() -> None:
    for overlaps in (True, False):
        for accumulates in (False, True):
            pair = Pair(layers(), sgd, overlap_grad_sync=overlaps)
            train(pair)
            data, uses = inputs(3, 4), torch.distributed.get_rank() == 0

            def loss(model: Any, data: torch.Tensor = data, uses: bool = uses) -> torch.Tensor:
                hidden = model[0](data)
                return model[3](model[2](model[1](hidden) if uses else hidden)).square().sum()

            before = pair.twin[1].weight.clone()
            pair.backward(loss, sync=not accumulates)
            freeze(pair)
            if accumulates:
                pair.backward(loss)
            pair.step()
            assert not torch.equal(before, pair.twin[1].weight)
            pair.compare(rtol=1e-5, atol=1e-6)
            train(pair)
            freeze(pair, frozen=False)
            train(pair)
            pair.compare(rtol=1e-5, atol=1e-6)


def thawed_between_any_passes() -> None:
    """Ranks agree at the step on what trains: gradients of what is thawed before are kept until then."""
    for buffer, grad_dtype, syncs in itertools.product(("contiguous", "bucket"), (None, torch.float64), (True, False)):
        model = layers()
        model[1].requires_grad_(False)
        pair = Pair(model, sgd, bucket_cap_mb=TINY, grad_buffer=buffer, grad_sync_dtype=grad_dtype)
        train(pair, 2)
        data = inputs(3, 4)
        pair.backward(lambda model, data=data: model(data).square().sum(), sync=syncs)
        freeze(pair, frozen=False)
        for _ in range(2):
            data = inputs(3, 4)
            pair.backward(lambda model, data=data: model(data).square().sum(), sync=True)
        pair.step()
        pair.compare(rtol=1e-5, atol=1e-6)
        freeze(pair)
        train(pair)
        freeze(pair, frozen=False)
        backward(pair)
        freeze(pair)
        pair.step()
        freeze(pair, frozen=False)
        train(pair)
        if torch.distributed.get_rank():
            pair.optimizer.zero_grad()
        train(pair, 2)
        pair.compare(rtol=1e-5, atol=1e-6)


test_two_ranks = each_passes(
    [
        between_backward_and_step,
        while_gradients_are_dropped_here_alone,
        around_weights_to_evaluate,
        with_gradients_that_no_message_has_taken,
        one_that_another_rank_alone_has_used,
        thawed_between_any_passes,
    ],
    2,
)
