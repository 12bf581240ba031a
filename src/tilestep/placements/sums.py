"""Reductions over one tensor, or over rows, columns and other slices of it, whose parts lie on several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from ..errors import GradientError
from .agreement import Agreement
from .local import is_distributed, is_whole, sharded_dims, slices_here, spans_ranks

if TYPE_CHECKING:
    from ..engine.segment import Entry, Segment
    from ..graph import Value


class _Part(Protocol):
    """Numbers of one segment that ranks combine."""

    def values(self) -> torch.Tensor:
        """What this rank has of them, float64[numbers], counted as its share."""

    def take(self, values: torch.Tensor) -> None:
        """Replace them by what all ranks have together."""


@dataclass
class _TensorPart:
    """What the passes of a stage leave: columns of a segment's sums, and what they count or must be turned by.

    Args:
        factors: float64[tensors or 1, columns] on the device: of sums this rank's shares; of extremes the sign that
            makes them the largest.
    """

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
        here = [*program.slices_before(index), program.tiles[index]] if index < len(program.tiles) else []
        passes = [tile for tile in here if tile is not None]
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
