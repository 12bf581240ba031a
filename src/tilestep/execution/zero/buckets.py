"""Flat buckets: the layout of parameters in buckets, each rank's section, and the memory of a bucket."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ...devices import has_streams
from ...native.table import address_of
from ...placement import WAYS, PeerMemory, Ranks, share_memory
from ...runtime import is_dense

ALIGNMENT = 16  # alignment of parameters and sections, in elements: at least 16 bytes
LEAST_PADDING = 2**20  # the least bytes of padding for which another mesh is advised
_LARGEST_SHARED_UNIT = 128  # units that divide it share buckets; every other unit has separate buckets
LEAST_CAP, LARGEST_CAP = 25 * 2**20, 256 * 2**20
"""The limits of the first and last buckets' default size, in bytes: smaller buckets cost the host more time than the
network, and nothing hides the communication of a large last bucket."""

PARTS = 16  # the first and last buckets are 1/16 of all gradients: backward does not hide their communication
LARGEST_PARTS = 6  # buckets between are at most 1/6, so that communication ends soon after backward


Kind = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]
"""The dtype of a parameter, and the dtypes in which its gradient and the parameter are sent; None: the first dtype."""


@dataclass(frozen=True)
class Item:
    """A parameter to be placed in a bucket."""

    numel: int
    itemsize: int  # bytes per element
    kind: Hashable = None  # only parameters of the same kind share a bucket
    whole: bool = False  # whether one rank must own all of it, since its rule needs whole tensors
    cost: int = 0  # the cost of the update of a whole parameter, in any unit
    trains: bool = True  # whether it has gradients; frozen parameters have separate buckets
    unit: int = ALIGNMENT  # pieces begin at multiples of `unit` elements, itself a multiple of `ALIGNMENT`
    by_rows: bool = False  # whether pieces are rows, in the shape of rows; other pieces are flat


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a bucket."""

    index: int  # the index of the parameter among all items
    offset: int  # its first element in the bucket
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """A bucket: consecutive parameters, cut into one section of equal size per rank."""

    slots: tuple[Slot, ...]
    section: int  # elements of each rank's section
    ranks: int  # the number of ranks
    whole: bool = False  # whether no parameter is cut

    @property
    def numel(self) -> int:
        """Elements of the bucket."""
        return self.section * self.ranks

    def piece(self, slot: Slot, rank: int) -> tuple[int, int]:
        """The half-open range of a parameter's elements, in storage order, in a rank's section."""
        start = max(slot.offset, rank * self.section)
        stop = min(slot.offset + slot.numel, (rank + 1) * self.section)
        return (start - slot.offset, stop - slot.offset) if start < stop else (0, 0)


def default_cap(gradient_bytes: float, done: float = 0.0) -> float:
    """The default bytes of the next bucket: small buckets at both ends of backward, large buckets between."""
    # The first bucket should be sent early; nothing hides the last bucket, which the next forward needs first. The
    # buckets between are sent while the model computes, and each costs the host the same for any size: so a bucket
    # has as many bytes as all before it, or half of the remaining bytes, within limits.
    least = min(max(gradient_bytes / PARTS, LEAST_CAP), LARGEST_CAP)
    most = max(least, min(gradient_bytes / LARGEST_PARTS, 2 * LARGEST_CAP))
    return min(max(min(done, (gradient_bytes - done) / 2), least), most)


def default_sizes(gradient_bytes: float) -> list[float]:
    """The bytes of the buckets that `default_cap` gives for many small parameters."""
    sizes: list[float] = []
    done = 0.0
    while gradient_bytes - done >= 1:
        sizes.append(min(default_cap(gradient_bytes, done), gradient_bytes - done))
        done += sizes[-1]
    return sizes


def plan_buckets(items: Sequence[Item], ranks: int, cap_bytes: float | None = None) -> list[BucketLayout]:
    """Put parameters into buckets, in the order in which backward completes them: the last parameter first."""
    # A bucket is full when it holds at least `cap_bytes`; a bucket of whole parameters when it holds `cap_bytes` per
    # rank, so that it has enough parameters for all ranks. Every rank computes the same layout.
    filling: dict[Hashable, list[int]] = {}
    sizes: dict[Hashable, int] = {}
    done: list[list[int]] = []
    # Frozen parameters are counted separately: they have gradients once they are unfrozen.
    totals = {False: 0, True: 0}
    in_full = {False: 0, True: 0}
    for item in items:
        totals[item.trains] += item.numel * item.itemsize
    for index in reversed(range(len(items))):
        item = items[index]
        # Sections are multiples of the largest unit in a bucket, and so of all its units.
        apart = item.unit if _LARGEST_SHARED_UNIT % item.unit else 0
        key = (item.kind, item.itemsize, item.whole, item.trains, apart)
        filling.setdefault(key, []).append(index)
        sizes[key] = sizes.get(key, 0) + item.numel * item.itemsize
        if cap_bytes is not None:
            full = cap_bytes * (ranks if item.whole else 1)
        else:
            full = default_cap(totals[item.trains], in_full[item.trains])
            full = max(full, LEAST_CAP * ranks) if item.whole else full
        if sizes[key] >= full:
            done.append(filling.pop(key))
            in_full[item.trains] += sizes.pop(key)
    # A bucket that was never full is complete when its last parameter is.
    done.extend(filling.values())
    done.sort(key=lambda members: -members[-1])
    costs = [0] * ranks
    return [_layout(members, items, ranks, costs) for members in done]


def padding_advice(items: Sequence[Item], layouts: Sequence[BucketLayout], cap_bytes: float | None = None) -> str:
    """Advice if buckets are mostly padding; empty if they are not, or if no option would help."""
    used = sum(item.numel * item.itemsize for item in items)
    total = _bytes(items, layouts)
    if total <= 2 * used:
        return ""
    ranks = layouts[0].ranks
    padding = f"{1 - used / total:.0%} padding ({(total - used) / 2**10:.1f} KiB)"
    if cap_bytes is not None and _bytes(items, plan_buckets(items, ranks, math.inf)) < 0.75 * total:
        return f"buckets of bucket_cap_mb={cap_bytes / 2**20:.2g} are {padding}: use a larger bucket_cap_mb"
    if total - used < LEAST_PADDING:
        return ""
    return (
        f"buckets are {padding}: parameters that cannot be split fill the sections of few of the {ranks} ranks; shard "
        'over fewer ranks, with a mesh of two dimensions "replicate" and "shard"'
    )


def _bytes(items: Sequence[Item], layouts: Sequence[BucketLayout]) -> int:
    return sum(layout.numel * items[layout.slots[0].index].itemsize for layout in layouts)


def _layout(members: Sequence[int], items: Sequence[Item], ranks: int, costs: list[int]) -> BucketLayout:
    if items[members[0]].whole:
        return _whole_layout(members, items, ranks, costs)
    slots, end = [], 0
    for index in members:
        begin = _aligned(end, items[index].unit)
        slots.append(Slot(index, begin, items[index].numel))
        end = begin + _aligned(items[index].numel)
    unit = max(items[index].unit for index in members)
    return BucketLayout(tuple(slots), max(_aligned(-(-end // ranks), unit), unit), ranks)


def _whole_layout(members: Sequence[int], items: Sequence[Item], ranks: int, costs: list[int]) -> BucketLayout:
    """Assign the most expensive parameters first, each to the rank with the least cost, in the shortest sections."""
    sizes = {index: _aligned(items[index].numel) for index in members}
    by_size = sorted(members, key=lambda member: (-items[member].numel, member))
    section = max(*_dealt(by_size, sizes, ranks)[1], ALIGNMENT)
    loads = [0] * ranks
    owners: dict[int, int] = {}
    for index in sorted(members, key=lambda member: (-items[member].cost, -items[member].numel, member)):
        fitting = [rank for rank in range(ranks) if loads[rank] + sizes[index] <= section]
        if not fitting:
            # The assignment by size alone always fits.
            owners, loads = _dealt(by_size, sizes, ranks)
            break
        spent = list(costs)
        for other, owner in owners.items():
            spent[owner] += items[other].cost
        owners[index] = rank = min(fitting, key=lambda candidate: (spent[candidate], candidate))
        loads[rank] += sizes[index]
    parts = [sum(items[index].cost for index, owner in owners.items() if owner == part) for part in range(ranks)]
    # A part may be any rank's section: the most expensive part goes to the rank with the least cost so far.
    by_cost, by_load = sorted(range(ranks), key=lambda part: -parts[part]), sorted(range(ranks), key=costs.__getitem__)
    rank_of = dict(zip(by_cost, by_load))
    for part, rank in rank_of.items():
        costs[rank] += parts[part]
    return _placed(members, items, {index: rank_of[part] for index, part in owners.items()}, section, ranks)


def _dealt(members: Sequence[int], sizes: Mapping[int, int], ranks: int) -> tuple[dict[int, int], list[int]]:
    """Assign each to the rank with the fewest elements; returns the owner of each, and the elements of each rank."""
    loads, owners = [0] * ranks, dict[int, int]()
    for index in members:
        owners[index] = rank = loads.index(min(loads))
        loads[rank] += sizes[index]
    return owners, loads


def _placed(
    members: Sequence[int], items: Sequence[Item], owners: Mapping[int, int], section: int, ranks: int
) -> BucketLayout:
    """Place whole parameters in the sections of their owners."""
    ends = [rank * section for rank in range(ranks)]
    slots = []
    for index in members:
        slots.append(Slot(index, ends[owners[index]], items[index].numel))
        ends[owners[index]] += _aligned(items[index].numel)
    return BucketLayout(tuple(slots), section, ranks, whole=True)


def _aligned(numel: int, unit: int = ALIGNMENT) -> int:
    return -(-numel // unit) * unit


_CALLER = 6  # stack frames from a warning about buckets to the call of `shard`
_BUFFERS = ("contiguous", "bucket")


@dataclass(frozen=True)
class Options:
    """The arguments of `shard` for the communication of gradients and parameters."""

    overlap_grad_sync: bool  # reduce a bucket as soon as backward has completed it
    overlap_param_sync: bool  # all-gather buckets while the code after the step runs
    bucket_cap_mb: float | None  # MiB of gradients in a bucket; None for the default sizes
    grad_sync_dtype: torch.dtype | None
    param_sync_dtype: torch.dtype | None  # the dtype in which parameters are sent; None for the parameter's
    grad_buffer: str  # "contiguous" keeps memory for all gradients, "bucket" only while a bucket is filled and sent
    param_buffer: str  # "contiguous": one allocation, "bucket": one per bucket, "peers": shared by GPUs, or "auto"
    average: bool  # average gradients over the ranks; else sum

    def check(self) -> None:
        """Raise `ValueError` for an invalid option."""
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise ValueError(f"Invalid bucket_cap_mb: {self.bucket_cap_mb}; it must be positive")
        for name, kinds in (("grad_buffer", _BUFFERS), ("param_buffer", ("auto", *_BUFFERS, "peers"))):
            if getattr(self, name) not in kinds:
                listed = f"{', '.join(map(repr, kinds[:-1]))} or {kinds[-1]!r}"
                raise ValueError(f"Invalid {name}: {getattr(self, name)!r}; it must be {listed}")

    def sync_dtypes(self, group: Mapping[str, Any]) -> tuple[torch.dtype | None, torch.dtype | None]:
        """The dtypes in which a param group's gradients and parameters are sent: the group's, or else the options'."""
        return group.get("grad_sync_dtype") or self.grad_sync_dtype, group.get(
            "param_sync_dtype"
        ) or self.param_sync_dtype

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raise `ValueError` for invalid sync dtypes of a param group."""
        grad, param = self.sync_dtypes(group)
        for name, dtype in (("grad_sync_dtype", grad), ("param_sync_dtype", param)):
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise ValueError(f"Invalid {name}: {dtype!r}; it must be a torch.dtype or None")
        if grad is not None and not grad.is_floating_point:
            raise ValueError(f"Invalid grad_sync_dtype: {grad}; it must be a floating-point dtype")


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest in memory to the fastest; in index order for a tensor with gaps."""
    strides = tensor.stride()
    dims = range(tensor.dim())
    return tuple(sorted(dims, key=lambda dim: (-strides[dim], dim)) if is_dense(tensor) else dims)


def loses_bits(dtype: torch.dtype, sync_dtype: torch.dtype | None) -> bool:
    """Whether values lose bits when they are sent in `sync_dtype`; an integer dtype sends their bytes."""
    sent = sync_dtype or dtype
    return sent.is_floating_point and torch.promote_types(dtype, sent) != sent


def view_of(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view of flat memory with the shape and memory format of `like`."""
    strides = like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride()
    return flat.as_strided(like.shape, strides, flat.storage_offset())


class Bucket:
    """A bucket's memory on one rank."""

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[torch.Tensor],
        ranks: Ranks,
        sync_dtypes: tuple[torch.dtype | None, torch.dtype | None],
        memory: torch.Tensor,
        peers: PeerMemory | None = None,
        unshared: str = "",
    ) -> None:
        self.layout = layout
        self.peers = peers  # the peer memory that holds the bucket, if other ranks read it directly
        self.unshared = unshared  # why they do not
        self.params = list(params)
        self.ranks = ranks
        self.grad_dtype, self.sync_dtype = (dtype or memory.dtype for dtype in sync_dtypes)
        self.flat = memory
        self.own = slice(ranks.rank * layout.section, (ranks.rank + 1) * layout.section)
        self._section = memory[self.own]
        self._views = self.views_of(memory)
        with torch.no_grad():
            for view, param in zip(self._views, self.params):
                view.copy_(param)
                param.data = view
        self.exact: torch.Tensor | None = None  # this rank's section before the conversion that loses bits
        if loses_bits(memory.dtype, self.sync_dtype):
            self.exact = self._section.clone()
        self.updated = self._section if self.exact is None else self.exact
        """The memory of this rank's section that the optimizer updates."""

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """For each parameter a view of its slot in flat memory, in the parameter's shape and memory format."""
        slots = zip(self.layout.slots, self.params)
        return [view_of(flat[slot.offset : slot.offset + slot.numel], param) for slot, param in slots]

    def sent(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors of an all-gather: the whole bucket, and this rank's section."""
        if self.sync_dtype == self.flat.dtype:
            return self.flat, self.updated
        if not self.sync_dtype.is_floating_point:
            # The same bytes as integers.
            return self.flat.view(self.sync_dtype), self.updated.view(self.sync_dtype)
        whole = torch.empty_like(self.flat, dtype=self.sync_dtype)
        own = whole[self.own]
        own.copy_(self.updated)
        return whole, own

    def peer_sections(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each other rank its section: where this rank keeps it, and in the rank's memory, to fetch it from."""
        if self.peers is None:
            return []
        begin, size = int(self.flat.storage_offset()), self.layout.section
        sections = []
        for step in range(1, self.ranks.size):
            # Each rank begins with its successor, so that all ranks do not read the same rank at the same time.
            rank = (self.ranks.rank + step) % self.ranks.size
            first, stop = rank * size, (rank + 1) * size
            sections.append((self.flat[first:stop], self.peers.of(rank, begin + first, begin + stop)))
        return sections

    def follow_writes(self) -> None:
        """Copy values that other code has written to this rank's section into `exact`."""
        if self.exact is None:
            return
        section = self._section
        sent = self.exact.to(self.sync_dtype).to(section.dtype)
        # A NaN that was sent equals the NaN in the section.
        same = (sent == section) | ((sent != sent) & (section != section))
        self.exact.copy_(torch.where(same, self.exact, section))

    def cut(self, section: torch.Tensor, slot: Slot) -> torch.Tensor:
        """This rank's piece of a parameter, as a view of memory for this rank's section."""
        start, stop = self.layout.piece(slot, self.ranks.rank)
        first = slot.offset + start - self.own.start if start < stop else 0
        return section[first : first + stop - start]

    @property
    def trains(self) -> bool:
        """Whether a parameter of the bucket trains; the same on every rank."""
        return any(param.requires_grad for param in self.params)

    @torch.no_grad()
    def restore_views(self) -> list[torch.Tensor]:
        """Make parameters whose memory was replaced views of the bucket again, with their values; returns them."""
        moved = [(one, view) for one, view in zip(self.params, self._views) if address_of(one) != address_of(view)]
        for param, view in moved:
            if (param.shape, param.dtype, param.device) != (view.shape, view.dtype, view.device):
                raise RuntimeError(
                    f"a parameter has changed since shard() from {tuple(view.shape)}, {view.dtype} on {view.device} "
                    f"to {tuple(param.shape)}, {param.dtype} on {param.device}: move and convert a model before "
                    "sharding its optimizer"
                )
            view.copy_(param)
            param.data = view
        return [param for param, _ in moved]


def make_buckets(params: Sequence[torch.Tensor], items: Sequence[Item], ranks: Ranks, options: Options) -> list[Bucket]:
    """Move parameters into new buckets, in the order in which backward completes them."""
    cap = None if options.bucket_cap_mb is None else options.bucket_cap_mb * 2**20
    layouts = plan_buckets(items, ranks.size, cap)
    if advice := padding_advice(items, layouts, cap):
        warnings.warn(f"shard(): {advice}", stacklevel=_CALLER)
    device, kinds = params[0].device, [cast(Kind, items[layout.slots[0].index].kind) for layout in layouts]
    sizes, dtypes = [layout.numel for layout in layouts], [kind[0] for kind in kinds]
    shared: dict[torch.dtype, tuple[PeerMemory | None, str]] = {}
    for dtype in dict.fromkeys(dtypes):
        numel = sum(size for size, own in zip(sizes, dtypes) if own == dtype)
        fetches = any(kind[0] == dtype and kind[2] in (None, dtype) for kind in kinds)
        shared[dtype] = _shared(numel, dtype, device, fetches, ranks, options)
    if options.param_buffer == "bucket":
        memories = [torch.zeros(size, dtype=dtype, device=device) for size, dtype in zip(sizes, dtypes)]
    else:
        memories = allocate(sizes, dtypes, device, {dtype: peers for dtype, (peers, _) in shared.items()})
    return [
        Bucket(layout, [params[slot.index] for slot in layout.slots], ranks, kind[1:], memory, *shared[kind[0]])
        for layout, kind, memory in zip(layouts, kinds, memories)
    ]


def _shared(
    numel: int, dtype: torch.dtype, device: torch.device, fetches: bool, ranks: Ranks, options: Options
) -> tuple[PeerMemory | None, str]:
    """Memory that ranks read from each other directly, or the reason without such memory; the same on all ranks.

    Raises:
        ValueError: on all ranks, for "peers" if a rank cannot.
    """
    kind = options.param_buffer
    if ranks.size == 1:
        return None, "there is only one rank"
    if kind in _BUFFERS:
        return None, f"param_buffer={kind!r}"
    if kind == "auto" and not (has_streams(device) and numel):
        return None, f"the parameters are on {device.type}"
    if kind == "auto" and not fetches:
        return None, "its dtype is converted"
    made, reason = share_memory(numel, dtype, device, ranks, WAYS[:1] if kind == "auto" else WAYS)
    if reason and kind == "peers":
        raise ValueError(f"param_buffer='peers': {reason}; use 'auto'")
    return made, reason


def allocate(
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    shared: Mapping[torch.dtype, PeerMemory | None] | None = None,
) -> list[torch.Tensor]:
    """Zeroed flat memory of these sizes: one allocation per dtype, or the dtype's memory in `shared`."""
    parts: dict[torch.dtype, Any] = {}
    for dtype in dict.fromkeys(dtypes):
        own, peers = [size for size, kind in zip(sizes, dtypes) if kind == dtype], (shared or {}).get(dtype)
        whole = peers.memory if peers else torch.zeros(sum(own), dtype=dtype, device=device)
        parts[dtype] = iter(whole.split(own))
    return [next(parts[dtype]) for dtype in dtypes]
