"""Param groups that are added to a sharded optimizer, and optimizers that never have more than a rank's part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_twins import TINY, Elementwise, Pair, inputs, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tilestep


def adamw(params: Any, **options: Any) -> tilestep.Optimizer:
    return tilestep.AdamW(params, lr=0.1, eps=0.1, **options)  # type: ignore[attr-defined]


def loss_of(data: torch.Tensor) -> Callable[[nn.Module], torch.Tensor]:
    return lambda model: (model(data) * data).sum()


def first_six(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())[:6]


def thaw(pair: Pair, places: list[int], **options: Any) -> None:
    """Let further parameters train, in a group of their own."""
    for model, optimizer in ((pair.model, pair.optimizer), (pair.twin, pair.twin_optimizer)):
        params = [list(model.parameters())[place] for place in places]
        for param in params:
            param.requires_grad_(True)
        optimizer.add_param_group({"params": params, **options})


def groups_of_thawed_parameters() -> None:
    for options in ({}, {"grad_buffer": "bucket", "param_buffer": "bucket"}, {"overlap_param_sync": False}):
        for size in (TINY, 25.0):
            model = Elementwise()
            for param in list(model.parameters())[6:]:
                param.requires_grad_(False)
            pair = Pair(model, adamw, first_six, bucket_cap_mb=size, **options)
            for places in ([10, 7], [6, 8, 9]):
                for _ in range(2):
                    train(pair, [loss_of(inputs(5, 7)), loss_of(inputs(5, 7))])
                    pair.compare()
                train(pair, [loss_of(inputs(5, 7))])  # parameters are on their way when a group is added
                # Gradients that are zeros, or set by hand, may be there already.
                pair.optimizer.zero_grad(set_to_none=size == TINY)
                thaw(pair, places, lr=0.05, weight_decay=0.3)
            assert len(pair.optimizer.param_groups) == 3
            for _ in range(3):
                train(pair, [loss_of(inputs(5, 7)), loss_of(inputs(5, 7))])
                pair.compare()
            pair.compare_states()
            saved = pair.optimizer.full_state_dict()
            pair.optimizer.load_state_dict(saved)
            train(pair, [loss_of(inputs(5, 7))])
            pair.compare()


def writes_before_a_group_is_added_reach_masters() -> None:
    """A remainder belongs to the value that it was made for, and the versions of writes are counted anew."""
    model = Elementwise().bfloat16()
    for param in list(model.parameters())[6:]:
        param.requires_grad_(False)
    pair = Pair(model, lambda params: adamw(params, master_weights="remainder"), first_six, bucket_cap_mb=TINY)
    train(pair, [loss_of(inputs(5, 7).bfloat16())])
    pair.optimizer.wait()
    with torch.no_grad():
        for written in (pair.model, pair.twin):
            next(written.parameters()).mul_(2)
    thaw(pair, [10])
    train(pair, [loss_of(inputs(5, 7).bfloat16())])
    own, twin = pair.optimizer.full_state_dict(), pair.twin_optimizer.state_dict()
    assert torch.equal(own["state"][0]["remainder_param"], twin["state"][0]["remainder_param"])


def groups_with_another_rule_and_ranks_without_pieces() -> None:
    """One matrix belongs to one rank; the other rank's first piece comes with the second group."""

    def make(params: Any) -> Any:
        return tilestep.Muon(params, lr=0.02, max_grad_norm=1.0)  # type: ignore[attr-defined]

    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4))
    model[1].requires_grad_(False)
    pair = Pair(model, make, lambda module: [module[0].weight])

    def loss(data: torch.Tensor) -> Callable[[nn.Module], torch.Tensor]:
        return lambda model: model(data).square().sum()

    train(pair, [loss(inputs(3, 6))])
    thaw(pair, [2], rule="AdamW", lr=0.1)
    for places in ([1], []):
        for _ in range(2):
            train(pair, [loss(inputs(3, 6))])
            pair.compare(rtol=1e-5, atol=1e-6)
        if places:
            thaw(pair, places, lr=0.01)
    rules = [pair.optimizer.rule_of(group).name for group in pair.optimizer.param_groups]
    assert rules == ["Muon", "AdamW", "Muon"]


def what_cannot_be_added() -> None:
    model = Elementwise()
    params = list(model.parameters())
    optimizer = tilestep.shard(adamw(params[:6]), model, bucket_cap_mb=TINY)
    other = dist.get_rank() == 1

    def refused(group: dict[str, Any], pattern: str) -> None:
        with pytest.raises((ValueError, RuntimeError), match=pattern):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1 and len(optimizer.param_groups[0]["params"]) == 6

    refused({"params": [nn.Parameter(torch.zeros(2))]}, "does not belong to the model")
    refused({"params": params[5:7]}, "more than one parameter group")
    refused({"params": params[6:7] * 2}, "list it once")
    refused({"params": params[6:7], "lr": -1.0 if other else 0.1}, r"Invalid lr|rank 1 cannot add.*Invalid lr")
    refused({"params": params[6:7], "lr": 0.2 if other else 0.1}, r"ranks disagree.*lr=0\.1")
    refused({"params": params[7:8] if other else params[6:7]}, "ranks disagree")
    model(inputs(5, 7)).sum().backward()
    refused({"params": params[6:7]}, "parameters have gradients")
    optimizer.zero_grad()
    before = [param.detach().clone() for param in params]
    model(inputs(5, 7)).sum().backward()
    optimizer.step()
    optimizer.wait()
    moved = [not torch.equal(old, new) for old, new in zip(before, params)]
    assert moved == [True] * 6 + [False] * 5


def parameters_that_ranks_have_changed_begin_as_the_first_rank_has_them() -> None:
    """While nothing was trained of them, and though they are the model's since `shard`."""
    model = Elementwise()
    optimizer = tilestep.shard(adamw(first_six(model)), model, bucket_cap_mb=TINY)
    late = nn.Parameter(torch.full((3,), float(dist.get_rank())))
    model.register_parameter("late", late)
    with torch.no_grad():
        model.weights[8].add_(dist.get_rank())
    optimizer.add_param_group({"params": [model.weights[8], late]})
    for param in (model.weights[8], late):
        first = param.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, param)
    assert late.tolist() == [0.0] * 3
    (model(inputs(5, 7)).sum() + late.square().sum() + late.sum()).backward()
    optimizer.step()
    optimizer.wait()
    assert (late < 0).all() and int(optimizer.full_state_dict()["state"][7]["step"]) == 1


def no_group_is_added_to_weights_to_evaluate() -> None:
    model = Elementwise()
    averages = tilestep.Optimizer(first_six(model), tilestep.ema(tilestep.registry["SGD"], 0.5), lr=0.1)
    optimizer = tilestep.shard(averages, model, bucket_cap_mb=TINY)
    model(inputs(5, 7)).sum().backward()
    optimizer.step()
    group = {"params": list(model.parameters())[6:]}
    with optimizer.averaged(), pytest.raises(RuntimeError, match=r"call train\(\) before add_param_group"):
        optimizer.add_param_group(group)
    optimizer.add_param_group(group)
    model(inputs(5, 7)).sum().backward()
    optimizer.step()
    assert len(optimizer.full_state_dict()["state"]) == 11


class Sizes(TorchDispatchMode):
    """Counts the float32 elements of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "empty" in func._schema.name or "zeros" in func._schema.name:
            counts = isinstance(made, torch.Tensor) and made.dtype is torch.float32 and not made.is_meta
            self.elements += made.numel() if counts else 0
        return made


def optimizers_that_never_have_all_of_their_state() -> None:
    results = []
    for make in (True, False):
        torch.manual_seed(0)
        model = Elementwise(8, 4096).bfloat16()
        elements = sum(param.numel() for param in model.parameters())

        def build(model: nn.Module = model) -> tilestep.Optimizer:
            return adamw(model.parameters(), master_weights=True)

        sizes = Sizes()
        with sizes:
            optimizer = tilestep.shard(build if make else build(), model)
        for step in range(3):
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.5 + step)
            with sizes:
                optimizer.step()
        results.append((sizes.elements, optimizer, model))
    # A master and two moments, for half of the elements on each of two ranks: state begins when the pieces are there.
    for count, _, _ in results:
        assert 3 * elements / 2 <= count <= 1.05 * 3 * elements / 2
    (_, left, mine), (_, right, other) = results
    assert all(map(torch.equal, mine.parameters(), other.parameters()))
    for one, two in zip(left.full_state_dict()["state"].values(), right.full_state_dict()["state"].values()):
        assert all(torch.equal(one[name], two[name]) for name in two)
    with pytest.raises(TypeError, match="requires a tilestep optimizer"):
        tilestep.shard(lambda: torch.optim.SGD(mine.parameters()), mine)  # type: ignore[arg-type, return-value]


CHECKS = [
    groups_of_thawed_parameters,
    writes_before_a_group_is_added_reach_masters,
    groups_with_another_rule_and_ranks_without_pieces,
    what_cannot_be_added,
    parameters_that_ranks_have_changed_begin_as_the_first_rank_has_them,
    no_group_is_added_to_weights_to_evaluate,
    optimizers_that_never_have_all_of_their_state,
]


test_two_ranks = each_passes(CHECKS, 2)
