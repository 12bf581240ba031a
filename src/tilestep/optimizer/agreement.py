"""Whether ranks that train the same parameters step with the same numbers: compared once, at the first step."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from ..combinations import DDP, kind_of, wrappers_around
from ..compat import fake_mode_is_active, group_device_types, is_capturing
from ..placement import ReductionGroup, is_distributed
from ..placement.local import local_part
from .groups import described_numbers
from .parameters import Optimizer

_SLOTS = 128  # numbers that are compared: of one size on all ranks, whatever their groups are


def compare_ranks(optimizer: Optimizer) -> None:
    """Raise on ranks whose groups have other numbers than those of a rank with which they share parameters."""
    # Each rank's own numbers, the largest of all ranks and the smallest tell. Later changes are not compared: a rank
    # does not know that another one's have changed, and finding out would be a message at every step.
    control = optimizer.control
    if control.compared or is_capturing() or fake_mode_is_active():
        return
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several and "shard" not in optimizer.attached:
        # Modules may have meshes of their own, of the same ranks.
        groups = {tuple(dist.get_process_group_ranks(group)): group for group in _process_groups(optimizer)}
        if groups:
            _compare(optimizer, list(groups.values()))
    control.compared = True


def _compare(optimizer: Optimizer, groups: Sequence[Any]) -> None:
    device = _device_of(optimizer)
    groups = [group for group in groups if _takes(group, device)]
    lines = [f"{optimizer.control.policy}", *_lines(optimizer)]
    own = torch.zeros(_SLOTS, dtype=torch.float64, device="cpu")
    for place, line in enumerate(lines):
        own[place % _SLOTS] += zlib.crc32(line.encode())
    own = torch.cat([own, -own])
    ends = own.to(device, copy=True)
    ReductionGroup(groups, ranks=()).largest(ends)
    differ = (ends.cpu() != own).view(2, -1).any(0).tolist()
    others = [line for place, line in enumerate(lines) if differ[place % _SLOTS]]
    if any(differ):
        raise ValueError(
            "ranks disagree on what a step does, and would drift apart or wait for each other forever: rank "
            f"{dist.get_rank()} has {', '.join(others) or 'fewer param groups'}, and another rank has not; give all "
            "ranks the same numbers"
        )


def _device_of(optimizer: Optimizer) -> torch.device:
    """Where the parameters are, which is where each rank's collectives run, whatever device is current."""
    devices = (local_part(param).device for group in optimizer.param_groups for param in group["params"])
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


def _takes(group: Any, device: torch.device) -> bool:
    """Whether a process group takes tensors of a device, or of the GPU that they can be sent by."""
    kinds = group_device_types(group)
    return kinds is None or device.type in kinds or torch.cuda.is_available()


def _lines(optimizer: Optimizer) -> Iterator[str]:
    for index, group in enumerate(optimizer.param_groups):
        yield f"group {index} rule={optimizer.rule_of(group).name}"
    for line in described_numbers(optimizer):
        # What ranks that each have a part draw for it may be their own.
        if " seed=" not in line:
            yield line


def _process_groups(optimizer: Optimizer) -> Iterator[Any]:
    """Those of the meshes of parameters, a group for each dimension, and of DistributedDataParallel around them."""
    # Not only of parameters that have a gradient, which on another rank others may have.
    params = [param for group in optimizer.param_groups for param in group["params"]]
    meshes: list[Any] = []
    for param in params:
        if is_distributed(param) and not any(mesh is param.device_mesh for mesh in meshes):
            meshes.append(param.device_mesh)
    for mesh in meshes:
        if mesh.get_coordinate() is not None:
            with suppress(RuntimeError):  # made without process groups
                yield from [mesh.get_group(dim) for dim in range(mesh.ndim)]
    own = {id(param) for param in params}
    wrappers = wrappers_around(lambda param: id(param) in own)
    around: set[Any] = {wrapper.process_group for wrapper in wrappers if kind_of(wrapper) == DDP}
    yield from sorted(around, key=dist.get_process_group_ranks)
