"""Products of an update are those of its operands also where it runs under autocast, in 16 bits for a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import tilestep
from tilestep.backends.eager import EagerPasses
from tilestep.optimizer import build


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(data))).square().mean()


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def trained(make: Callable[[nn.Module], Any], stepping: Any = nullcontext, reading: Any = nullcontext) -> nn.Module:
    """A model after some steps, and a look at it after each."""
    model = Net()
    optimizer = make(model)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        model(torch.randn(4, 6, generator=generator)).backward()
        with stepping():
            optimizer.step()
        optimizer.zero_grad()
        with reading(), torch.no_grad():
            model(torch.ones(2, 6))
    return model


def soap(model: nn.Module) -> tilestep.Optimizer:
    return tilestep.SOAP(model.parameters(), lr=0.01)  # type: ignore[attr-defined]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for param, wanted in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(param, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("eager", [False, True], ids=["kernels", "eager"])
def test_a_step_under_autocast(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if eager:
        monkeypatch.setattr(build, "build_passes", lambda device, *arguments: EagerPasses(*arguments))
    assert_same(trained(soap, stepping=autocast), trained(soap))


def test_an_update_that_runs_when_a_forward_under_autocast_needs_it() -> None:
    def overlapped(model: nn.Module) -> Any:
        return tilestep.overlap(soap(model), model, "forward", bucket_cap_mb=100 / 2**20)

    assert_same(trained(overlapped, reading=autocast), trained(overlapped))
