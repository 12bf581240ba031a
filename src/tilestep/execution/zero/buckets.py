"""Flat buckets: where each parameter lies, which piece belongs to which rank, and the memory they are views of."""

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

ALIGNMENT = 16  # elements to which parameters and sections are aligned: 16 bytes in 8-bit types, more in others
LEAST_PADDING = 2**20  # bytes of padding that are worth another mesh
_LARGEST_SHARED_UNIT = 128  # units that divide it share buckets; any other unit has buckets of its own
LEAST_CAP, LARGEST_CAP = 25 * 2**20, 256 * 2**20
"""Bytes between which the first and last buckets are where no size is given: smaller ones cost the host more than the
network, and the last of larger ones is waited for too long."""

PARTS = 16  # such a part of all are the first and last buckets: little that backward does not hide
LARGEST_PARTS = 6  # no bucket between is a larger part: communication has to end soon after what it is beside


Kind = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]
"""The dtype of a parameter, and those that its gradients and the parameter travel in, None for that dtype."""


@dataclass(frozen=True)
class Item:
    """A parameter that needs a place."""

    numel: int  # its elements
    itemsize: int  # bytes of one of them
    kind: Hashable = None  # only parameters of the same kind share a bucket
    whole: bool = False  # whether one rank must have all of it, since its rule works on whole tensors
    cost: int = 0  # what the update of a whole one costs, in any unit
    trains: bool = True  # whether it has gradients; those that have none are in buckets of their own
    unit: int = ALIGNMENT  # neighbours that stay together: pieces begin at multiples of it, which is one of `ALIGNMENT`
    by_rows: bool = False  # whether pieces are whole rows of blocks, and of their shape; others are flat


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a bucket."""

    index: int  # the parameter, by its place among all items
    offset: int  # its first element in the bucket
    numel: int  # its elements


@dataclass(frozen=True)
class BucketLayout:
    """A bucket: parameters one after the other, cut into as many equal sections as there are ranks."""

    slots: tuple[Slot, ...]  # the parameters in it
    section: int  # elements of one rank's section
    ranks: int  # how many there are
    whole: bool = False  # whether no parameter is cut

    @property
    def numel(self) -> int:
        """Elements of the bucket."""
        return self.section * self.ranks

    def piece(self, slot: Slot, rank: int) -> tuple[int, int]:
        """The elements of a parameter, first and one past the last in storage order, that belong to a rank."""
        start = max(slot.offset, rank * self.section)
        stop = min(slot.offset + slot.numel, (rank + 1) * self.section)
        return (start - slot.offset, stop - slot.offset) if start < stop else (0, 0)


def default_cap(gradient_bytes: float, done: float = 0.0) -> float:
    """Bytes of a bucket where no size is given: small ones at both ends of backward, large ones between."""
    # The first should begin to travel early; nothing hides the last, with which the next forward begins. Those between
    # travel while the model computes, and each costs the host as much whatever its size: so a bucket has as many bytes
    # as all before it, or half of what is left, within limits.
    least = min(max(gradient_bytes / PARTS, LEAST_CAP), LARGEST_CAP)
    most = max(least, min(gradient_bytes / LARGEST_PARTS, 2 * LARGEST_CAP))
    return min(max(min(done, (gradient_bytes - done) / 2), least), most)


def default_sizes(gradient_bytes: float) -> list[float]:
    """Bytes of the buckets that `default_cap` makes of parameters that fit into them."""
    sizes: list[float] = []
    done = 0.0
    while gradient_bytes - done >= 1:
        sizes.append(min(default_cap(gradient_bytes, done), gradient_bytes - done))
        done += sizes[-1]
    return sizes


def plan_buckets(items: Sequence[Item], ranks: int, cap_bytes: float | None = None) -> list[BucketLayout]:
    """Put parameters into buckets, in the order in which backward completes them: the last first."""
    # A bucket is full when it holds at least `cap_bytes`; one of whole parameters when it does so for every rank, so
    # that there are enough of them to share out. Every rank computes the same.
    filling: dict[Hashable, list[int]] = {}
    sizes: dict[Hashable, int] = {}
    done: list[list[int]] = []
    # Those that are frozen now are counted by themselves: they have gradients once they are thawed.
    totals = {False: 0, True: 0}
    in_full = {False: 0, True: 0}
    for item in items:
        totals[item.trains] += item.numel * item.itemsize
    for index in reversed(range(len(items))):
        item = items[index]
        # Sections are multiples of the largest unit in a bucket, and so of the others.
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
    # One that was never full is complete when its last parameter is.
    done.extend(filling.values())
    done.sort(key=lambda members: -members[-1])
    costs = [0] * ranks
    return [_layout(members, items, ranks, costs) for members in done]


def padding_advice(items: Sequence[Item], layouts: Sequence[BucketLayout], cap_bytes: float | None = None) -> str:
    """What to change where buckets are mostly padding; empty where they are not, or where nothing would help."""
    used = sum(item.numel * item.itemsize for item in items)
    total = _bytes(items, layouts)
    if total <= 2 * used:
        return ""
    ranks = layouts[0].ranks
    padding = f"{1 - used / total:.0%} padding ({(total - used) / 2**10:.1f} KiB)"
    if cap_bytes is not None and _bytes(items, plan_buckets(items, ranks, math.inf)) < 0.75 * total:
        return f"buckets of bucket_cap_mb={cap_bytes / 2**20:.2g} are {padding}: a larger bucket_cap_mb makes fewer"
    if total - used < LEAST_PADDING:
        return ""
    return (
        f"buckets are {padding}: parameters that are not cut fill a few of the sections of {ranks} ranks; split the "
        'state over fewer, by mesh=, with two dimensions called "replicate" and "shard"'
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
    """The most expensive first, each to the rank that has least to do, in sections as short as they can be made."""
    sizes = {index: _aligned(items[index].numel) for index in members}
    by_size = sorted(members, key=lambda member: (-items[member].numel, member))
    section = max(*_dealt(by_size, sizes, ranks)[1], ALIGNMENT)
    loads = [0] * ranks
    owners: dict[int, int] = {}
    for index in sorted(members, key=lambda member: (-items[member].cost, -items[member].numel, member)):
        fitting = [rank for rank in range(ranks) if loads[rank] + sizes[index] <= section]
        if not fitting:
            # What is balanced by size alone always fits.
            owners, loads = _dealt(by_size, sizes, ranks)
            break
        spent = list(costs)
        for other, owner in owners.items():
            spent[owner] += items[other].cost
        owners[index] = rank = min(fitting, key=lambda candidate: (spent[candidate], candidate))
        loads[rank] += sizes[index]
    parts = [sum(items[index].cost for index, owner in owners.items() if owner == part) for part in range(ranks)]
    # A part may be any rank's section: the most expensive part goes to the rank that has least to do.
    by_cost, by_load = sorted(range(ranks), key=lambda part: -parts[part]), sorted(range(ranks), key=costs.__getitem__)
    rank_of = dict(zip(by_cost, by_load))
    for part, rank in rank_of.items():
        costs[rank] += parts[part]
    return _placed(members, items, {index: rank_of[part] for index, part in owners.items()}, section, ranks)


def _dealt(members: Sequence[int], sizes: Mapping[int, int], ranks: int) -> tuple[dict[int, int], list[int]]:
    """Give each in turn to the rank with the fewest elements; the owner of each, and the elements of each rank."""
    loads, owners = [0] * ranks, dict[int, int]()
    for index in members:
        owners[index] = rank = loads.index(min(loads))
        loads[rank] += sizes[index]
    return owners, loads


def _placed(
    members: Sequence[int], items: Sequence[Item], owners: Mapping[int, int], section: int, ranks: int
) -> BucketLayout:
    """One after the other in the sections of their owners."""
    ends = [rank * section for rank in range(ranks)]
    slots = []
    for index in members:
        slots.append(Slot(index, ends[owners[index]], items[index].numel))
        ends[owners[index]] += _aligned(items[index].numel)
    return BucketLayout(tuple(slots), section, ranks, whole=True)


def _aligned(numel: int, unit: int = ALIGNMENT) -> int:
    return -(-numel // unit) * unit


_CALLER = 6  # frames from a warning about buckets to the call of `shard`
_BUFFERS = ("contiguous", "bucket")


@dataclass(frozen=True)
class Options:
    """How gradients and parameters travel; the arguments of `shard`."""

    overlap_grad_sync: bool  # reduce a bucket as soon as backward has completed it
    overlap_param_sync: bool  # gather buckets while what follows the step already runs
    bucket_cap_mb: float | None  # MiB of gradients in a bucket; None for a part of all
    grad_sync_dtype: torch.dtype | None
    param_sync_dtype: torch.dtype | None  # the type that parameters travel in; None for their own
    grad_buffer: str  # "contiguous" keeps memory for all gradients, "bucket" only while a bucket is being filled
    param_buffer: str  # "contiguous" for one, "bucket" for one each, "peers" for what GPUs share, "auto" to choose
    average: bool  # whether gradients are averaged over the ranks, not summed

    def check(self) -> None:
        """Raise `ValueError` for an option that is none of those."""
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise ValueError(f"Invalid bucket_cap_mb: {self.bucket_cap_mb}; it must be positive")
        for name, kinds in (("grad_buffer", _BUFFERS), ("param_buffer", ("auto", *_BUFFERS, "peers"))):
            if getattr(self, name) not in kinds:
                listed = f"{', '.join(map(repr, kinds[:-1]))} or {kinds[-1]!r}"
                raise ValueError(f"Invalid {name}: {getattr(self, name)!r}; it must be {listed}")

    def sync_dtypes(self, group: Mapping[str, Any]) -> tuple[torch.dtype | None, torch.dtype | None]:
        """What gradients and parameters of a param group travel in: what the group says, or else these options."""
        return group.get("grad_sync_dtype") or self.grad_sync_dtype, group.get(
            "param_sync_dtype"
        ) or self.param_sync_dtype

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raise `ValueError` for what a param group cannot travel in."""
        grad, param = self.sync_dtypes(group)
        for name, dtype in (("grad_sync_dtype", grad), ("param_sync_dtype", param)):
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise ValueError(f"Invalid {name}: {dtype!r}; it must be a torch.dtype, or None for the parameter's")
        if grad is not None and not grad.is_floating_point:
            raise ValueError(f"Invalid grad_sync_dtype: {grad}; sums need a floating-point type")


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest in memory to the fastest; of a tensor with gaps, those of a contiguous one."""
    strides = tensor.stride()
    dims = range(tensor.dim())
    return tuple(sorted(dims, key=lambda dim: (-strides[dim], dim)) if is_dense(tensor) else dims)


def loses_bits(dtype: torch.dtype, sync_dtype: torch.dtype | None) -> bool:
    """Whether numbers lose bits when they travel in another type; in an integer type their bytes travel."""
    sent = sync_dtype or dtype
    return sent.is_floating_point and torch.promote_types(dtype, sent) != sent


def view_of(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape and memory format of another, over flat memory."""
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
        self.peers = peers  # what it lies in, if the other ranks read its memory by themselves
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
        self.exact: torch.Tensor | None = None  # this rank's section as updated, where what travels has lost bits
        if loses_bits(memory.dtype, self.sync_dtype):
            self.exact = self._section.clone()
        self.updated = self._section if self.exact is None else self.exact
        """This rank's section of the parameters, where the optimizer updates them."""

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """For each parameter its place in flat memory of the bucket, in the parameter's shape and memory format."""
        slots = zip(self.layout.slots, self.params)
        return [view_of(flat[slot.offset : slot.offset + slot.numel], param) for slot, param in slots]

    def sent(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What travels to the other ranks, all of the bucket and this rank's section."""
        if self.sync_dtype == self.flat.dtype:
            return self.flat, self.updated
        if not self.sync_dtype.is_floating_point:
            # The same bytes, seen as whole numbers.
            return self.flat.view(self.sync_dtype), self.updated.view(self.sync_dtype)
        whole = torch.empty_like(self.flat, dtype=self.sync_dtype)
        own = whole[self.own]
        own.copy_(self.updated)
        return whole, own

    def theirs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each other rank its section of this rank's memory, and the same in its own: what is fetched from it."""
        if self.peers is None:
            return []
        begin, size = int(self.flat.storage_offset()), self.layout.section
        sections = []
        for step in range(1, self.ranks.size):
            # Each rank begins with another one: none is read by all at a time.
            rank = (self.ranks.rank + step) % self.ranks.size
            first, stop = rank * size, (rank + 1) * size
            sections.append((self.flat[first:stop], self.peers.of(rank, begin + first, begin + stop)))
        return sections

    def follow_writes(self) -> None:
        """Take over what other code has written to this rank's section, where that is not what the optimizer keeps."""
        if self.exact is None:
            return
        section = self._section
        sent = self.exact.to(self.sync_dtype).to(section.dtype)
        # A NaN is what was sent of a NaN.
        same = (sent == section) | ((sent != sent) & (section != section))
        self.exact.copy_(torch.where(same, self.exact, section))

    def cut(self, section: torch.Tensor, slot: Slot) -> torch.Tensor:
        """This rank's piece of a parameter, out of memory for this rank's section."""
        start, stop = self.layout.piece(slot, self.ranks.rank)
        first = slot.offset + start - self.own.start if start < stop else 0
        return section[first : first + stop - start]

    @property
    def trains(self) -> bool:
        """Whether a parameter of it does; the same on every rank."""
        return any(param.requires_grad for param in self.params)

    @torch.no_grad()
    def take_back(self) -> list[torch.Tensor]:
        """Let parameters whose memory was replaced be views of the bucket again, with their values; which these are."""
        moved = [(one, view) for one, view in zip(self.params, self._views) if address_of(one) != address_of(view)]
        for param, view in moved:
            if (param.shape, param.dtype, param.device) != (view.shape, view.dtype, view.device):
                raise RuntimeError(
                    f"a parameter was {tuple(view.shape)}, {view.dtype} on {view.device} when shard() was called, "
                    f"and is {tuple(param.shape)}, {param.dtype} on {param.device} now: move and convert a model "
                    "before sharding its optimizer"
                )
            view.copy_(param)
            param.data = view
        return [param for param, _ in moved]


def make_buckets(params: Sequence[torch.Tensor], items: Sequence[Item], ranks: Ranks, options: Options) -> list[Bucket]:
    """Bring parameters into buckets, in the order in which backward completes them."""
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
    """Memory that the ranks that split the state read from each other, or why there is none; they all decide alike.

    Raises:
        ValueError: on all of them, where it is asked for and one of them cannot.
    """
    kind = options.param_buffer
    if ranks.size == 1:
        return None, "one rank has all of it"
    if kind in _BUFFERS:
        return None, f"param_buffer={kind!r}"
    if kind == "auto" and not (has_streams(device) and numel):
        return None, f"it is on {device.type}"
    if kind == "auto" and not fetches:
        return None, "it is converted on the way"
    made, reason = share_memory(numel, dtype, device, ranks, WAYS[:1] if kind == "auto" else WAYS)
    if reason and kind == "peers":
        raise ValueError(f"param_buffer='peers': {reason}; take 'auto', which sends messages where it must")
    return made, reason


def allocate(
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    shared: Mapping[torch.dtype, PeerMemory | None] | None = None,
) -> list[torch.Tensor]:
    """Zeroed flat memory of these sizes: one allocation for all of a dtype, which may be there."""
    parts: dict[torch.dtype, Any] = {}
    for dtype in dict.fromkeys(dtypes):
        own, peers = [size for size, kind in zip(sizes, dtypes) if kind == dtype], (shared or {}).get(dtype)
        whole = peers.memory if peers else torch.zeros(sum(own), dtype=dtype, device=device)
        parts[dtype] = iter(whole.split(own))
    return [next(parts[dtype]) for dtype in dtypes]
