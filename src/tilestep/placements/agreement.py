"""The ranks that must come to the same decisions, and sums over what all of them hold."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..compat import group_device_types, root_mesh
from ..devices import is_host
from ..errors import GradientError
from .local import is_distributed

_groups: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()
"""Process groups made here, for each initialization of torch.distributed."""


class Agreement:
    """All ranks of the meshes of some DTensors.

    Several meshes may be given if one holds the others, or if all are slices of one mesh; then a tensor on a smaller
    mesh, and a plain one, is held by the other ranks too, as by tensor-parallel ranks whose norms' weights FSDP shards.
    A sum over all tensors is one all-reduce: each rank adds its part of a shard once, and of what several ranks hold
    the same share. So its result is the same on every rank, to the last bit.
    """

    def __init__(self, tensors: Sequence[tuple[str, Any]]) -> None:
        self.meshes: list[Any] = []
        labels: list[str] = []
        for label, tensor in tensors:
            if not any(mesh is tensor.device_mesh for mesh in self.meshes):
                self.meshes.append(tensor.device_mesh)
                labels.append(label)
        self.ranks = _ranks_of(self.meshes, labels)
        self._group: Any = None
        self._shares: dict[Any, float] = {}

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """The place of this one among them."""
        return self.ranks.index(dist.get_rank())

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """What each rank has; of one shape on all ranks, and a dtype that collectives take."""
        if self.size == 1:
            return [values]
        if self._group is None:
            self._group = group_of(self.ranks, self.meshes)
        values = self._sendable(values)
        found = [torch.empty_like(values) for _ in self.ranks]
        dist.all_gather(found, values, self._group)
        return found

    def leads(self, tensor: Any) -> bool:
        """Whether this is the first of the ranks that hold the same part of a tensor."""
        if not is_distributed(tensor):
            return self.rank == 0
        mesh, placements = tensor.device_mesh, tensor.placements
        place = mesh.get_coordinate()
        firsts = (not at or not each.is_replicate() for at, each in zip(place, placements))
        return self.ranks[0] in mesh.mesh and all(firsts)

    def share(self, tensor: Any, over: tuple[int, int] | None = None) -> float:
        """What a rank's sums over its part of a tensor count: 1 over the number of ranks that hold the same part."""
        if not is_distributed(tensor):
            return 1 / len(self.ranks)
        mesh, placements, gone = tensor.device_mesh, tensor.placements, range(*(over or (0, 0)))
        if (mesh, placements, gone) not in self._shares:
            copies = len(self.ranks) // mesh.size()
            for dim, placement in enumerate(placements):
                holds_same = placement.is_replicate() or placement.dim % tensor.dim() in gone
                copies *= mesh.size(dim) if holds_same else 1
            self._shares[mesh, placements, gone] = 1 / copies
        return self._shares[mesh, placements, gone]

    def add(self, values: torch.Tensor) -> None:
        """Replace numbers by their sums over the ranks; no rank waits on the host for a GPU's."""
        self._all_reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: torch.Tensor) -> None:
        """Replace numbers by the largest over the ranks; NaN on one gives NaN on all."""
        missing = values.isnan()
        both = torch.stack([torch.where(missing, torch.inf, values), missing.to(values.dtype)])
        self._all_reduce(both, dist.ReduceOp.MAX)
        values.copy_(torch.where(both[1] > 0, torch.nan, both[0]))

    def _all_reduce(self, values: torch.Tensor, operation: Any) -> None:
        if len(self.ranks) == 1:
            return
        if self._group is None:
            self._group = group_of(self.ranks, self.meshes)
        sent = self._sendable(values)
        dist.all_reduce(sent, operation, self._group)
        if sent is not values:
            values.copy_(sent)

    def _sendable(self, values: torch.Tensor) -> torch.Tensor:
        """Numbers where the group takes them: parameters may be on the host under a backend for GPUs alone."""
        able = group_device_types(self._group)
        on_gpus_alone = is_host(values.device) and able is not None and "cpu" not in able
        return values.cuda() if on_gpus_alone and torch.cuda.is_available() else values


def _ranks_of(meshes: Sequence[Any], labels: Sequence[str]) -> list[int]:
    """The ranks of the largest mesh if it holds all others, else those of the smallest slice of the root that does."""
    members = [set(mesh.mesh.flatten().tolist()) for mesh in meshes]
    largest = max(members, key=len)
    if all(ranks <= largest for ranks in members):
        return sorted(largest)
    root = root_mesh(meshes[0])
    if root is not None and all(root_mesh(mesh) is root for mesh in meshes):
        grid = root.mesh.cpu().numpy()
        here = np.argwhere(grid == dist.get_rank())[0]
        reached = np.argwhere(np.isin(grid, list(set().union(*members))))
        spans = (reached != here).any(axis=0)
        slices = tuple(slice(None) if spanned else int(at) for spanned, at in zip(spans, here))
        return sorted(grid[slices].reshape(-1).tolist())
    other = next(place for place, ranks in enumerate(members) if not ranks <= largest)
    raise GradientError(
        f"{labels[other]} lies on {meshes[other]} and {labels[members.index(largest)]} on "
        f"{meshes[members.index(largest)]}: neither holds the other and they are not slices of one mesh, so no ranks "
        "could agree on a norm; make one mesh with init_device_mesh and take slices of it"
    )


def group_of(ranks: Sequence[int], meshes: Sequence[Any]) -> Any:
    """A process group of these ranks: one that is there, or a new one that only they must ask for."""
    world = dist.group.WORLD
    if len(ranks) == dist.get_world_size():
        return world
    for mesh in meshes:
        if mesh.ndim == 1 and sorted(mesh.mesh.tolist()) == list(ranks):
            return mesh.get_group()
    made = _groups.setdefault(world, {})
    if tuple(ranks) not in made:
        made[tuple(ranks)] = dist.new_group(list(ranks), use_local_synchronization=True)
    return made[tuple(ranks)]
