"""Matrices that are sharded over ranks (for Muon): each is gathered on an owner in buckets, and sent back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..compat import copy_all
from ..errors import GradientError
from ..linalg.views import Cut
from .local import local_part, logical_coordinates
from .reduction import all_gather_flat, group_of

Bounds = tuple[slice, ...]  # a part's range in the whole, per dimension

OWNED_IN_A_BUCKET = 1 << 26
"""Elements of each owner's matrices in a bucket. With fewer, products are slower: a batch of few large matrices leaves
multiprocessors idle. With more, less communication is hidden: nothing is computed while the first bucket arrives."""

_ALIGNMENT = 64  # alignment of parts in a message, in elements


def add_matrix(
    exchanges: dict[Any, MatrixExchange],
    label: str,
    param: Any,
    *,
    lead: int,
    work: float,
    everywhere: bool,
    cut: Cut | None = None,
) -> tuple[MatrixExchange, int]:
    """Add a DTensor's matrices to an exchange; returns the exchange, and their number in it.

    Args:
        exchanges: the exchanges so far; DTensors that the same ranks share have the same exchange.
        label: the DTensor's name in messages.
        param: the DTensor.
        lead: the number of leading batch dimensions. Ranks with different matrices of the batch exchange nothing.
        work: the cost of its matrices for their owner, in any unit.
        everywhere: whether every rank computes all matrices, for example because it keeps states of them.
        cut: the rows that belong to the matrices; None for all rows.
    """
    mesh, coordinate = param.device_mesh, param.device_mesh.get_coordinate()

    def is_apart(at: int) -> bool:
        placement = param.placements[at]
        return everywhere if placement.is_replicate() else placement.dim % param.dim() < lead

    shared = mesh.mesh.cpu().numpy()[tuple(coordinate[at] if is_apart(at) else slice(None) for at in range(mesh.ndim))]
    ranks = tuple(sorted(shared.reshape(-1).tolist()))
    key = ranks, everywhere
    if key not in exchanges:
        exchanges[key] = MatrixExchange(ranks, mesh, everywhere)
    return exchanges[key], exchanges[key].add(label, param, lead, work, cut)


class Layout(NamedTuple):
    """The part of a tensor on each rank, and which ranks have equal parts."""

    shape: torch.Size  # the shape of all matrices that the ranks share
    bounds: list[Bounds]
    copies: list[tuple[int, ...]]  # ranks with equal entries together hold every part once

    def of(self, cut: Cut) -> Layout:
        """The layout of some rows."""
        dim, rows = cut.dim, self.shape[cut.dim]

        def inside(bounds: Bounds) -> Bounds:
            return *bounds[:dim], *cut.spans(rows, bounds[dim].start, bounds[dim].stop), *bounds[dim + 1 :]

        shape = [span.stop for span in inside(tuple(slice(0, size) for size in self.shape))]
        return Layout(torch.Size(shape), list(map(inside, self.bounds)), self.copies)


class MatrixExchange:
    """Matrices that the same ranks share; each is computed by its owner, or by every rank."""

    def __init__(self, ranks: Sequence[int], mesh: Any, everywhere: bool) -> None:
        self.group = group_of(ranks, [mesh])
        self.size, self.rank = len(ranks), ranks.index(dist.get_rank())
        self.everywhere = everywhere
        self._members = ranks
        self._known: dict[Any, Layout] = {}
        self.layouts: list[Layout] = []  # per DTensor, by its number
        self._work: list[float] = []
        self._owners: list[int] | None = None

    def add(self, label: str, param: Any, lead: int, work: float, cut: Cut | None) -> int:
        """Add a DTensor, or some of its rows; returns its number."""
        key = param.device_mesh, param.placements, param.shape, lead, cut
        if key not in self._known:
            whole = self._layout(label, param, lead)
            self._known[key] = whole if cut is None else whole.of(cut)
        self.layouts.append(self._known[key])
        self._work.append(work)
        self._owners = None
        return len(self._work) - 1

    def _layout(self, label: str, param: Any, lead: int) -> Layout:
        mesh, placements, dims = param.device_mesh, param.placements, param.dim()
        grid = mesh.mesh.cpu().numpy()
        shape = torch.Size((*local_part(param).shape[:lead], *param.shape[lead:]))
        cuts = [at for at, cut in enumerate(placements) if not cut.is_replicate() and cut.dim % dims >= lead]
        # FSDP cuts the local parts of tensor parallelism, although its placement is further to the left.
        cuts.sort(key=lambda at: not placements[at].is_shard())
        replicated = [at for at, cut in enumerate(placements) if cut.is_replicate()]
        bounds, copies = [], []
        for rank in self._members:
            coordinate = np.argwhere(grid == rank)[0].tolist()
            spans = [(0, size) for size in shape]
            for at in cuts:  # each as `torch.chunk` cuts
                start, stop = spans[placements[at].dim % dims]
                step = -(-(stop - start) // mesh.size(at))
                first = min(start + coordinate[at] * step, stop)
                spans[placements[at].dim % dims] = first, min(first + step, stop)
            bounds.append(tuple(slice(*span) for span in spans))
            copies.append(tuple(coordinate[at] for at in replicated))
        here = [range(size)[span] for size, span in zip(shape[lead:], bounds[self.rank][lead:])]
        if [list(along) for along in here] != [along.tolist() for along in logical_coordinates(param)[lead:]]:
            raise GradientError(
                f"{label} is a DTensor with placements {tuple(placements)}, and its rule requires whole matrices; "
                "they cannot be gathered from such shards: use another rule for it, in a separate param group"
            )
        return Layout(shape, bounds, copies)

    def owner(self, place: int) -> int:
        """The rank that computes a DTensor's matrices: assigned by decreasing work, each to the rank with the least."""
        if self._owners is None:
            load, self._owners = [0.0] * self.size, [0] * len(self._work)
            for one in sorted(range(len(self._work)), key=lambda at: (-self._work[at], at)):
                self._owners[one] = load.index(min(load))
                load[self._owners[one]] += self._work[one]
        return self._owners[place]

    def buckets(self, kinds: Mapping[int, Hashable]) -> Iterator[Bucket]:
        """The buckets of these DTensors, in this order; each bucket has matrices for every owner.

        Args:
            kinds: for each DTensor, by its number, a key that is equal for DTensors to be computed in one batch.
        """
        if self.everywhere:
            yield Bucket(self, kinds, list(kinds))
            return
        divided = [self._divided([place for place in kinds if self.owner(place) == rank]) for rank in range(self.size)]
        for parts in itertools.zip_longest(*divided, fillvalue=()):
            yield Bucket(self, kinds, [place for part in parts for place in part])

    def _divided(self, places: Sequence[int]) -> list[list[int]]:
        parts: list[list[int]] = []
        room = 0
        for place in places:
            numel = math.prod(self.layouts[place].shape)
            if not parts or numel > room:
                parts.append([])
                room = OWNED_IN_A_BUCKET
            parts[-1].append(place)
            room -= numel
        return parts


class Run(NamedTuple):
    """DTensors of the same layout and kind, which are copied together."""

    places: list[int]  # the DTensors' numbers
    layout: Layout


class _Message:
    """The layout of a message: parts of DTensors, in one section per rank."""

    def __init__(self, sections: Sequence[Sequence[tuple[Run, int]]], least: int = 0) -> None:
        # A section lists runs, each with the rank whose parts it contains, and has at least `least` elements.
        self.sizes: list[int] = []
        self._parts: list[tuple[Run, Bounds, list[int], list[int], int]] = []
        for section in sections:
            begin = end = sum(self.sizes)
            for run, rank in section:
                bounds = run.layout.bounds[rank]
                shape = [span.stop - span.start for span in bounds]
                space = -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
                strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
                self._parts.append((run, bounds, [len(run.places), *shape], [space, *strides], end))
                end += len(run.places) * space
            self.sizes.append(max(end - begin, least))

    def __len__(self) -> int:
        return sum(self.sizes)

    def parts(self, memory: torch.Tensor) -> Iterator[tuple[Run, Bounds, torch.Tensor]]:
        """Each run, the bounds of its parts in the whole, and the memory of these parts."""
        for run, bounds, shape, strides, begin in self._parts:
            yield run, bounds, memory.as_strided(shape, strides, begin)


class Bucket:
    """DTensors whose parts are sent to owners in one all-to-all, and back in another."""

    def __init__(self, exchange: MatrixExchange, kinds: Mapping[int, Hashable], places: Sequence[int]) -> None:
        ranks, rank, everywhere = range(exchange.size), exchange.rank, exchange.everywhere
        layouts = exchange.layouts

        def runs_of(owner: int) -> list[Run]:
            own = [place for place in places if everywhere or exchange.owner(place) == owner]
            grouped = itertools.groupby(own, lambda place: (id(layouts[place]), kinds[place]))
            return [Run(run, layouts[run[0]]) for run in (list(group) for _, group in grouped)]

        self.own = runs_of(rank)
        """The DTensors whose matrices this rank computes."""
        self._group, self._everywhere = exchange.group, everywhere
        listed = [[(run, other) for run in self.own] for other in ranks]
        least = max(len(_Message([section])) for section in listed) if everywhere else 0  # equal lengths for all-gather
        here = [listed[rank]] if everywhere else [[(run, rank) for run in runs_of(other)] for other in ranks]
        self._here = _Message(here, least)

        def sent(sections: Sequence[Sequence[tuple[Run, int]]]) -> list[list[tuple[Run, int]]]:
            # One of the ranks with equal parts sends the part.
            return [
                [one for one in section if one[0].layout.copies[rank] == one[0].layout.copies[other]]
                for other, section in enumerate(sections)
            ]

        self._leaving, self._arriving = _Message(sent(here)), _Message(sent(listed), least)
        self._returning = _Message(listed)
        self.arriving = len(self._arriving)  # elements that `gather` receives
        self.returning = 0 if everywhere else len(self._returning)  # elements that `scatter` sends

    def allocate(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros for this rank's parts, in the layout of messages, so that neither direction needs a copy."""
        return torch.zeros(len(self._here), dtype=dtype, device=device)

    def parts(self, memory: torch.Tensor) -> dict[int, torch.Tensor]:
        """Views of this rank's part of each DTensor, in memory of `allocate`."""
        return {place: part for run, _, parts in self._here.parts(memory) for place, part in zip(run.places, parts)}

    def gather(self, memory: torch.Tensor, received: torch.Tensor) -> Callable[[], object]:
        """Start to send this rank's parts to the owners; returns a function that waits for the parts it receives."""
        if self._everywhere:
            work = all_gather_flat(
                received.view(torch.uint8), memory.view(torch.uint8), group=self._group, async_op=True
            )
            return work.wait
        if self._leaving.sizes != self._here.sizes:
            here = {run.places[0]: parts for run, _, parts in self._here.parts(memory)}
            copies = memory.new_empty(len(self._leaving))
            leaving = [(parts, here[run.places[0]]) for run, _, parts in self._leaving.parts(copies)]
            copy_all([own for own, _ in leaving], [own for _, own in leaving])
            memory = copies
        return self._exchanged(received, self._arriving, memory, self._leaving).wait

    def unpack(self, received: torch.Tensor, wholes: Mapping[int, torch.Tensor]) -> None:
        """Copy received parts into whole tensors, one per run, keyed by the number of the run's first DTensor."""
        copy_all(*_pairs(wholes, self._arriving, received))

    def pack(self, wholes: Mapping[int, torch.Tensor], memory: torch.Tensor, message: torch.Tensor) -> None:
        """Copy parts of whole tensors into the message for `scatter`; with `everywhere`, into this rank's parts."""
        place = (self._here, memory) if self._everywhere else (self._returning, message)
        copy_all(*reversed(_pairs(wholes, *place)))

    def scatter(self, message: torch.Tensor, memory: torch.Tensor) -> Callable[[], object]:
        """Start to send results back into memory of `allocate`; returns a function that waits for them."""
        if self._everywhere:
            return lambda: None
        return self._exchanged(memory, self._here, message, self._returning).wait

    def _exchanged(self, received: torch.Tensor, arriving: _Message, sent: torch.Tensor, leaving: _Message) -> Any:
        width = sent.dtype.itemsize
        come, go = ([size * width for size in message.sizes] for message in (arriving, leaving))
        return dist.all_to_all_single(
            received.view(torch.uint8), sent.view(torch.uint8), come, go, group=self._group, async_op=True
        )


def _pairs(wholes: Mapping[int, torch.Tensor], message: _Message, memory: torch.Tensor) -> list[list[torch.Tensor]]:
    """Views of parts in whole tensors, and of the same parts in a message."""
    parts = list(message.parts(memory))
    inside = [wholes[run.places[0]][(slice(None), *bounds)] for run, bounds, _ in parts]
    return [inside, [own for _, _, own in parts]]
