"""Changed weights: a bit per stored weight, set by the update kernels, and lists made of the bits."""

from __future__ import annotations

import itertools
import math
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..backends.registry import passes_class
from ..devices import is_host
from ..kernels.spec import Output
from ..native.table import Writes, address_of, addresses_of, survey
from ..placement.local import is_distributed, local_part, logical_coordinates
from ..runtime.outputs import WORD, extent_of
from ..storage import INTEGERS, Stored

Change = tuple[str, torch.Tensor, torch.Tensor]  # a parameter's name, flat indices of weights, and their values


CHANGED = Output("changed", Stored.changed, "or")


class Names(NamedTuple):
    """Names of parameters, and their places by `id`."""

    names: list[str]
    places: dict[int, int]


_LARGEST = 2**31 - 1


@dataclass
class _Tracked:
    """The bits of a parameter, or of its part on this rank."""

    place: int  # index among all parameters
    handle: torch.Tensor  # the user's parameter
    param: torch.Tensor  # its part on this rank
    bits: torch.Tensor  # int32[words], in memory order
    watched: list[torch.Tensor]  # tensors whose versions reveal writes
    leads: bool  # whether this rank is the first holder of this part
    logical: Callable[[torch.Tensor], torch.Tensor] | None  # from flat indices into the part to indices into the whole
    written_elsewhere: bool = False  # whether other code has written to it since the last list

    def change(self, index: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map flat indices into the part to indices into the parameter."""
        whole = index if self.logical is None else self.logical(index)
        return whole.to(index_dtype(self.handle)), values


def _state_of(handle: torch.Tensor) -> tuple[int, int]:
    """Return the address of a parameter, and its count of writes."""
    versions = survey([handle, local_part(handle)] if is_distributed(handle) else [handle]).versions
    return (-1 if handle.is_meta else address_of(local_part(handle))), versions


def index_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype of flat indices into a parameter."""
    return torch.int32 if param.numel() <= _LARGEST else torch.int64


class Changes:
    """The changed bits of all parameters of an optimizer."""

    def __init__(self) -> None:
        self._tracked: dict[int, _Tracked] = {}
        self._ordered: list[_Tracked] = []
        self._sharers: Any = None
        self._names: Sequence[str] = ()
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], tuple[int, int]]] = {}  # before tables exist
        self._handles: list[torch.Tensor] = []
        self._writes = Writes([])
        self._places: dict[int, int] = {}  # places of watched tensors, by `id`
        self._by_torch: list[tuple[np.ndarray, list[int]]] = []  # version increments by torch in steps, and places
        self._words: list[torch.Tensor] = []
        self._steps: dict[int, tuple[list[torch.Tensor], np.ndarray]] = {}  # lists of tensors that steps wrote, places
        self._counts: Counter[int] = Counter()  # number of such steps, by `id` of the list
        self._last_addresses: list[int] = []
        self._cut: _Cut = {}

    def watch(self, params: Iterable[torch.Tensor]) -> None:
        """Record addresses and versions of parameters, before steps have tables."""
        for param in params:
            self._made[id(param)] = weakref.ref(param), _state_of(param)

    def attach(
        self,
        tables: Any,
        handles: Sequence[torch.Tensor],
        names: Names,
        dormant: Sequence[torch.Tensor],
    ) -> None:
        """Use the bits of new tables; copy the bits of earlier tables to them."""
        self._see_writes()
        tracked: dict[int, _Tracked] = {}
        every = [passes for engine in tables.engines for passes in engine.passes]
        self._words = [passes.outputs.words for passes in every]
        before, self._names = self._names, names.names
        self._sharers, self._handles = tables.sharers, list(handles)
        for passes in every:
            outputs = passes.outputs
            for position, updated in enumerate(passes.segment.entries):
                share = updated.share
                entry = self._track(names, share.param, share.holder, updated.param, outputs.bits(position))
                if share.start is not None:
                    entry.logical = share.logical
                outputs.watched[position] = entry.watched
                tracked[id(share.param)] = entry
        for param in dormant:
            # Only other code writes to dormant parameters.
            part = local_part(param)
            bits = torch.zeros(0, dtype=torch.int32, device=part.device)
            tracked[id(param)] = self._track(names, param, param, part, bits)
        replaced = {before[earlier.place]: earlier.handle for earlier in self._tracked.values()}
        for key, entry in tracked.items():
            earlier = self._tracked.get(key)
            made, before_steps = self._made.pop(key, (None, (0, 0)))
            if made is not None and made() is entry.handle:
                # Pieces of parameters have separate memory.
                address, versions = _state_of(entry.handle)
                is_piece = entry.watched[-1] is not entry.handle
                entry.written_elsewhere = (before_steps[0] if is_piece else address, versions) != before_steps
            # Receivers identify weights by name, and hold the weights of another parameter.
            entry.written_elsewhere |= replaced.get(names.names[entry.place], entry.handle) is not entry.handle
            if earlier is not None and earlier.handle is entry.handle:
                entry.written_elsewhere |= earlier.written_elsewhere
                if earlier.bits.shape == entry.bits.shape and earlier.param.stride() == entry.param.stride():
                    entry.bits.copy_(earlier.bits)
                else:
                    entry.written_elsewhere |= bool(earlier.bits.any())
        self._tracked = tracked
        self._writes = Writes([entry.watched[-1] for entry in tracked.values()])
        self._places = {id(tensor): place for place, entry in enumerate(tracked.values()) for tensor in entry.watched}
        self._by_torch = [
            (passes.outputs.writes, [self._places[id(watched[-1])] for watched in passes.outputs.watched])
            for passes in every
        ]
        self._steps.clear()
        self._cut.clear()
        self._ordered = sorted(tracked.values(), key=operator.attrgetter("place"))
        for engine in tables.engines:
            engine.wrote = self._note
        self._last_addresses = self._addresses()

    def _track(self, names: Names, handle: Any, holder: Any, part: torch.Tensor, bits: torch.Tensor) -> _Tracked:
        """Return the tracking record of a parameter, or of its section `holder`."""
        is_part = is_distributed(holder)
        watched = [local_part(holder), holder] if is_part else [holder]
        leads = self._sharers is None or self._sharers.leads(holder)
        logical = _into_whole(holder, part.shape) if is_part else None
        return _Tracked(names.places[id(handle)], handle, part, bits, watched, leads, logical)

    def _note(self, written: list[torch.Tensor]) -> None:
        """Record a step that wrote these tensors and incremented their versions."""
        if id(written) not in self._steps:
            if len(self._steps) > 64:
                self._count_steps()
                self._steps.clear()
            places = [self._places[id(tensor)] for tensor in written if id(tensor) in self._places]
            self._steps[id(written)] = written, np.asarray(places, dtype=np.int64)
        self._counts[id(written)] += 1

    def _count_steps(self) -> None:
        """Account for the version increments of steps, which are not writes of other code."""
        for key, count in self._counts.items():
            np.add.at(self._writes.versions, self._steps[key][1], count)
        self._counts.clear()
        for counted, places in self._by_torch:
            np.add.at(self._writes.versions, places, counted)
            counted[:] = 0

    def _addresses(self) -> list[int]:
        return [address_of(local_part(entry.watched[-1])) for entry in self._tracked.values()]

    def _see_writes(self) -> None:
        """Mark parameters that other code has written to, or moved to other memory."""
        self._count_steps()
        # An assignment to `param.data` increments no version.
        before, self._last_addresses = self._last_addresses, self._addresses()
        moved = [place for place, pair in enumerate(zip(before, self._last_addresses)) if pair[0] != pair[1]]
        tracked = list(self._tracked.values())
        for place in (*self._writes.take(), *moved):
            tracked[place].written_elsewhere = True

    @torch.no_grad()
    def read(self, *, clear: bool, gather: bool) -> list[Change]:
        """Return the changed weights, by parameter; the host waits once."""
        self._see_writes()
        tracked = self._ordered
        gathers = gather and self._sharers is not None and self._sharers.size > 1
        lists: list[_OnCpu | _OnDevice] = []
        for device in dict.fromkeys(entry.param.device for entry in tracked):
            own = [entry for entry in tracked if entry.param.device == device and (entry.leads or not gathers)]
            by_host = is_host(device) and not _by_kernels(device)
            lists += [_OnCpu(own) if by_host else _OnDevice(own, device, self._cut)] if own else []
        made = self._gathered(lists) if gathers else {}
        for listing in () if gathers else lists:
            for entry, pair in zip(listing.tracked, listing.made(listing.counts().tolist())):
                made[entry.place] = _moved(pair[0], entry.handle), _moved(pair[1], entry.handle)
        if clear:
            for entry in tracked:
                entry.written_elsewhere = False
            if self._words:
                torch._foreach_zero_(self._words)
        return [(self._names[place], *made[place]) for place in sorted(made) if made[place][0].numel()]

    def _gathered(self, lists: Sequence[_OnCpu | _OnDevice]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the changes of all ranks, on each rank, with two messages: counts, then changes."""
        sharers = self._sharers
        own_device = local_part(self._handles[0]).device if self._handles else torch.device("cpu")
        device = next((listing.device for listing in lists if not is_host(listing.device)), own_device)
        mine = torch.zeros(len(self._handles), dtype=torch.int64, device=device)
        places = [[entry.place for entry in listing.tracked] for listing in lists]
        for listing, own in zip(lists, places):
            mine.index_copy_(0, sent(own, device), _moved(listing.counts(), mine))
        # The only host wait.
        counts = torch.stack(sharers.gather(mine)).tolist()
        changes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for listing, own in zip(lists, places):
            changes.update(zip(own, listing.made([counts[sharers.rank][place] for place in own])))
        changed = [place for place in range(len(self._handles)) if any(rank[place] for rank in counts)]
        kinds = {
            (place, which): kind
            for place in changed
            for which, kind in enumerate((index_dtype(self._handles[place]), self._handles[place].dtype))
        }
        # Elements of wide dtypes first, so that all are aligned.
        runs = sorted(kinds, key=lambda run: (-kinds[run].itemsize, str(kinds[run])))
        sizes = [[rank[run[0]] * kinds[run].itemsize for run in runs] for rank in counts]
        # As bytes: neither NCCL nor gloo sends 16-bit integers.
        parts, length = [], max(map(sum, sizes))
        for _, alike in itertools.groupby([run for run in runs if run[0] in changes], kinds.__getitem__):
            parts.append(torch.cat([_moved(changes[place][which], mine) for place, which in alike]).view(torch.uint8))
        padding = mine.new_zeros(length - sum(map(len, parts)), dtype=torch.uint8)
        everyone = sharers.gather(torch.cat([*parts, padding])) if length else []
        arrived: dict[tuple[int, int], list[torch.Tensor]] = {run: [] for run in runs}
        for received, widths in zip(everyone, sizes):
            for run, part in zip(runs, received[: sum(widths)].split(widths)):
                arrived[run] += [part.view(kinds[run])] if part.numel() else []
        made = {}
        for place in changed:
            handle = self._handles[place]
            index, values = (torch.cat(arrived[place, which]) for which in (0, 1))
            cut = getattr(handle, "placements", None)
            cut = None if cut is None else [placement for placement in cut if not placement.is_replicate()]
            # Whether the concatenated lists of ranks have ascending indices.
            in_order = (
                handle.is_contiguous() if cut is None else len(cut) <= 1 and all(each.is_shard(0) for each in cut)
            )
            if not in_order:
                index, order = torch.sort(index)
                values = values[order]
            made[place] = _moved(index, handle), _moved(values, handle)
        return made


def _moved(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the device of another; the host does not wait for copies to a GPU."""
    if tensor.device == like.device:
        return tensor
    return sent(tensor, like.device) if is_host(tensor.device) else tensor.to(like.device)


def sent(numbers: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy numbers from the host to a device without a host wait."""
    table = numbers if isinstance(numbers, torch.Tensor) else torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return table.to(device) if is_host(device) else table.pin_memory().to(device, non_blocking=True)


def _into_whole(handle: Any, sizes: torch.Size) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that maps flat indices into a DTensor's local part to indices into the DTensor."""
    coordinates: list[torch.Tensor] = []

    def logical(indices: torch.Tensor) -> torch.Tensor:
        if not coordinates:
            coordinates.extend(_moved(coordinate, indices) for coordinate in logical_coordinates(handle))
        rest, index, stride = indices.to(torch.int64), torch.zeros_like(indices, dtype=torch.int64), handle.numel()
        inner = math.prod(sizes)
        for dim, size in enumerate(sizes):
            inner //= max(size, 1)
            stride //= max(handle.shape[dim], 1)
            index += coordinates[dim][rest // inner] * stride
            rest = rest % inner
        return index

    return logical


def _by_kernels(device: torch.device) -> bool:
    return passes_class(device).__name__ == "TritonPasses"


class _OnCpu:
    """Lists of parameters on the host."""

    device = torch.device("cpu")

    def __init__(self, tracked: Sequence[_Tracked]) -> None:
        self.tracked, self._indices = list(tracked), list(map(_changed, tracked))

    def counts(self) -> torch.Tensor:
        """int64[parameters], counts of changed weights."""
        return torch.tensor(list(map(len, self._indices)), dtype=torch.int64, device="cpu")

    def made(self, counts: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Flat indices into the parameters, and values."""
        pairs = zip(self.tracked, self._indices)
        return [entry.change(index, entry.param.detach().reshape(-1)[index]) for entry, index in pairs]


def _changed(entry: _Tracked) -> torch.Tensor:
    """Flat indices of changed weights of the local part, on the host."""
    if entry.written_elsewhere:
        return torch.arange(entry.param.numel(), dtype=torch.int64, device="cpu")
    if entry.bits.numel() and not entry.param.is_contiguous():
        return _flags(entry).reshape(-1).nonzero().reshape(-1)
    words = entry.bits.numpy()
    nonzero = np.flatnonzero(words)
    flags = np.unpackbits(words[nonzero].view(np.uint8), bitorder="little").reshape(-1, WORD)
    row, lane = np.nonzero(flags)
    return torch.from_numpy(nonzero[row] * WORD + lane)


def _flags(entry: _Tracked) -> torch.Tensor:
    """A bool tensor of the parameter's shape, from bits in memory order."""
    lanes = torch.arange(WORD, dtype=torch.int32, device=entry.bits.device)
    laid = ((entry.bits[:, None] >> lanes) & 1).to(torch.bool).reshape(-1)
    return laid[: extent_of(entry.param)].as_strided(entry.param.shape, entry.param.stride())


class _OnDevice:
    """Lists of parameters on a device, made without a host wait per parameter."""

    def __init__(self, tracked: Sequence[_Tracked], device: torch.device, cut: _Cut) -> None:
        self.device, by_kernels = device, _by_kernels(device)
        marked = [entry for entry in tracked if not entry.written_elsewhere and entry.bits.numel()]
        plain = [entry for entry in marked if by_kernels and entry.param.is_contiguous()]
        key = (*map(id, plain), addresses_of([entry.param for entry in plain]).tobytes())
        if device not in cut or cut[device][0] != key:
            cut[device] = key, _runs_of(plain, device)
        self._runs = cut[device][1]
        chosen = set(map(id, plain))
        others = [entry for entry in marked if id(entry) not in chosen]
        self._flags = [_flags(entry).reshape(-1) for entry in others]
        chosen.update(map(id, others))
        self._unmarked = [entry for entry in tracked if id(entry) not in chosen]
        self.tracked = [*(entry for run in self._runs for entry in run.members), *others, *self._unmarked]

    def counts(self) -> torch.Tensor:
        """int64[parameters] on the device."""
        counts = [*(run.counted() for run in self._runs), *(flags.sum().reshape(1) for flags in self._flags)]
        if self._unmarked:
            counts.append(
                sent([entry.param.numel() if entry.written_elsewhere else 0 for entry in self._unmarked], self.device)
            )
        return torch.cat(counts)

    def made(self, counts: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Flat indices into the parameters, and values."""
        rest, flags = iter(counts), iter(self._flags)
        pairs = [pair for run in self._runs for pair in run.listed(list(itertools.islice(rest, len(run.members))))]
        for entry, count in zip(self.tracked[len(pairs) :], rest):
            marks = next(flags, None)
            if marks is not None:
                index = torch.nonzero_static(marks, size=count).reshape(-1)
            else:
                index = torch.arange(count, dtype=torch.int64, device=self.device)
            pairs.append((index, entry.param.detach().reshape(-1)[index]))
        return [entry.change(*pair) for entry, pair in zip(self.tracked, pairs)]


class _Run:
    """Parameters whose bits are in the same table, cut into blocks of words, and kernels that read the blocks."""

    def __init__(self, members: Sequence[_Tracked], device: torch.device) -> None:
        from ..backends.triton.changes import WORDS, count_changes, list_changes
        from ..kernels.launch import Launcher

        self.members, self._device = list(members), device
        bits = members[0].bits
        # The bits are views of this table.
        table = bits.as_strided((bits.untyped_storage().nbytes() // bits.itemsize,), (1,), 0)
        self._dtype, self._bits = members[0].param.dtype, table
        words = np.asarray([entry.bits.numel() for entry in members])
        first = np.asarray([entry.bits.storage_offset() for entry in members])
        addresses = addresses_of([entry.param for entry in members])
        counts = -(-words // WORDS)
        ends = np.cumsum(counts)
        owner = np.repeat(np.arange(len(members)), counts)
        within = (np.arange(len(owner)) - (ends - counts)[owner]) * WORDS
        blocks = np.stack([first[owner] + within, (first + words)[owner], within * WORD, addresses[owner]], 1)
        self._blocks = torch.from_numpy(blocks.astype(np.int64)).to(device)
        self._ends = torch.from_numpy(ends - 1).to(device)
        self._counts = torch.zeros(len(owner), dtype=torch.int64, device=device)
        self._count = Launcher(count_changes, len(owner), device, {"WORDS": WORDS})
        self._list = Launcher(list_changes, len(owner), device, {"WORDS": WORDS, "BYTES": self._dtype.itemsize})

    def counted(self) -> torch.Tensor:
        """int64[parameters], counts of changed weights, on the device."""
        self._count(self._bits, self._blocks, self._counts)
        self._cumulated = self._counts.cumsum(0)
        ends = self._cumulated[self._ends]
        return torch.diff(ends, prepend=ends.new_zeros(1))

    def listed(self, counts: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return indices and values of each parameter, views of one array."""
        total = sum(counts)
        indices = torch.empty(total, dtype=index_dtype(self.members[0].handle), device=self._device)
        values = torch.empty(total, dtype=self._dtype, device=self._device)
        if total:
            bits = values.view(INTEGERS[self._dtype.itemsize])
            self._list(self._bits, self._blocks, self._cumulated, indices, bits)
        return zip(indices.split(counts), values.split(counts))


_Cut = dict[torch.device, tuple[tuple[Any, ...], list[_Run]]]  # by device: addresses of the members, and their runs


def _runs_of(tracked: Sequence[_Tracked], device: torch.device) -> list[_Run]:
    """Contiguous parameters, in runs that a kernel reads."""
    kinds: dict[tuple[Any, ...], list[_Tracked]] = {}
    for entry in tracked:
        key = (address_of(entry.bits.untyped_storage()), entry.param.dtype, index_dtype(entry.handle))
        kinds.setdefault(key, []).append(entry)
    return [_Run(members, device) for members in kinds.values()]
