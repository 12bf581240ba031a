"""Statistics and changed weights of DTensors: whole tensors' numbers on all ranks, indices into the whole tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import each_passes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tilestep
from tilestep.native import build
from tilestep.native.table import Writes
from tilestep.stats import Output

PLACEMENTS = ([Shard(0)], [Shard(1)], [Replicate()], [Shard(0)])
FEW_ROWS = -9.0 - torch.arange(14.0).view(2, 7)  # of which a rank has none
OUTPUTS = (
    Output("highest", lambda stored: stored.new("param"), "max"),
    Output("total", lambda stored: stored.new("param"), "sum"),
)


def pair(**options: Any) -> tuple[Any, list[Any], Any, list[Any]]:
    """An optimizer of DTensors, and one of the same whole tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = [*(nn.Parameter(torch.randn(5, 7)) for _ in PLACEMENTS[1:]), nn.Parameter(FEW_ROWS.clone())]
    parts = [
        nn.Parameter(distribute_tensor(param.detach().clone(), mesh, placements))
        for param, placements in zip(whole, PLACEMENTS)
    ]
    return (
        tilestep.AdamW(parts, lr=0.1, **options),
        parts,
        tilestep.AdamW(whole, lr=0.1, **options),
        whole,
    )


def give(parts: list[Any], whole: list[Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for part, param in zip(parts, whole):
        param.grad = torch.randn(param.shape, generator=generator)
        param.grad[torch.rand(param.shape, generator=generator) < 0.5] = 0
        part.grad = distribute_tensor(param.grad.clone(), part.device_mesh, part.placements)


def statistics_are_the_whole_tensors_in_one_message() -> None:
    optimizer, parts, expected, whole = pair(stats=tilestep.Stats(every=2, outputs=OUTPUTS))
    messages = 0
    reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal messages
        messages += 1
        return reduce(*args, **kwargs)

    for step in range(1, 5):
        give(parts, whole, step)
        dist.all_reduce, messages = counted, 0
        optimizer.step()
        dist.all_reduce = reduce
        expected.step()
        assert messages == (step % 2 == 0)
    mine, theirs = optimizer.stats.read(), expected.stats.read()
    assert mine.keys() == theirs.keys()
    assert theirs["0.3"]["highest"] == whole[3].max() < 0
    for name in mine:
        for column, number in theirs[name].items():
            assert mine[name][column] == pytest.approx(number, rel=1e-5, abs=1e-12), (name, column)
    tables = [torch.empty_like(optimizer.stats.table) for _ in range(dist.get_world_size())]
    dist.all_gather(tables, optimizer.stats.table)
    assert all(torch.equal(table, tables[0]) for table in tables)


def gradients_that_are_not_finite_on_one_rank_have_a_name_on_all() -> None:
    optimizer, parts, _, whole = pair(stats=tilestep.Stats(), skip_nonfinite=True)
    give(parts, whole, 0)
    if dist.get_rank() == 0:
        parts[1].grad.to_local().fill_(math.nan)
    optimizer.step()
    assert optimizer.first_nonfinite() == "0.1"
    assert optimizer.stats.read()["0.0"]["update_norm"] == 0


def changes_are_indices_into_the_whole_tensor() -> None:
    optimizer, parts, _, whole = pair(track_changes=True)
    for seed in range(2):
        give(parts, whole, seed)
        before = [part.full_tensor().reshape(-1).clone() for part in parts]
        optimizer.step()
        after = [part.full_tensor().reshape(-1) for part in parts]
        own = {name: (indices, values) for name, indices, values in optimizer.changes(clear=False)}
        everywhere = {name: (indices, values) for name, indices, values in optimizer.changes(gather=True)}
        for place, (old, new) in enumerate(zip(before, after)):
            wanted = (old != new).nonzero().reshape(-1)
            indices, values = everywhere[f"0.{place}"]
            assert indices.dtype is torch.int32 and torch.equal(indices.long(), wanted), place
            assert torch.equal(values, new[wanted])
            mine, its = own.get(f"0.{place}", (wanted[:0], new[:0]))
            assert torch.equal(its, new[mine.long()]) and set(mine.tolist()) <= set(wanted.tolist())
            counts = torch.tensor([len(mine)])
            dist.all_reduce(counts)
            assert int(counts) == len(wanted) * (dist.get_world_size() if place == 2 else 1)
        assert list(optimizer.changes()) == []


def fsdp2_keeps_a_copy_up_to_date() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).to(torch.bfloat16)
    copies = {name: param.detach().clone() for name, param in model.named_parameters()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = tilestep.AdamW(
        model.named_parameters(),
        lr=3e-4,
        master_weights=True,
        max_grad_norm=1.0,
        track_changes=True,
        stats=tilestep.Stats(),
    )
    for step in range(5):
        generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
        model(torch.randn(4, 6, generator=generator).to(torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, indices, values in optimizer.changes(gather=True):
            copies[name].view(-1)[indices.long()] = values
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor) and torch.equal(param.full_tensor(), copies[name])
    measured = optimizer.stats.read()
    total = sum(row["grad_norm"] ** 2 for row in measured.values())
    assert math.sqrt(total) == pytest.approx(float(optimizer.grad_norm), rel=1e-4)


def plain_parameters_beside_dtensors_are_listed_exactly() -> None:
    """A version of a plain parameter counts once, where those of DTensors and of their parts are summed up."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = nn.Parameter(torch.zeros(8))
    part = nn.Parameter(distribute_tensor(torch.zeros(6), mesh, [Shard(0)]))
    optimizer = tilestep.SGD([plain, part], lr=1.0, track_changes=True)
    for _ in range(2):
        plain.grad = torch.eye(8)[3]
        part.grad = distribute_tensor(torch.eye(6)[0], mesh, [Shard(0)])
        optimizer.step()
        listed = {name: indices.tolist() for name, indices, _ in optimizer.changes(gather=True)}
        assert listed == {"0.0": [3], "0.1": [0]}
    writes = Writes([plain, part])
    build.bump(writes.params)
    writes.total += 2
    writes.attribute(writes.params)
    assert writes.are_none() and writes.take() == []


CHECKS = [
    plain_parameters_beside_dtensors_are_listed_exactly,
    statistics_are_the_whole_tensors_in_one_message,
    gradients_that_are_not_finite_on_one_rank_have_a_name_on_all,
    changes_are_indices_into_the_whole_tensor,
    fsdp2_keeps_a_copy_up_to_date,
]


test_on_three_ranks = each_passes(CHECKS, 3)
