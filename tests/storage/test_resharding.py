"""From 1 to 2, 4, 3 and 1 ranks with a save between each: not a bit differs from an unbroken run.

Gradients have few digits, so that their sums are the same on any number of ranks.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from block_rows import as_earlier
from rank_processes import each_passes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import tilestep
from tilestep.placement.local import gathered

SIZES = (1, 2, 4, 3, 1)
STEPS = 1
SHAPES = {
    "even_rows": (40, 130),
    "odd_rows": (50, 257),
    "few_rows": (3, 1700),
    "one_row": (5000,),
    "twelfths": (4608,),
    "whole_blocks": (36, 256),
    "batches": (5, 6, 180),
    "images": (48, 16, 3, 3),
    "small": (7,),
}
FORMATS: list[tuple[Any, Any, torch.dtype]] = [
    ("int8", "int8", torch.bfloat16),
    ("float8_e4m3", False, torch.bfloat16),  # rounded by chance
    ("int8", "kahan", torch.bfloat16),
    ("int4", "remainder", torch.bfloat16),
    ({"exp_avg": torch.bfloat16, "exp_avg_sq": "int8"}, True, torch.float32),
]


class Weights(nn.Module):
    """Parameters of many shapes, one in channels-last; for FSDP contiguous ones, whose shards cut no block."""

    def __init__(self, dtype: torch.dtype, for_fsdp: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device(), dtype)
            if for_fsdp and name == "one_row":
                continue
            if not for_fsdp and name == "images":
                values = values.to(memory_format=torch.channels_last)
            self.register_parameter(name, nn.Parameter(values))


def gradient(name: str, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + list(SHAPES).index(name))
    draw = partial(torch.randint, size=SHAPES[name], generator=generator, device="cpu")
    digits, exponents = draw(-15, 16), draw(-12, 0)
    return (digits * 2.0**exponents).to(torch.get_default_device(), dtype)


def models(for_fsdp: bool) -> nn.ModuleList:
    """Weights for each format."""
    return nn.ModuleList(Weights(dtype, for_fsdp) for _, _, dtype in FORMATS)


def make(net: nn.ModuleList) -> Any:
    """One optimizer, with a group for each format."""
    groups = [
        {
            "params": [(f"{place}.{name}", param) for name, param in weights.named_parameters()],
            **{"state_dtype": states, "master_weights": masters},
            "rounding": "stochastic" if states == "float8_e4m3" else "nearest",
        }
        for place, (weights, (states, masters, _)) in enumerate(zip(net, FORMATS))
    ]
    return tilestep.AdamW(groups, lr=1e-2)


def bits(tensor: Any) -> torch.Tensor:
    whole = gathered(tensor) if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def compare(named: Any, states: Any, net: nn.Module, optimizer: Any) -> None:
    """Compare parameters and their states with those of the unbroken run."""
    for (name, mine), (_, other), state in zip(named, net.named_parameters(), states, strict=True):
        assert torch.equal(bits(mine), bits(other)), name
        wanted = optimizer.state[other]
        assert state.keys() == wanted.keys(), name
        for key, value in wanted.items():
            assert state[key].shape == value.shape and torch.equal(bits(state[key]), bits(value)), (name, key)


def phase(size: int, steps: range, folder: str, *, loads: bool, by_fsdp: bool) -> Any:
    """Train on some of the ranks from the last checkpoint, and save; the model and what the states are."""
    group = dist.new_group(list(range(size)))
    if dist.get_rank() >= size:
        return None
    mesh = DeviceMesh.from_group(group, torch.get_default_device().type)
    net = models(by_fsdp)
    if by_fsdp:
        for weights in net:
            fully_shard(weights, mesh=mesh)
        optimizer = make(net)
    else:
        optimizer = tilestep.shard(make(net), net, mesh=mesh, bucket_cap_mb=0.05)

    def train(step: int) -> None:
        for name, param in net.named_parameters():
            full = gradient(name.partition(".")[2], step, param.dtype)
            param.grad = distribute_tensor(full, mesh, param.placements) if isinstance(param, DTensor) else full
        optimizer.step()
        optimizer.zero_grad()

    if loads:
        if by_fsdp:
            # The states are there for the checkpoint to be read into.
            train(0)
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder, process_group=group)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in steps:
        train(step)
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder, process_group=group)
    if by_fsdp:
        return list(net.named_parameters()), [optimizer.state[param] for param in net.parameters()]
    return list(net.named_parameters()), list(optimizer.full_state_dict()["state"].values())


def go_over(by_fsdp: bool, sizes: Sequence[int] = SIZES) -> None:
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        wanted = models(by_fsdp)
        unbroken = make(wanted)
        for number, size in enumerate(sizes):
            steps = range(number * STEPS, (number + 1) * STEPS)
            for step in steps:
                for name, param in wanted.named_parameters():
                    param.grad = gradient(name.partition(".")[2], step, param.dtype)
                unbroken.step()
            pair = phase(size, steps, folder[0], loads=number > 0, by_fsdp=by_fsdp)
            if pair is not None:
                compare(*pair, wanted, unbroken)
            dist.barrier()


@pytest.mark.parametrize("mine", [None, "int8", "int4", torch.bfloat16])
@pytest.mark.parametrize("theirs", [None, "int8", "int4", "float8_e4m3"])
def test_other_formats_are_taken_by_value(theirs: Any, mine: Any, tmp_path: Path) -> None:
    cases = [("AdamW", False), ("SGD", False), *([("AdamW", True)] if theirs else [])]
    for rule, is_earlier in cases:
        go_through_a_folder(tmp_path / f"{rule}{is_earlier}", rule, theirs, mine, is_earlier=is_earlier)


def go_through_a_folder(tmp_path: Path, rule: str, theirs: Any, mine: Any, *, is_earlier: bool) -> None:
    """A distributed checkpoint with one format into an optimizer with another; codes may have their earlier names."""

    def stepped(format: Any) -> Any:
        param = nn.Parameter(torch.ones(64, 300))
        options = {"momentum": 0.9} if rule == "SGD" else {}
        optimizer = getattr(tilestep, rule)([("weight", param)], state_dtype=format, **options)
        param.grad = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        return optimizer

    saved, optimizer = stepped(theirs), stepped(mine)
    given = as_earlier(saved.state_dict()) if is_earlier else saved.state_dict()
    dcp.save({"optimizer": given}, checkpoint_id=tmp_path, no_dist=True)
    wanted = copy.deepcopy(optimizer)
    wanted.load_state_dict(copy.deepcopy(saved.state_dict()))
    state = {"optimizer": optimizer.state_dict()}
    before = dict(next(iter(optimizer.state.values())))
    dcp.load(state, checkpoint_id=tmp_path, planner=tilestep.LoadPlanner(), no_dist=True)
    assert next(iter(optimizer.state.values())).keys() == before.keys()
    optimizer.load_state_dict(state["optimizer"])
    (restored,), (values,) = optimizer.state.values(), wanted.state.values()
    assert restored.keys() == values.keys()
    assert all(torch.equal(bits(restored[name]), bits(value)) for name, value in values.items())


CODES, SCALES = torch.ones(4, 128, dtype=torch.int8), torch.ones(4, 1, dtype=torch.bfloat16)
FLATTENED: dict[str, dict[str, torch.Tensor]] = {
    "codes": {"exp_avg_codes": CODES, "exp_avg_scales": SCALES},
    "codes of earlier revisions": {"exp_avg": CODES, "exp_avg_scales": SCALES},
    "numbers": {"exp_avg": torch.ones(4, 128)},
}


@pytest.mark.parametrize("saved", ["codes", "codes of earlier revisions"])
def test_codes_of_a_flattened_checkpoint_are_read_as_codes_alone(saved: str, tmp_path: Path) -> None:
    def flat(kind: str) -> dict[str, torch.Tensor]:
        return {f"state.weight.{name}": value.clone() for name, value in FLATTENED[kind].items()}

    dcp.save(flat(saved), checkpoint_id=tmp_path / "codes", no_dist=True)
    dcp.save(flat("numbers"), checkpoint_id=tmp_path / "numbers", no_dist=True)
    state = {name: torch.zeros_like(value) for name, value in flat("codes").items()}
    dcp.load(state, checkpoint_id=tmp_path / "codes", planner=tilestep.LoadPlanner(), no_dist=True)
    assert all(map(torch.equal, state.values(), flat("codes").values()))
    for kind, folder in (("numbers", "codes"), ("codes", "numbers")):
        with pytest.raises(dcp.CheckpointException, match=r"the checkpoint has state\.weight\.exp_avg.* not flattened"):
            dcp.load(flat(kind), checkpoint_id=tmp_path / folder, planner=tilestep.LoadPlanner(), no_dist=True)


def shards() -> None:
    go_over(by_fsdp=False)


def fsdp_shards() -> None:
    go_over(by_fsdp=True, sizes=(1, 4, 3))


test_no_bit_differs = each_passes([shards, fsdp_shards], max(SIZES))
