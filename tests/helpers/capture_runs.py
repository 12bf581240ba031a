"""What the captures are made of: a device or its simulation, parameters, gradients, and comparisons to the bit."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from simulated_graph import Simulation

import tilestep

SHAPES = [(5, 3), (), (700,), (2, 3, 4)]
Params = list[torch.nn.Parameter]
SIMULATED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if SIMULATED else "cuda"


@pytest.fixture(autouse=True)
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Simulation(monkeypatch) if SIMULATED else None


def capturing() -> Any:
    """A capture by hand that is never replayed."""
    return torch.cuda.graph(torch.cuda.CUDAGraph())


def make(seed: int = 0, dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes]


def fill_gradients(params: Params, step: int) -> None:
    """New values where the gradients are."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        value = torch.randn(param.shape, generator=generator).to(param)
        param.grad = value if param.grad is None else param.grad.copy_(value)


def equal(left: Params, right: Params) -> None:
    for mine, other in zip(left, right, strict=True):
        assert torch.equal(mine, other)


def same_state(left: torch.optim.Optimizer, right: torch.optim.Optimizer, mine: Params, other: Params) -> None:
    for one, two in zip(mine, other, strict=True):
        for key, value in left.state[one].items():
            assert torch.equal(value, right.state[two][key]), key


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def ready(**options: Any) -> tuple[Params, tilestep.Optimizer, tilestep.CapturedStep]:
    params = make()
    optimizer = tilestep.AdamW(params, lr=0.1, **options)
    fill_gradients(params, 0)
    captured = tilestep.capture(optimizer)
    captured.replay()
    return params, optimizer, captured


def move_one(params: Params, optimizer: Any) -> None:
    params[2].data = params[2].data.clone()


def refused(reason: str) -> Any:
    return pytest.raises(tilestep.CaptureError, match=reason)
