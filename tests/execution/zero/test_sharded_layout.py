"""Where parameters lie in buckets, which piece is whose, and the blocks that pieces consist of."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilestep.execution.zero.buckets import (
    ALIGNMENT,
    LARGEST_CAP,
    LARGEST_PARTS,
    LEAST_CAP,
    PARTS,
    Item,
    default_sizes,
    memory_order,
    plan_buckets,
    view_of,
)
from tilestep.execution.zero.tensor_piece import blocks_of
from tilestep.linalg.orthogonal import work

ITEMS = st.lists(
    st.builds(
        Item,
        st.integers(0, 3000),
        st.sampled_from([1, 2, 4, 8]),
        st.sampled_from("ab"),
        whole=st.booleans(),
        unit=st.sampled_from([16, 16, 128, 48, 4112]),
    ),
    min_size=1,
    max_size=30,
)


@given(ITEMS, st.integers(1, 9), st.floats(1, 1e5))
def test_every_element_belongs_to_one_rank(items: list[Item], ranks: int, cap: float) -> None:
    layouts = plan_buckets(items, ranks, cap)
    assert sorted(slot.index for layout in layouts for slot in layout.slots) == list(range(len(items)))
    for layout in layouts:
        assert layout.section % ALIGNMENT == 0 and len({items[slot.index].kind for slot in layout.slots}) == 1
        ends = 0
        for slot in sorted(layout.slots, key=lambda slot: slot.offset):
            assert slot.numel == items[slot.index].numel and slot.offset % ALIGNMENT == 0
            assert slot.offset >= ends or not slot.numel
            ends = max(ends, slot.offset + slot.numel)
            pieces = [layout.piece(slot, rank) for rank in range(ranks)]
            if not items[slot.index].whole:
                assert all(start % items[slot.index].unit == 0 for start, stop in pieces if start < stop)
            covered = [element for start, stop in pieces for element in range(start, stop)]
            assert covered == list(range(slot.numel))
            if items[slot.index].whole and slot.numel:
                assert sum(start < stop for start, stop in pieces) == 1
        assert ends <= layout.numel


def test_buckets_are_filled_from_the_last_parameter_and_ordered_as_they_are_full() -> None:
    items = [Item(100, 4), Item(100, 4, "other"), Item(100, 4), Item(100, 4), Item(100, 4)]
    layouts = plan_buckets(items, ranks=2, cap_bytes=800)
    assert [[slot.index for slot in layout.slots] for layout in layouts] == [[4, 3], [1], [2, 0]]


def _bytes(items: list[Item], ranks: int, *, trains: bool = True) -> list[int]:
    """Of each bucket of those that train, or do not."""
    sizes = []
    for layout in plan_buckets(items, ranks):
        own = [items[slot.index] for slot in layout.slots]
        if own[0].trains is trains:
            sizes.append(sum(item.numel * item.itemsize for item in own))
    return sizes


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    ("total", "sizes"),
    [
        (20, [20]),
        (64, [25, 25, 14]),
        (400, [25, 25, 50, 67, 67, 67, 50, 25, 24]),
        (1600, [100, 100, 200, 267, 267, 267, 200, 100, 99]),
        (4096, [256, 256, 512, 512, 512, 512, 512, 512, 256, 256]),
        (20000, [256, 256, *[512] * 37, 272, 256, 16]),
    ],
)
def test_buckets_are_small_at_both_ends_where_nobody_says(itemsize: int, total: int, sizes: list[int]) -> None:
    mebi = 2**20
    items = [Item(mebi // itemsize, itemsize)] * total
    assert [size / mebi for size in _bytes(items, ranks=4)] == sizes


@settings(deadline=None)
@given(st.floats(1, 1e13))
def test_sizes_of_buckets_are_within_their_limits(total: float) -> None:
    sizes = default_sizes(total)
    assert sum(sizes) == pytest.approx(total) and all(size <= 2 * LARGEST_CAP for size in sizes)
    least = min(max(total / PARTS, LEAST_CAP), LARGEST_CAP)
    assert all(size >= 0.999 * least for size in sizes[:-1])
    assert len(sizes) == 1 or (sizes[0] == least and sizes[-1] <= 1.001 * least)
    # Large models have messages of half a gigabyte, which what is beside them hides; the rest is a dozen messages.
    assert len(sizes) <= 2 * LARGEST_PARTS + total / LARGEST_CAP / 2


def test_what_is_frozen_does_not_make_the_buckets_of_what_trains_larger() -> None:
    mebi = 2**20
    frozen, trained = [Item(mebi, 1, trains=False)] * 3200, [Item(mebi, 1)] * 100
    items = [item for pair in zip(frozen, trained * 32) for item in pair][:200] + frozen[100:]
    assert _bytes(items, ranks=2) == [25 * mebi] * 4
    assert _bytes(items, ranks=2, trains=False)[:2] == [200 * mebi] * 2


def test_whole_parameters_have_at_least_the_smallest_bucket_for_every_rank() -> None:
    mebi = 2**20
    items = [Item(mebi, 1, whole=True)] * 1600
    assert _bytes(items, ranks=2)[:2] == [100 * mebi] * 2
    assert _bytes(items, ranks=16) == [400 * mebi] * 4


def test_whole_parameters_are_balanced() -> None:
    items = [Item(size, 4, whole=True) for size in (1600, 800, 800, 400, 400, 400, 400)]
    (layout,) = plan_buckets(items, ranks=3, cap_bytes=1e9)
    assert layout.section == 1600


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(1, 5), st.integers(16, 4000), st.data())
def test_costs_are_balanced_in_sections_no_longer_than_by_size_alone(
    sizes: list[int], ranks: int, cap: int, data: st.DataObject
) -> None:
    costs = data.draw(st.lists(st.integers(1, 100), min_size=len(sizes), max_size=len(sizes)))
    items = [Item(16 * size, 1, None, True, cost) for size, cost in zip(sizes, costs)]
    alone = [Item(16 * size, 1, None, True, 16 * size) for size in sizes]
    layouts, by_size = plan_buckets(items, ranks, cap), plan_buckets(alone, ranks, cap)
    assert [layout.section for layout in layouts] == [layout.section for layout in by_size]
    for layout in layouts:
        taken = sorted((slot.offset, slot.offset + slot.numel) for slot in layout.slots if slot.numel)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
        assert all(start // layout.section == (end - 1) // layout.section for start, end in taken)


def test_expensive_matrices_go_to_different_ranks_in_every_bucket() -> None:
    """Two of three of the same size cost nearly nothing, in buckets of three: who had the expensive one is spared."""
    items = [Item(1600, 4, None, True, 100 if index % 3 == 0 else 1) for index in range(9)]
    layouts = plan_buckets(items, ranks=3, cap_bytes=1600 * 4)
    assert len(layouts) == 3
    loads = [0, 0, 0]
    for layout in layouts:
        for slot in layout.slots:
            loads[slot.offset // layout.section] += items[slot.index].cost
    assert loads == [102, 102, 102]


@pytest.mark.parametrize(
    ("ranks", "layers", "width", "small", "inner"),
    [(2, 32, 4096, 4096, 11008), (3, 24, 2048, 512, 5504)],
)
def test_owners_of_a_language_model_s_matrices_have_equal_work(
    ranks: int, layers: int, width: int, small: int, inner: int
) -> None:
    """The rank with the most products had 6% more than the mean, by the order in which buckets were dealt."""
    layer = [(width, width)] * 2 + [(small, width)] * 2 + [(inner, width)] * 2 + [(width, inner)]
    numbers = [1e-7, *[3.4445, -4.775, 2.0315] * 5]
    items = [Item(rows * columns, 2, None, True, int(work(rows, columns, numbers))) for rows, columns in layer * layers]
    loads = [0] * ranks
    for layout in plan_buckets(items, ranks):
        for slot in layout.slots:
            loads[slot.offset // layout.section] += items[slot.index].cost
    assert max(loads) < 1.012 * sum(loads) / ranks


def test_offsets_beyond_32_bits() -> None:
    """A tensor of more elements than 32 bits count, and what comes after it."""
    items = [Item(5, 2), Item(2**33 + 7, 2), Item(3, 2)]
    (layout,) = plan_buckets(items, ranks=3, cap_bytes=1e12)
    assert [slot.numel for slot in layout.slots] == [3, 2**33 + 7, 5]
    for slot in layout.slots:
        pieces = [layout.piece(slot, rank) for rank in range(3)]
        assert sum(stop - start for start, stop in pieces) == slot.numel
        assert max(stop for _, stop in pieces) == slot.numel
    start, stop = layout.piece(layout.slots[1], 2)
    assert stop == 2**33 + 7 and start > 2**32
    parts = blocks_of((2**17, 2**16 + 1), 2**32 + 5, 2**33 + 7)
    assert sum(math.prod(shape) for _, shape, _ in parts) == 2**33 + 7 - 2**32 - 5 and parts[0][2] == 2**32 + 5


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_blocks_are_the_range(sizes: list[int], data: st.DataObject) -> None:
    numel = math.prod(sizes)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    whole = torch.arange(numel).view(sizes)
    elements: list[int] = []
    for offsets, shape, first in blocks_of(sizes, start, stop):
        part = whole[tuple(slice(at, at + size) for at, size in zip(offsets, shape))]
        assert part.flatten().tolist() == list(range(first, first + math.prod(shape)))
        elements += part.flatten().tolist()
    assert elements == list(range(start, stop))
    assert len(blocks_of(sizes, start, stop)) <= max(1, 2 * len(sizes) - 1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3, 4),
        torch.rand(3, 4).t(),
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.rand(2, 1, 4, 1).to(memory_format=torch.channels_last),
        torch.rand(2, 3, 4).permute(1, 2, 0),
        torch.rand(()),
        torch.rand(0, 3),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}{tensor.stride()}",
)
def test_views_keep_the_memory_format(tensor: torch.Tensor) -> None:
    flat = torch.zeros(tensor.numel() + 7)[7:]
    view = view_of(flat, tensor)
    assert view.shape == tensor.shape and view.stride() == tensor.stride()
    view.copy_(tensor)
    assert torch.equal(flat, tensor.permute(memory_order(tensor)).reshape(-1))


def test_a_view_of_a_tensor_with_gaps_has_none() -> None:
    gapped = torch.rand(4, 9)[:, ::2]
    view = view_of(torch.zeros(20), gapped)
    assert view.is_contiguous() and memory_order(gapped) == (0, 1)
