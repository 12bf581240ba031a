"""Ranks that come to the same decisions, and reductions over tensors, rows and columns that they share."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from ..compat import group_device_types, root_mesh
from ..devices import is_host
from ..errors import GradientError
from .local import is_distributed, is_whole, sharded_dims, slices_here, spans_ranks

if TYPE_CHECKING:
    from ..graph import Value
    from ..runtime.segment import Entry, Segment


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
        coordinate = np.argwhere(grid == dist.get_rank())[0]
        reached = np.argwhere(np.isin(grid, list(set().union(*members))))
        spans = (reached != coordinate).any(axis=0)
        slices = tuple(slice(None) if spanned else int(at) for spanned, at in zip(spans, coordinate))
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


class _Part(Protocol):
    """Numbers of one segment that ranks combine."""

    def values(self) -> torch.Tensor:
        """What this rank has of them, float64[numbers], counted as its share."""

    def take(self, values: torch.Tensor) -> None:
        """Replace them by what all ranks have together."""


@dataclass
class _TensorPart:
    """What the passes of a stage leave: columns of a segment's sums, and what they count or must be turned by."""

    segment: Segment
    columns: torch.Tensor  # int64[columns] on the device
    factors: torch.Tensor
    turns_back: bool  # whether the result must be turned back

    def values(self) -> torch.Tensor:
        return (self.segment.sums.index_select(1, self.columns) * self.factors).reshape(-1)

    def take(self, values: torch.Tensor) -> None:
        found = values.view(-1, len(self.columns))
        self.segment.sums.index_copy_(1, self.columns, found * self.factors if self.turns_back else found)


@dataclass
class _SlicePart:
    """Slices of tensors that are cut along what was reduced: one number a column, say, of parameters cut into rows.

    Ranks may have other columns each; then every rank has a place for all of them.
    """

    slots: torch.Tensor  # all slices of a kind
    places: torch.Tensor  # int64[slices] on the device, those to combine
    targets: torch.Tensor  # int64[slices] on the device, the place of each among all ranks' slices
    count: int  # how many slices all ranks have together
    factors: torch.Tensor  # float64[slices] on the device, as above
    turns_back: bool  # as above

    def values(self) -> torch.Tensor:
        own = self.slots.index_select(0, self.places).to(torch.float64) * self.factors
        neutral = -torch.inf if self.turns_back else 0.0
        return own.new_full((self.count,), neutral).index_copy_(0, self.targets, own)

    def take(self, values: torch.Tensor) -> None:
        found = values.index_select(0, self.targets)
        found = found * self.factors if self.turns_back else found
        self.slots.index_copy_(0, self.places, found.to(self.slots.dtype))


class SharedSums:
    """Combines after each tile pass what it has summed up per tensor and slice: one all-reduce for all sums."""

    def __init__(self, agreement: Agreement, segments: Sequence[Segment]) -> None:
        self._agreement = agreement
        sharded = [segment for segment in segments if not all(is_whole(entry.handle) for entry in segment.entries)]
        depth = max((len(segment.spec.program.tiles) for segment in sharded), default=0)
        self._added = [_parts_of(agreement, sharded, index, adds=True) for index in range(depth)]
        self._largest = [_parts_of(agreement, sharded, index, adds=False) for index in range(depth)]

    def calls(self, index: int) -> list[Callable[[], None]]:
        """What lets every segment know the reductions over whole tensors that tile pass `index` has begun."""
        if index >= len(self._added):
            return []
        kinds = (self._added[index], self._agreement.add), (self._largest[index], self._agreement.largest)
        return [partial(_combine, parts, reduce) for parts, reduce in kinds if parts]


def _combine(parts: Sequence[_Part], reduce: Callable[[torch.Tensor], None]) -> None:
    values = [part.values() for part in parts]
    together = torch.cat(values)
    reduce(together)
    for part, result in zip(parts, together.split([len(value) for value in values])):
        part.take(result)


def _parts_of(agreement: Agreement, segments: Sequence[Segment], index: int, *, adds: bool) -> list[_Part]:
    """What the passes of a stage leave in each segment that has such reductions: sums, or largest and smallest."""
    found: list[_Part] = []
    for segment in segments:
        program = segment.spec.program
        tiles = [*program.slices_before(index), program.tiles[index]] if index < len(program.tiles) else []
        passes = [tile for tile in tiles if tile is not None]
        tensors = [(slot, value) for tile in passes for slot, value in tile.reductions if _adds(value) is adds]
        slices = [(slot, value) for tile in passes for slot, value in tile.parts if _adds(value) is adds]
        if (tensors or slices) and not hasattr(segment, "sums"):
            sharded = next(entry for entry in segment.entries if not is_whole(entry.handle))
            raise GradientError(
                f"{sharded.label} is sharded, and rule {program.graph.title} sums it up: that needs a C++ compiler, or "
                "Triton on a GPU"
            )
        if tensors:
            found.append(_tensor_part(agreement, segment, tensors))
        found += [part for slot, value in slices if (part := _slice_part(agreement, segment, slot, value)) is not None]
    return found


def _adds(reduction: Value) -> bool:
    return reduction.operation == "reduce_sum"


def _factor(agreement: Agreement, entry: Entry, reduction: Value) -> float:
    """What this rank's reduction counts; the sign that makes extremes the largest."""
    if not _adds(reduction):
        return 1.0 if reduction.operation == "reduce_amax" else -1.0
    over = reduction.args[0].over
    return agreement.share(entry.handle, over) if over and is_distributed(entry.handle) else entry.share


def _tensor_part(agreement: Agreement, segment: Segment, reductions: Sequence[tuple[int, Value]]) -> _Part:
    factors = [[_factor(agreement, entry, value) for _, value in reductions] for entry in segment.entries]
    device = segment.sums.device
    return _TensorPart(
        segment,
        torch.tensor([slot for slot, _ in reductions], device=device),
        torch.tensor(factors, dtype=torch.float64, device=device),
        turns_back=not _adds(reductions[0][1]),
    )


def _slice_part(agreement: Agreement, segment: Segment, slot: int, reduction: Value) -> _Part | None:
    assert reduction.over is not None
    slots, starts = segment.slices_of(slot)
    places: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    factors: list[torch.Tensor] = []
    count = 0
    for entry, start, stop in zip(segment.entries, starts, starts[1:]):
        if not spans_ranks(reduction, sharded_dims(entry.handle)):
            continue
        places.append(torch.arange(start, stop, device="cpu"))
        targets.append(count + slices_here(entry.handle, reduction.over).cpu())
        factor = _factor(agreement, entry, reduction)
        factors.append(torch.full((stop - start,), factor, dtype=torch.float64, device="cpu"))
        count += math.prod(size for dim, size in enumerate(entry.handle.shape) if dim not in range(*reduction.over))
    if not count:
        return None
    where, among, scale = (torch.cat(each).to(slots.device) for each in (places, targets, factors))
    return _SlicePart(slots, where, among, count, scale, not _adds(reduction))
