"""Gradients in host memory with updates on one GPU, which reads them there: the device's bits, less memory, no waits.

python -m pytest tests/gpu/test_kept_gradients_gpu.py
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from offloaded_pairs import streamed
from rank_processes import each_passes
from synchronization import no_synchronization
from test_offload_gpu import CUDA, clipped, delays, layers, one_rank, sharded
from test_offload_ranks import shards_whose_gradients_leave

import tilestep

__all__ = ["one_rank"]


def microbatches(model: torch.nn.Module, step: int, width: int, count: int = 3) -> None:
    for part in range(count):
        model(torch.full((4, width), 0.01 * (step + part + 1), device=CUDA)).square().mean().backward()


def assert_same(left: torch.nn.Module, right: torch.nn.Module) -> None:
    assert all(map(torch.equal, left.state_dict().values(), right.state_dict().values()))


@pytest.mark.parametrize("rule", ["AdamW", "LAMB", "Adafactor", "Muon"])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_updates_read_them_where_they_are(rule: str, late: bool) -> None:
    """Accumulated, clipped: norm, parameters and state are to the bit those of gradients on the device."""
    plain, moved = layers(), layers()
    matrices = [[p for p in net.parameters() if p.dim() == 2 or rule != "Muon"] for net in (plain, moved)]
    reference = tilestep.Optimizer(matrices[0], rule, lr=1e-2, max_grad_norm=0.1)
    made = tilestep.Optimizer(matrices[1], rule, lr=1e-2, max_grad_norm=0.1)
    optimizer = streamed(1 << 20, keeps_gradients=True)(made)

    def train() -> None:
        for step in range(5):
            microbatches(moved, step, 512)
            assert all(param.grad is None for param in matrices[1])
            optimizer.step()
            # Memory that was given back too early gets other values in these allocations.
            for _ in range(8):
                torch.full((512, 512), float("nan"), device=CUDA)

    if late:
        with delays(3):
            train()
    else:
        train()
    for step in range(5):
        microbatches(plain, step, 512)
        reference.step()
        reference.zero_grad()
    assert torch.equal(reference.grad_norm, optimizer.grad_norm)
    assert_same(plain, moved)


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_, step"])
def test_a_scaler(unscale: bool) -> None:
    plain, moved = layers(), layers()
    pairs = (
        (plain, clipped(plain.parameters())),
        (moved, streamed(1 << 20, keeps_gradients=True)(clipped(moved.parameters()))),
    )
    scalers = [tilestep.GradScaler("cuda", init_scale=2.0**8, growth_interval=2) for _ in pairs]
    for step in range(6):
        for (net, optimizer), scaler in zip(pairs, scalers):
            loss = net(torch.full((4, 512), 0.1 * (step + 1), device=CUDA)).square().mean()
            scaler.scale(loss * (float("inf") if step == 3 else 1.0)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() != 2.0**8
    assert_same(plain, moved)


def test_neither_state_nor_gradients_are_on_the_device() -> None:
    """100 M parameters: backward has the gradients of some layers at a time, however far the host is ahead of it."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(2500, 2500, bias=False) for _ in range(16))).to(CUDA)
    optimizer = tilestep.offload(
        lambda: tilestep.AdamW(model.parameters(), max_grad_norm=1.0), where="gpu", gradients=True, chunk_mb=8
    )
    data = torch.ones(4, 2500, device=CUDA)
    before = 0
    for step in range(4):
        torch.cuda.synchronize()
        if step == 2:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        torch.cuda._sleep(200_000_000)
        model(data).sum().backward()
        optimizer.step()
    gradients = sum(param.nbytes for param in model.parameters())
    assert torch.cuda.max_memory_allocated() - before < gradients / 2
    assert optimizer.offload_report().host_bytes >= 3 * gradients


def test_the_host_waits_for_nothing() -> None:
    model = layers()
    optimizer: Any = streamed(1 << 20, keeps_gradients=True)(clipped(model.parameters()))
    data = torch.ones(4, 512, device=CUDA)
    for _ in range(4):
        # Behind a busy device the allocators take what they need in the end, and then wait for no more.
        torch.cuda._sleep(100_000_000)
        model(data).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    done = torch.cuda.Event()
    with no_synchronization():
        model(data).square().mean().backward()
        optimizer.step()
    done.record()
    assert not done.query(), "the host has waited for the device"


@pytest.mark.parametrize("where", ["gpu", "cpu"])
def test_fsdp_shards(one_rank: None, where: str) -> None:
    """Taken in the stream of the reduction, with the next layers' still to come."""
    plain, moved = sharded(), sharded()
    # The host's norm has another order of sums.
    limit = 0.1 if where == "gpu" else None
    reference = tilestep.AdamW(plain.parameters(), lr=1e-2, max_grad_norm=limit)
    made = tilestep.AdamW(moved.parameters(), lr=1e-2, max_grad_norm=limit)
    optimizer = tilestep.offload(made, where=where, gradients=True, chunk_mb=0.1)
    with delays(5):
        for step in range(4):
            for net in (plain, moved):
                microbatches(net, step, 256, count=2)
            assert all(param.grad is None for param in moved.parameters())
            reference.step()
            reference.zero_grad()
            optimizer.step()
    torch.cuda.synchronize()
    for left, right in zip(plain.parameters(), moved.parameters()):
        if where == "gpu":
            assert torch.equal(left.full_tensor(), right.full_tensor())  # type: ignore[attr-defined]
        else:
            torch.testing.assert_close(left.full_tensor(), right.full_tensor(), rtol=1e-5, atol=1e-6)  # type: ignore[attr-defined]


def shards_of_two_ranks() -> None:
    """Reduced by NCCL in a stream of its own while backward goes on; copies and updates come late."""
    with delays(dist.get_rank()):
        shards_whose_gradients_leave(streamed(500, 2, keeps_gradients=True))


test_on_two_gpus = pytest.mark.two_gpus(each_passes([shards_of_two_ranks], 2, backend="nccl"))
