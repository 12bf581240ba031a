"""Updates that overlap backward or the next forward, with their state on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offloaded_pairs import on_host, streamed
from torch import nn

import tilestep


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Linear(300, 190), nn.LayerNorm(190), nn.Linear(190, 1))


def adamw(net: nn.Module) -> tilestep.Optimizer:
    return tilestep.AdamW(net.parameters(), lr=1e-2)


def clipped(net: nn.Module) -> tilestep.Optimizer:
    return tilestep.AdamW(net.parameters(), lr=1e-2, max_grad_norm=0.3)


@pytest.mark.parametrize("make", [adamw, clipped], ids=["plain", "clipped"])
@pytest.mark.parametrize("during", ["backward", "forward"])
def test_overlapped_updates_are_streamed(during: Any, make: Any) -> None:
    plain, moved = model(), model()
    reference = make(plain)
    optimizer = tilestep.overlap(streamed(50_000)(make(moved)), moved, during=during, bucket_cap_mb=0.1)
    assert isinstance(optimizer, tilestep.OffloadedOptimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        data = torch.randn(5, 7, generator=generator)
        for net, each in ((plain, reference), (moved, optimizer)):
            net(data).square().mean().backward()
            each.step()
            each.zero_grad()
    saved, wanted = optimizer.state_dict(), reference.state_dict()
    for key, state in wanted["state"].items():
        for name, value in state.items():
            assert torch.equal(saved["state"][key][name], value), name
    for left, right in zip(plain.state_dict().values(), moved.state_dict().values()):
        assert torch.equal(left, right)


def test_the_order_of_wrappers_is_said() -> None:
    net = model()
    overlapped = tilestep.overlap(adamw(net), net)
    with pytest.raises(tilestep.OffloadError, match="offload it first, with where='gpu', then overlap it"):
        tilestep.offload(overlapped)
    net = model()
    with pytest.raises(ValueError, match="to overlap them, offload it with where='gpu'"):
        tilestep.overlap(on_host()(adamw(net)), net)
