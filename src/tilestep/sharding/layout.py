"""Where each parameter lies in flat buckets, and which piece of it belongs to which rank: numbers alone, no tensors."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

ALIGNMENT = 16
"""Elements to which parameters and ranks' sections are aligned: at least 16 bytes in every dtype, 8-bit ones too."""


LEAST_PADDING = 2**20
"""Bytes of padding that are worth another mesh."""

_LARGEST_SHARED_UNIT = 128
"""Units that divide it share buckets with each other; those of any other unit have buckets of their own."""

LEAST_CAP, LARGEST_CAP = 25 * 2**20, 256 * 2**20
"""Bytes between which the first and last buckets are where nobody says: smaller ones cost the host more than the
network, and the last of larger ones is waited for too long."""

PARTS = 16
"""Such a part of all are the first and last buckets: little that backward does not hide."""

LARGEST_PARTS = 6
"""No bucket between them is a larger part of all: what is communicated has ended soon after what it runs beside."""


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
        """The elements of a parameter, first and one past the last in storage order, that belong to a rank.

        Example:
            >>> layout = BucketLayout((Slot(0, 0, 40),), section=32, ranks=2)
            >>> layout.piece(layout.slots[0], 0), layout.piece(layout.slots[0], 1)
            ((0, 32), (32, 40))
        """
        start = max(slot.offset, rank * self.section)
        stop = min(slot.offset + slot.numel, (rank + 1) * self.section)
        return (start - slot.offset, stop - slot.offset) if start < stop else (0, 0)


def default_cap(gradient_bytes: float, done: float = 0.0) -> float:
    """Bytes of a bucket where nobody says how large it is: small ones at both ends of backward, large ones between.

    The first begins to travel early, the last has nothing beside it, and the next forward begins with it. Those between
    travel beside the model, and each costs the host as much whatever its size: so a bucket has as many bytes as all
    before it, or half of what is left, within limits.

    Example:
        >>> [default_cap(mebibytes * 2**20) / 2**20 for mebibytes in (100, 1600, 16000)]
        [25.0, 100.0, 256.0]
        >>> [round(default_cap(1600 * 2**20, done * 2**20) / 2**20) for done in (0, 100, 200, 400, 1200, 1400)]
        [100, 100, 200, 267, 200, 100]
    """
    least = min(max(gradient_bytes / PARTS, LEAST_CAP), LARGEST_CAP)
    most = max(least, min(gradient_bytes / LARGEST_PARTS, 2 * LARGEST_CAP))
    return min(max(min(done, (gradient_bytes - done) / 2), least), most)


def default_sizes(gradient_bytes: float) -> list[float]:
    """Bytes of the buckets that `default_cap` makes of parameters that fit into them.

    Example:
        >>> [round(size / 2**20) for size in default_sizes(1600 * 2**20)]
        [100, 100, 200, 267, 267, 267, 200, 100, 100]
    """
    sizes: list[float] = []
    done = 0.0
    while gradient_bytes - done >= 1:
        sizes.append(min(default_cap(gradient_bytes, done), gradient_bytes - done))
        done += sizes[-1]
    return sizes


def plan_buckets(items: Sequence[Item], ranks: int, cap_bytes: float | None = None) -> list[BucketLayout]:
    """Put parameters into buckets, in the order in which backward completes them: the last first.

    A bucket is full when it holds at least `cap_bytes`; one of whole parameters when it does so for every rank, so that
    there are enough of them to share out. Every rank computes the same.

    Example:
        >>> [layout.slots for layout in plan_buckets([Item(3, 4), Item(20, 4)], ranks=2, cap_bytes=64)]
        [(Slot(index=1, offset=0, numel=20),), (Slot(index=0, offset=0, numel=3),)]
    """
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
        if sizes[key] >= _full_at(item, ranks, cap_bytes, totals[item.trains], in_full[item.trains]):
            done.append(filling.pop(key))
            in_full[item.trains] += sizes.pop(key)
    # One that was never full is complete when its last parameter is.
    done.extend(filling.values())
    done.sort(key=lambda members: -members[-1])
    costs = [0] * ranks
    return [_layout(members, items, ranks, costs) for members in done]


def padding_advice(items: Sequence[Item], layouts: Sequence[BucketLayout], cap_bytes: float | None = None) -> str:
    """What to change where buckets are mostly padding; empty where they are not, or where nothing would help.

    Example:
        >>> tiny = [Item(20, 4)] * 64
        >>> padding_advice(tiny, plan_buckets(tiny, ranks=16, cap_bytes=64), 64)[:64]
        'buckets of bucket_cap_mb=6.1e-05 are 92% padding (59.0 KiB): a l'
    """
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


def _full_at(item: Item, ranks: int, cap_bytes: float | None, total: int, in_full: int) -> float:
    """Bytes of a bucket that takes no more."""
    if cap_bytes is not None:
        return cap_bytes * (ranks if item.whole else 1)
    cap = default_cap(total, in_full)
    return max(cap, LEAST_CAP * ranks) if item.whole else cap


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
    by_size = sorted(members, key=lambda each: (-items[each].numel, each))
    section = max(*_dealt(by_size, sizes, [0] * ranks)[1], ALIGNMENT)
    loads = [0] * ranks
    owners: dict[int, int] = {}
    for index in sorted(members, key=lambda each: (-items[each].cost, -items[each].numel, each)):
        fitting = [rank for rank in range(ranks) if loads[rank] + sizes[index] <= section]
        if not fitting:
            # What is balanced by size alone always fits.
            owners, loads = _dealt(by_size, sizes, [0] * ranks)
            break
        owners[index] = rank = min(fitting, key=lambda each: (costs[each] + _cost(owners, items, each), each))
        loads[rank] += sizes[index]
    for index, rank in owners.items():
        costs[rank] += items[index].cost
    return _placed(members, items, owners, section, ranks)


def _cost(owners: Mapping[int, int], items: Sequence[Item], rank: int) -> int:
    return sum(items[index].cost for index, owner in owners.items() if owner == rank)


def _dealt(members: Sequence[int], sizes: Mapping[int, int], loads: list[int]) -> tuple[dict[int, int], list[int]]:
    """Each in turn to the rank that has fewest elements; who has what, and how much."""
    owners: dict[int, int] = {}
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


@dataclass(frozen=True)
class Box:
    """A block of a tensor's elements."""

    offsets: tuple[int, ...]  # its first element in each dimension
    sizes: tuple[int, ...]  # its elements in each dimension
    start: int  # its first element, counted along the memory of a tensor without gaps

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.sizes)


def boxes(sizes: Sequence[int], start: int, stop: int) -> list[Box]:
    """Blocks, each without gaps in memory, that together are a range of a tensor's elements.

    Example:
        >>> [(box.offsets, box.sizes) for box in boxes((4, 3), 2, 10)]
        [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if start >= stop:
        return []
    if not sizes:
        return [Box((), (), 0)]
    row = math.prod(sizes[1:])
    found: list[Box] = []
    first, last = start // row, (stop - 1) // row
    if first == last:
        return _in_row(sizes, first, start, stop)
    if start % row:
        found += _in_row(sizes, first, start, (first + 1) * row)
        first += 1
    whole_rows = stop // row - first
    if whole_rows:
        found.append(Box((first, *[0] * (len(sizes) - 1)), (whole_rows, *sizes[1:]), first * row))
    if stop % row:
        found += _in_row(sizes, last, last * row, stop)
    return found


def _in_row(sizes: Sequence[int], place: int, start: int, stop: int) -> list[Box]:
    base = place * math.prod(sizes[1:])
    inner = boxes(sizes[1:], start - base, stop - base)
    return [Box((place, *box.offsets), (1, *box.sizes), base + box.start) for box in inner]
