"""Ranks that are told to step differently after the start raise, all of them, before anything is updated."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_twins import Elementwise
from torch import nn

import tilestep


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))


def training(**options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Elementwise()
    made = tilestep.AdamW(model.parameters(), **{"lr": 0.1, **options})  # type: ignore[attr-defined]
    return model, tilestep.shard(made, model)


def backward(model: nn.Module, step: int) -> None:
    model(batch(step)).square().mean().backward()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def refused(pattern: str, key: str, value: Any, restored: Any, *, between: bool = False, **options: Any) -> None:
    """`value` on rank 1 alone; before backward, or between backward and step."""
    model, optimizer = training(**options)
    (group,) = optimizer.param_groups
    for step in range(2):
        backward(model, step)
        optimizer.step()
    optimizer.wait()
    if between:
        backward(model, 2)
    if dist.get_rank() == 1:
        group[key] = value
    if not between:
        backward(model, 2)
    before = values(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=pattern):
            optimizer.step()
    optimizer.wait()
    assert all(map(torch.equal, values(model), before))
    group[key] = restored
    optimizer.step()
    optimizer.wait()
    assert not all(map(torch.equal, values(model), before))
    sums = torch.stack([param.detach().double().sum() for param in model.parameters()])
    others = sums.clone()
    dist.broadcast(others, 0)
    assert torch.equal(sums, others)


def other_rates() -> None:
    pattern = r"rank 0 has group 0 lr=0\.1; rank 1 has group 0 lr=0\.05; nothing was updated"
    for between in (False, True):
        refused(pattern, "lr", 0.05, 0.1, between=between)
    tensor = torch.tensor(0.2)
    refused("rank 0 has group 0 lr=.*; rank 1 has group 0 lr=", "lr", tensor, 0.1)


def other_functions_of_the_step() -> None:
    def falling(step: Any) -> Any:
        return 0.1 / step

    def standing(step: Any) -> Any:
        return 0.1 + 0 * step

    model, optimizer = training(lr=falling)
    for step in range(2):
        backward(model, step)
        optimizer.step()
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = standing
    backward(model, 2)
    with pytest.raises(ValueError, match=r"rank 0 has group 0 lr=.*falling; rank 1 has group 0 lr=.*standing"):
        optimizer.step()


def a_rate_tensor_that_is_written_to() -> None:
    model, optimizer = training()
    rate = torch.tensor(0.1)
    optimizer.param_groups[0]["lr"] = rate
    for step in range(3):
        backward(model, step)
        if step == 2 and dist.get_rank() == 1:
            rate.fill_(0.2)
        if step == 2:
            with pytest.raises(ValueError, match="ranks disagree"):
                optimizer.step()
        else:
            optimizer.step()


def betas_that_are_written_to() -> None:
    """Tensors in a tuple, and a list in which one is replaced: the tuple and the list stay the same objects."""
    for kind in (tuple, list):
        model, optimizer = training()
        betas = kind((torch.tensor(0.9), torch.tensor(0.99)) if kind is tuple else (0.9, 0.99))
        optimizer.param_groups[0]["betas"] = betas
        for step in range(2):
            backward(model, step)
            optimizer.step()
        if dist.get_rank() == 1 and kind is tuple:
            betas[0].fill_(0.5)
        elif dist.get_rank() == 1:
            betas[0] = 0.5
        backward(model, 2)
        with pytest.raises(ValueError, match="ranks disagree"):
            optimizer.step()


def a_clip_that_one_rank_has_not() -> None:
    """It would wait for the other's norm."""
    for between in (False, True):
        refused("group 0 max_grad_norm=", "max_grad_norm", None, 1.0, between=between, max_grad_norm=1.0)
        refused("group 0 max_grad_norm=", "max_grad_norm", 1.0, None, between=between)


def a_scheduler_of_one_rank() -> None:
    model, optimizer = training()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    with pytest.raises(ValueError, match=r"rank 0 has group 0 lr=.*; rank 1 has group 0 lr="):
        for step in range(4):
            backward(model, step)
            optimizer.step()
            scheduler.step(float(step) if dist.get_rank() == 0 else -float(step))


def frozen_or_thawed_on_one_rank() -> None:
    """A rank sent other messages than the others: gloo ended a process, and a part of a parameter was not updated."""
    for (other, frozen), cap, steps in itertools.product(((3, True), (5, False)), (71 / 2**20, None), (2, 0)):
        torch.manual_seed(0)
        model = Elementwise()
        params = list(model.parameters())
        params[5].requires_grad_(False)
        optimizer = tilestep.shard(tilestep.AdamW(params, lr=0.1), model, bucket_cap_mb=cap)  # type: ignore[attr-defined]
        for step in range(steps):
            backward(model, step)
            optimizer.step()
        if dist.get_rank() == 1:
            params[other].requires_grad_(not frozen)
        backward(model, 2)
        before = values(model)
        there, here = ("trains", "frozen") if frozen else ("frozen", "trains")
        said = (
            rf"rank 0 has parameter {other} of group 0 {there}; rank 1 has parameter {other} of group 0 {here}; nothing"
        )
        for _ in range(2):
            with pytest.raises(ValueError, match=said):
                optimizer.step()
        assert all(map(torch.equal, values(model), before))
        params[other].requires_grad_(True)
        optimizer.step()
        optimizer.wait()
        changed = [not torch.equal(*pair) for pair in zip(values(model), before)]
        assert changed == [other == 5 or place != 5 for place in range(len(params))]
        sums = torch.stack([param.detach().double().sum() for param in params])
        others = sums.clone()
        dist.broadcast(others, 0)
        assert torch.equal(sums, others)


def schedulers_of_all_ranks() -> None:
    """And steps of several backwards, of which ranks use other parameters, or of none."""
    model, optimizer = training(max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(6):
        if step == 3:
            with optimizer.no_sync():
                backward(model, 10)
        if step != 4:
            backward(model, step)
        if step == 2:
            optimizer.zero_grad()
        optimizer.step()
        scheduler.step()


test_two_ranks = each_passes(
    [
        other_rates,
        other_functions_of_the_step,
        a_rate_tensor_that_is_written_to,
        betas_that_are_written_to,
        a_clip_that_one_rank_has_not,
        a_scheduler_of_one_rank,
        frozen_or_thawed_on_one_rank,
        schedulers_of_all_ranks,
    ],
    2,
)
