"""The same training with two optimizers: parameters, gradients and comparisons that every test here needs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

SHAPES = [(), (5,), (4, 6), (2, 3, 5), (0,), (3, 2, 3, 3)]
FLAGS = ("foreach", "capturable", "differentiable", "fused")


def make_params(shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def twins(params: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad) for param in params]


def set_gradients(*models: Sequence[torch.Tensor], step: int = 0) -> None:
    """Give every model the same gradients, drawn for this step."""
    for params in models:
        generator = torch.Generator().manual_seed(1000 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(
    pairs: Sequence[tuple[torch.optim.Optimizer, Sequence[torch.Tensor]]], steps: range, between: Callable | None = None
) -> None:
    for step in steps:
        for optimizer, params in pairs:
            set_gradients(params, step=step)
            optimizer.step()
        if between is not None:
            between(step)


def assert_close(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], rtol: float = 2e-5) -> None:
    for index, (left, right) in enumerate(zip(mine, theirs, strict=True)):
        torch.testing.assert_close(
            left.detach(), right.detach(), rtol=rtol, atol=rtol, msg=lambda text, i=index: f"tensor {i}: {text}"
        )


def everything(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A copy of all that a failed call must leave as it was."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {
        "params": [param.detach().clone() for param in params],
        "state": [copy.deepcopy(dict(optimizer.state.get(param, {}))) for param in params],
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        "ids": [id(param) for param in params],
    }


def assert_unchanged(optimizer: torch.optim.Optimizer, before: dict[str, Any]) -> None:
    now = everything(optimizer)
    assert now["groups"] == before["groups"] and now["ids"] == before["ids"]
    assert all(map(torch.equal, now["params"], before["params"]))
    for mine, old in zip(now["state"], before["state"], strict=True):
        assert mine.keys() == old.keys()
        assert all(torch.equal(mine[key], old[key]) for key in mine)


def torch_lists() -> Any:
    return pytest.importorskip(
        "torch.testing._internal.common_optimizers", reason="torch's own test lists need the package expecttest"
    )


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(plain(entry) for entry in value) if isinstance(value, tuple) else value
