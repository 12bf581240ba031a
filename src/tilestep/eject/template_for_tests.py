"""Tests of an ejected file, compared with torch and float64; `assembly.py` fills in the names."""

# {header
# header}
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from . import template as ejected

SHAPES = [(7,), (64, 130), (3, 5, 33), (5000,), ()]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
# {limit
DTYPES = [torch.float32]
LIMIT: dict[str, Any] = {}
TOLERANCE = 0.0
# limit}


def parameters(device: str, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Parameters that are equal in every call."""
    random = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=random).to(device, dtype)) for shape in SHAPES]


def set_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    """Set gradients that depend only on the step."""
    random = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=random).to(param.device, param.dtype)


class Float64:
    """The formula in float64, with unrounded states."""

    def __init__(self, params: list[torch.nn.Parameter], group: dict[str, Any]) -> None:
        self.group = group
        self.kinds = [ejected.kind_of(param) for param in params]
        self.values = [self.first(param, kind) for param, kind in zip(params, self.kinds)]

    def first(self, param: torch.nn.Parameter, kind: Any) -> dict[str, torch.Tensor]:
        """The initial values of buffers and states."""
        part = param.detach().cpu().double()
        values = {}
        for name, init, *_ in kind.buffers:
            start = self.group.get(str(init), init)
            shape: tuple[int, ...] = tuple(part.shape)
            is_param = start == "param" or name == "param"
            values[name] = part.clone() if is_param else torch.full(shape, float(start)).double()
        values["step"] = torch.zeros((), dtype=torch.float64)
        for name, start, _ in getattr(kind, "scalars", ()):
            values[name] = torch.tensor(float(self.group.get(start, start)), dtype=torch.float64)
        return values

    def step(self, gradients: list[torch.Tensor]) -> None:
        """One step with these gradients."""
        grads = [grad.cpu().double() for grad in gradients]
        scale: Any = 1.0
        # {clip
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        scale = torch.clamp(self.group["max_grad_norm"] / (norm + 1e-6), max=1.0)
        # clip}
        results = []
        for kind, values, grad in zip(self.kinds, self.values, grads):
            values["step"] += 1
            numbers = ejected.numbers_of(self.group).items()
            given: dict[str, Any] = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers}
            given |= {**values, "grad": grad, "gradient_scale": scale, "shape": grad.shape, "machine_epsilon": 2.0**-23}
            results.append(kind.formula(**given))
        # {across
        results = ejected.together(results)
        # across}
        for values, result in zip(self.values, results):
            values.update(result)


def error(param: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to numbers above 1."""
    other = other.detach().cpu().double()
    return ((param.detach().cpu().double() - other).abs() / other.abs().clamp(min=1)).max().item()


@pytest.mark.parametrize("device", DEVICES)
def test_steps_agree_with_the_formula_in_float64(device: str) -> None:
    params = parameters(device, DTYPES[-1])
    optimizer = ejected.Ejected(params, **LIMIT)
    referee = Float64(params, optimizer.param_groups[0])
    for step in range(4):
        set_gradients(params, step)
        optimizer.step()
        referee.step([param.grad for param in params if param.grad is not None])
    tolerance = TOLERANCE if params[0].dtype is torch.float32 else 0.03
    assert max(error(param, values["param"]) for param, values in zip(params, referee.values)) < tolerance


# {torch
@pytest.mark.parametrize("device", DEVICES)
def test_steps_agree_with_torch(device: str) -> None:
    if torch.float32 not in DTYPES:
        pytest.skip("torch has no masters")
    ours, theirs = parameters(device, torch.float32), parameters(device, torch.float32)
    optimizer = ejected.Ejected(ours, **LIMIT)
    group = {name: value for name, value in optimizer.defaults.items() if name != "max_grad_norm"}
    referee = torch.optim.Ejected(theirs, **group)  # type: ignore[attr-defined]
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        if LIMIT:
            torch.nn.utils.clip_grad_norm_(theirs, LIMIT["max_grad_norm"])
        optimizer.step()
        referee.step()
    assert max(map(error, ours, theirs)) < TOLERANCE


# torch}
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_continues_with_equal_bits(device: str, dtype: torch.dtype) -> None:
    params = parameters(device, dtype)
    optimizer = ejected.Ejected(params, **LIMIT)
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    other = ejected.Ejected(others, **LIMIT)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param in (params, others):
        set_gradients(param, 2)
    optimizer.step()
    other.step()
    assert all(map(torch.equal, params, others))


@pytest.mark.skipif(len(DEVICES) < 2, reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_agree_with_the_steps_of_a_cpu(dtype: torch.dtype) -> None:
    runs = []
    for device in DEVICES:
        params = parameters(device, dtype)
        optimizer = ejected.Ejected(params, **LIMIT)
        for step in range(4):
            set_gradients(params, step)
            optimizer.step()
        runs.append(params)
    assert max(map(error, *runs)) < (1e-5 if dtype is torch.float32 else 0.05)
