"""Reductions over tensors that ranks share, combined after each tile pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import GradientError
from ..graph import Value
from ..placement import ReductionGroup, is_distributed, is_whole
from ..placement.local import sharded_dims, slices_here, spans_ranks
from .passes import Passes
from .segment import Entry


@dataclass
class _Part:
    """Numbers of a segment that ranks combine: reductions over its tensors, or over slices of them."""

    # Ranks may hold different slices, such as a number per column of parameters sharded by rows; then the message of
    # each rank has a place for every slice.

    numbers: torch.Tensor  # flat, as written by passes
    places: torch.Tensor  # int64[parts] on the device, indices of the numbers to combine
    factors: torch.Tensor  # float64[parts] on the device: weights of sums, or signs that turn extremes into maxima
    turns_back: bool  # whether the factors apply to results too
    targets: torch.Tensor | None = None  # int64[parts] on the device, index of each number among all ranks' slices
    count: int = 0  # number of slices of all ranks together

    def values(self) -> torch.Tensor:
        """Return this rank's contribution, float64[numbers], weighted by its share."""
        own = self.numbers.index_select(0, self.places).to(torch.float64) * self.factors
        if self.targets is None:
            return own
        neutral = -torch.inf if self.turns_back else 0.0
        return own.new_full((self.count,), neutral).index_copy_(0, self.targets, own)

    def take(self, values: torch.Tensor) -> None:
        """Replace the numbers by the result over all ranks."""
        values = values if self.targets is None else values.index_select(0, self.targets)
        values = values * self.factors if self.turns_back else values
        self.numbers.index_copy_(0, self.places, values.to(self.numbers.dtype))


def shared_sums(group: ReductionGroup, every: Sequence[Passes]) -> list[Sequence[partial[Any]]]:
    """Return, per tile pass, the calls that combine its sums per tensor and slice: one all-reduce for all sums."""
    sharded = [passes for passes in every if not all(is_whole(entry.handle) for entry in passes.segment.entries)]
    depth = max((len(passes.segment.spec.program.tiles) for passes in sharded), default=0)
    kinds = (True, group.add), (False, group.largest)
    return [
        [
            partial(_combine, parts, reduce)
            for adds, reduce in kinds
            if (parts := _parts_of(group, sharded, index, adds=adds))
        ]
        for index in range(depth)
    ]


def _combine(parts: Sequence[_Part], reduce: Callable[[torch.Tensor], None]) -> None:
    values = [part.values() for part in parts]
    combined = torch.cat(values)
    reduce(combined)
    for part, result in zip(parts, combined.split([len(value) for value in values])):
        part.take(result)


def _parts_of(group: ReductionGroup, sharded: Sequence[Passes], index: int, *, adds: bool) -> list[_Part]:
    """Return the reductions that a stage's passes leave in each segment: sums, or maxima and minima."""
    parts: list[_Part] = []
    for each in sharded:
        segment, program = each.segment, each.segment.spec.program
        passes = program.passes_of(index) if index < len(program.tiles) else []
        tensors = [(slot, value) for tile in passes for slot, value in tile.reductions if _adds(value) is adds]
        slices = [(slot, value) for tile in passes for slot, value in tile.parts if _adds(value) is adds]
        if (tensors or slices) and not each.has_kernels:
            cut = next(entry for entry in segment.entries if not is_whole(entry.handle))
            raise GradientError(
                f"{cut.share.label} is sharded, and rule {program.graph.title} reduces over it: this requires a C++ "
                "compiler, or Triton on a GPU"
            )
        if tensors:
            # A tensor that a rank holds whole is in no segment of other ranks.
            sums = segment.sums
            listed = [
                (place, entry, slot, value)
                for place, entry in enumerate(segment.entries)
                if not is_whole(entry.handle)
                for slot, value in tensors
            ]
            places = torch.tensor([place * sums.shape[1] + slot for place, _, slot, _ in listed], device=sums.device)
            factors = [_factor(group, entry, value) for _, entry, _, value in listed]
            scale = torch.tensor(factors, dtype=torch.float64, device=sums.device)
            parts.append(_Part(sums.view(-1), places, scale, not adds))
        parts += [part for slot, value in slices if (part := _slice_part(group, each, slot, value)) is not None]
    return parts


def _adds(reduction: Value) -> bool:
    return reduction.operation == "reduce_sum"


def _factor(group: ReductionGroup, entry: Entry, reduction: Value) -> float:
    """Return the weight of this rank's sum, or the sign that turns an extreme into a maximum."""
    if not _adds(reduction):
        return 1.0 if reduction.operation == "reduce_amax" else -1.0
    over = reduction.args[0].over
    return group.share(entry.handle, over) if over and is_distributed(entry.handle) else entry.weight


def _slice_part(group: ReductionGroup, passes: Passes, slot: int, reduction: Value) -> _Part | None:
    assert reduction.over is not None and passes.slices is not None
    segment, own = passes.segment, passes.segment.spec.program.slices
    slots, starts = passes.slices.slot(slot), passes.slices.tables.starts[own.kinds.index(own.overs[slot])].tolist()
    places: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    factors: list[torch.Tensor] = []
    count = 0
    for entry, start, stop in zip(segment.entries, starts, starts[1:]):
        if not spans_ranks(reduction, sharded_dims(entry.handle)):
            continue
        places.append(torch.arange(start, stop, device="cpu"))
        targets.append(count + slices_here(entry.handle, reduction.over).cpu())
        factor = _factor(group, entry, reduction)
        factors.append(torch.full((stop - start,), factor, dtype=torch.float64, device="cpu"))
        count += math.prod(size for dim, size in enumerate(entry.handle.shape) if dim not in range(*reduction.over))
    if not count:
        return None
    where, scale, among = (torch.cat(numbers).to(slots.device) for numbers in (places, factors, targets))
    return _Part(slots, where, scale, not _adds(reduction), among, count)
