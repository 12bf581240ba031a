"""Which stored weights have changed: a bit for each, set by the update kernels, and the list that is made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..engine import segment_class
from ..engine.taps import WORD, extent_of
from ..placements.local import is_distributed, logical_coordinates
from ..tensor_watch import sum_of_versions

Change = tuple[str, torch.Tensor, torch.Tensor]
"""A parameter's name, flat indices of weights, and their values."""

_LARGEST = 2**31 - 1
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _Tracked:
    """A parameter's bits.

    name: of the parameter. handle: as users have it. param: the part of it that is here. bits: int32[words] along its
    memory. writes: int64[1], versions that its passes have counted. version: of both when they were last looked at,
    less what steps have written since the beginning. wholly: whether other code has written to it since the list was
    last made. to_logical: from flat indices into what is here to those into the logical tensor, where they differ.
    """

    name: str
    handle: torch.Tensor
    param: torch.Tensor
    bits: torch.Tensor
    writes: np.ndarray
    version: int | None = None
    wholly: bool = False
    to_logical: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        return torch.int32 if self.handle.numel() <= _LARGEST else torch.int64

    def versions(self) -> int:
        """How often any code but its passes has written to it, and steps."""
        own = sum_of_versions([self.param]) - int(self.writes[0])
        return own if self.handle is self.param else own + sum_of_versions([self.handle])

    def logical(self, found: torch.Tensor) -> torch.Tensor:
        """Flat indices into the logical tensor, of flat indices into what is here of it."""
        if self.to_logical is not None:
            return self.to_logical(found).to(self.dtype)
        if not is_distributed(self.handle):
            return found
        return _whole_index(self.handle, self.param, found).to(self.dtype)


class Changes:
    """The bits of all parameters of an optimizer."""

    def __init__(self) -> None:
        self._tracked: dict[int, _Tracked] = {}
        self._order: list[int] = []
        self._agreement: Any = None
        self._written: dict[int, tuple[list[torch.Tensor], list[int]]] = {}
        self._counts: dict[int, int] = {}

    def attach(self, tables: Any, names: Sequence[str], places: Mapping[int, int]) -> None:
        """Use the bits of new tables; what was set before is set in them too."""
        self._see_writes()
        found: dict[int, _Tracked] = {}
        self._agreement = tables.agreement
        for engine, params in zip(tables.engines, tables.members):
            handles = {id(entry): handle for entry, handle in zip(engine.entries, params)}
            for segment in engine.segments:
                for position, entry in enumerate(segment.entries):
                    handle = handles[id(entry)]
                    name, taps = names[places[id(handle)]], segment.taps
                    one = _Tracked(name, handle, entry.param, taps.bits(position), taps.writes[position : position + 1])
                    known = self._tracked.get(id(handle))
                    if known is not None and known.handle is handle:
                        one.wholly = known.wholly
                        if known.bits.shape == one.bits.shape and known.param.stride() == entry.param.stride():
                            one.bits.copy_(known.bits)
                        else:
                            one.wholly = True
                    found[id(handle)] = one
        self._tracked = found
        self._order = sorted(found, key=lambda each: places[each])
        for engine in tables.engines:
            engine.wrote = self._note
        self._see_writes()

    def _note(self, written: list[torch.Tensor]) -> None:
        """Count tensors that a step has written, as autograd does."""
        known = self._written.get(id(written))
        if known is None:
            if len(self._written) > 64:
                self._fold_counts()
            self._written[id(written)] = (written, [1])
        else:
            known[1][0] += 1

    def _fold_counts(self) -> None:
        for written, (count,) in self._written.values():
            for tensor in written:
                self._counts[id(tensor)] = self._counts.get(id(tensor), 0) + count
        self._written.clear()

    def _see_writes(self) -> None:
        """Take note of parameters that other code than steps has written to."""
        self._fold_counts()
        for one in self._tracked.values():
            tensors = {id(one.param), id(one.handle)}
            now = one.versions() - sum(self._counts.get(each, 0) for each in tensors)
            one.wholly |= one.version is not None and now != one.version
            one.version = now

    def list(self, *, clear: bool, gather: bool) -> Iterator[Change]:
        """The changed weights of each parameter that has some."""
        self._see_writes()
        tracked = [self._tracked[each] for each in self._order]
        made = _listed(tracked)
        if clear:
            for one in tracked:
                one.wholly = False
                one.bits.zero_()
        if gather and self._agreement is not None and self._agreement.size > 1:
            made = _gathered(tracked, made, self._agreement)
        return iter([(one.name, *made[place]) for place, one in enumerate(tracked) if len(made[place][0])])


def _whole_index(handle: Any, part: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Flat indices into a DTensor, of flat indices into its local part."""
    rest, whole, stride = found.to(torch.int64), torch.zeros_like(found, dtype=torch.int64), handle.numel()
    sizes = part.shape
    coordinates = logical_coordinates(handle)
    inner = math.prod(sizes)
    for dim, size in enumerate(sizes):
        inner //= max(size, 1)
        stride //= max(handle.shape[dim], 1)
        whole += coordinates[dim].to(found.device)[rest // inner] * stride
        rest = rest % inner
    return whole


def _listed(tracked: Sequence[_Tracked]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Flat indices into the logical tensor and values for each parameter; the host waits once."""
    with torch.no_grad():
        by_device: dict[torch.device, list[int]] = {}
        for place, one in enumerate(tracked):
            by_device.setdefault(one.param.device, []).append(place)
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for device, places in by_device.items():
            own = [tracked[place] for place in places]
            lists = _on_cpu(own) if own[0].param.is_cpu and not _by_kernels(device) else _on_device(own, device)
            found.update(zip(places, lists))
        return [found[place] for place in range(len(tracked))]


def _by_kernels(device: torch.device) -> bool:
    return segment_class(device).__name__ == "CudaSegment"


def _on_cpu(tracked: Sequence[_Tracked]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    lists = []
    for one in tracked:
        values = one.param.detach()
        if one.wholly:
            index = torch.arange(values.numel(), dtype=one.dtype)
        elif values.is_contiguous():
            words = one.bits.numpy()
            there = np.flatnonzero(words)
            flags = np.unpackbits(words[there].view(np.uint8), bitorder="little").reshape(-1, WORD)
            row, lane = np.nonzero(flags)
            index = torch.from_numpy(there[row] * WORD + lane).to(one.dtype)
        else:
            index = _flags(one).reshape(-1).nonzero().reshape(-1).to(one.dtype)
        lists.append((one.logical(index), values.reshape(-1)[index.long()]))
    return lists


def _flags(one: _Tracked) -> torch.Tensor:
    """bool of the parameter's shape, from bits along its memory."""
    lanes = torch.arange(WORD, dtype=torch.int32, device=one.bits.device)
    laid = ((one.bits[:, None] >> lanes) & 1).to(torch.bool).reshape(-1)
    return laid[: extent_of(one.param)].as_strided(one.param.shape, one.param.stride())


def _on_device(tracked: Sequence[_Tracked], device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As `_on_cpu`, where the host must not wait for each parameter."""
    by_kernels = _by_kernels(device)
    plain = [one for one in tracked if by_kernels and not one.wholly and one.param.is_contiguous() and len(one.bits)]
    chosen = {id(one) for one in plain}
    others = [one for one in tracked if id(one) not in chosen and not one.wholly and len(one.bits)]
    flags = {id(one): _flags(one).reshape(-1) for one in others}
    blocks = _Blocks(plain, device)
    totals = [blocks.counted(), *(flags[id(one)].sum().reshape(1) for one in others)]
    # The one time that the host waits.
    counts = torch.cat(totals).tolist()
    known = dict(zip(map(id, [*plain, *others]), counts))
    listed = blocks.listed([known[id(one)] for one in plain])
    lists = []
    for one in tracked:
        values = one.param.detach()
        if id(one) in listed:
            index, chosen_values = listed[id(one)]
        else:
            if one.wholly:
                index = torch.arange(values.numel(), dtype=torch.int64, device=device)
            elif id(one) in flags:
                index = torch.nonzero_static(flags[id(one)], size=known[id(one)]).reshape(-1)
            else:
                index = torch.zeros(0, dtype=torch.int64, device=device)
            index, chosen_values = index.to(one.dtype), values.reshape(-1)[index]
        lists.append((one.logical(index), chosen_values))
    return lists


class _Blocks:
    """Parameters that lie in memory in the order of their indices, cut into blocks of words."""

    def __init__(self, tracked: Sequence[_Tracked], device: torch.device) -> None:
        self._tracked, self._device = list(tracked), device
        self._runs: list[tuple[list[_Tracked], dict[str, torch.Tensor], int]] = []
        kinds: dict[tuple[Any, ...], list[_Tracked]] = {}
        for one in tracked:
            key = (one.bits.untyped_storage().data_ptr(), one.param.dtype, one.dtype)
            kinds.setdefault(key, []).append(one)
        for members in kinds.values():
            self._runs.append((members, *self._tables(members)))

    def _tables(self, members: Sequence[_Tracked]) -> tuple[dict[str, torch.Tensor], int]:
        """The blocks of parameters whose bits are in one table."""
        from ..codegen.triton_changes import WORDS

        words = np.asarray([len(one.bits) for one in members])
        first = np.asarray([one.bits.storage_offset() for one in members])
        blocks = -(-words // WORDS)
        owner = np.repeat(np.arange(len(members)), blocks)
        within = np.arange(int(blocks.sum())) - np.repeat(np.cumsum(blocks) - blocks, blocks)
        addresses = np.asarray([one.param.data_ptr() for one in members], dtype=np.int64)
        tables = {
            "first_word": first[owner] + within * WORDS,
            "last_word": (first + words)[owner],
            "begins": within * WORDS * WORD,
            "addresses": addresses[owner],
            "ends": np.cumsum(blocks) - 1,
        }
        stacked = torch.from_numpy(np.concatenate([table.astype(np.int64) for table in tables.values()]))
        if members[0].bits.is_cuda:
            stacked = stacked.pin_memory()
        sizes = [len(table) for table in tables.values()]
        return dict(zip(tables, stacked.to(self._device, non_blocking=True).split(sizes))), len(owner)

    def counted(self) -> torch.Tensor:
        """int64[parameters], how many weights of each have changed; on the device."""
        from ..codegen.launch_triton import prepare
        from ..codegen.triton_changes import WORDS, count_changes

        self._cumulated: list[torch.Tensor] = []
        totals: dict[int, torch.Tensor] = {}
        for members, tables, blocks in self._runs:
            counts = torch.zeros(blocks, dtype=torch.int64, device=self._device)
            bits = _table_of(members[0].bits)
            launch = prepare(count_changes, blocks, self._device, {"WORDS": WORDS})
            launch(bits, tables["first_word"], tables["last_word"], counts)
            cumulated = counts.cumsum(0)
            self._cumulated.append(cumulated)
            ends = cumulated[tables["ends"]]
            each = torch.diff(ends, prepend=ends.new_zeros(1))
            totals.update(zip(map(id, members), each.unbind()))
        own = [totals[id(one)] for one in self._tracked]
        return torch.stack(own) if own else torch.zeros(0, dtype=torch.int64, device=self._device)

    def listed(self, counts: Sequence[int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Indices and values of each parameter by `id`, views of one array for all of a kind."""
        from ..codegen.launch_triton import prepare
        from ..codegen.triton_changes import WORDS, list_changes

        known = dict(zip(map(id, self._tracked), counts))
        lists: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for (members, tables, blocks), cumulated in zip(self._runs, self._cumulated):
            own = [known[id(one)] for one in members]
            dtype = members[0].param.dtype
            found = torch.empty(sum(own), dtype=members[0].dtype, device=self._device)
            values = torch.empty(sum(own), dtype=dtype, device=self._device)
            if len(found):
                launch = prepare(list_changes, blocks, self._device, {"WORDS": WORDS, "BYTES": dtype.itemsize})
                listed = [tables[name] for name in ("first_word", "last_word", "begins", "addresses")]
                launch(_table_of(members[0].bits), *listed, cumulated, found, values.view(_INTEGERS[dtype.itemsize]))
            parts = zip(members, found.split(own), values.split(own))
            lists.update({id(one): (index, value) for one, index, value in parts})
        return lists


def _table_of(bits: torch.Tensor) -> torch.Tensor:
    """The table that a view is of."""
    return bits.as_strided((bits.untyped_storage().nbytes() // bits.itemsize,), (1,), 0)


def _gathered(
    tracked: Sequence[_Tracked], own: Sequence[tuple[torch.Tensor, torch.Tensor]], agreement: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The changes of all ranks on each of them; what several ranks hold is there once."""
    device = own[0][0].device
    lengths = torch.tensor([len(index) for index, _ in own], dtype=torch.int64, device=device)
    everywhere = torch.stack(agreement.gather(lengths)).tolist()
    longest = [max(each) for each in zip(*everywhere)]
    made = []
    for kind in dict.fromkeys((one.dtype, one.param.dtype) for one in tracked):
        places = [place for place, one in enumerate(tracked) if (one.dtype, one.param.dtype) == kind]
        size = sum(longest[place] for place in places)
        index = torch.zeros(size, dtype=kind[0], device=device)
        values = torch.zeros(size, dtype=kind[1], device=device)
        begin = 0
        for place in places:
            stop = begin + len(own[place][0])
            index[begin:stop], values[begin:stop] = own[place]
            begin += longest[place]
        # As bytes: neither NCCL nor gloo knows 16-bit integers.
        sent = agreement.gather(values.view(torch.uint8)) if size else [values]
        made.append((places, agreement.gather(index), [each.view(kind[1]) for each in sent]))
    lists: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for places, indices, values_of_ranks in made:
        begin = 0
        for place in places:
            spans = [(rank, everywhere[rank][place]) for rank in range(len(everywhere))]
            index = torch.cat([indices[rank][begin : begin + count] for rank, count in spans])
            together = torch.cat([values_of_ranks[rank][begin : begin + count] for rank, count in spans])
            begin += longest[place]
            lists[place] = _once(index, together)
    return [lists[place] for place in range(len(tracked))]


def _once(index: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In the order of the indices, each once."""
    ordered, order = torch.sort(index, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    keep[1:] = ordered[1:] != ordered[:-1]
    return ordered[keep], values[order][keep]
