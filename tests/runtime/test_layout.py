"""Tiles and strides by brute force, and index arithmetic beyond 32 bits."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import operator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilestep
from tilestep.backends.cpp.compile import load_library
from tilestep.backends.cpp.support import PRELUDE
from tilestep.errors import GradientError
from tilestep.kernels.spec import MAX_DIMS, cut_tiles
from tilestep.runtime.segment import check_no_overlap, is_dense, layout_record, overlaps_itself, same_walk

LOCATE = (
    PRELUDE
    + """
extern "C" void locate_all(const int64_t* layout, const int64_t* indices, int64_t count, int64_t arrays, int64_t* out) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t array = 0; array < arrays; ++array)
      walk(layout, indices[i], 1, array, [&](int64_t, int64_t offset) { out[i * arrays + array] = offset; });
}
"""
)


@given(numels=st.lists(st.integers(0, 40), max_size=12), size=st.integers(1, 9))
@settings(deadline=None)
def test_tiles_cover_every_element_once(numels: list[int], size: int) -> None:
    tiles = cut_tiles(numels, size)
    covered = []
    for tile in range(tiles.count):
        tensor = int(tiles.tile_tensor[tile])
        begin = (tile - int(tiles.first_tile[tensor])) * size
        covered += [(tensor, index) for index in range(begin, min(begin + size, numels[tensor]))]
    assert covered == [(tensor, index) for tensor, numel in enumerate(numels) for index in range(numel)]
    assert tiles.numel.tolist() == numels


def test_tiles_of_tensors_beyond_32_bits() -> None:
    numels = [2**31 + 5, 0, 3, 2**33, 2**31 - 1]
    size = 16_384
    tiles = cut_tiles(numels, size)
    counts = [-(-numel // size) for numel in numels]
    assert tiles.first_tile.tolist() == [0, *itertools.accumulate(counts)][:-1]
    assert tiles.count == sum(counts)
    assert tiles.first_tile.dtype == tiles.numel.dtype == np.int64
    last = tiles.count - 1
    assert int(tiles.tile_tensor[last]) == 4
    assert (last - int(tiles.first_tile[4])) * size == (2**31 - 1) // size * size


@st.composite
def strided(draw: st.DrawFn, max_dims: int = 4) -> torch.Tensor:
    """An int64 tensor whose elements are their own offsets: permuted, sliced, or with dimensions of size 1 and 0."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4]), max_size=max_dims))
    steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in sizes]
    starts = [draw(st.sampled_from([0, 0, 1])) for _ in sizes]
    base_sizes = [size * step + start for size, step, start in zip(sizes, steps, starts)]
    base = torch.arange(int(np.prod(base_sizes, dtype=np.int64)) if base_sizes else 1).reshape(base_sizes)
    for dim, (size, step, start) in enumerate(zip(sizes, steps, starts)):
        base = base[(slice(None),) * dim + (slice(start, start + size * step, step),)]
    return base.permute(draw(st.permutations(range(len(sizes)))))


def offsets(tensor: torch.Tensor) -> list[int]:
    """Where elements lie behind the first, in the order of their indices."""
    return (tensor - tensor.flatten()[0]).flatten().tolist() if tensor.numel() else []


@given(tensor=strided())
@settings(max_examples=200, deadline=None)
def test_a_dense_tensor_fills_its_memory(tensor: torch.Tensor) -> None:
    assert is_dense(tensor) == (sorted(offsets(tensor)) == list(range(tensor.numel())))


@given(left=strided(3), data=st.data())
@settings(max_examples=200, deadline=None)
def test_tensors_are_walked_together_if_memory_order_is_the_same(left: torch.Tensor, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(left.dim())))
    inverse = sorted(range(left.dim()), key=order.__getitem__)
    # The same shape as `left`, dense, with the dimensions in any order in memory.
    shape = [left.size(dim) for dim in order]
    right = torch.arange(left.numel()).reshape(shape).permute(inverse)
    assert right.shape == left.shape
    together = is_dense(left) and offsets(left) == offsets(right)
    assert same_walk(left, right) == same_walk(right, left) == together


@given(first=strided(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_generated_code_finds_every_element(first: torch.Tensor, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(first.dim())))
    inverse = sorted(range(first.dim()), key=order.__getitem__)
    second = torch.arange(first.numel()).reshape([first.size(dim) for dim in order]).permute(inverse)
    third = torch.zeros((), dtype=torch.int64).expand(first.shape)
    tensors = [first, second, third]
    record = layout_record(tensors)
    places = located(record, np.arange(first.numel(), dtype=np.int64), 3)
    wanted = [offsets(tensor) for tensor in tensors]
    assert places.T.tolist() == wanted


def located(record: np.ndarray, indices: np.ndarray, arrays: int) -> np.ndarray:
    """Offsets in each array as the C++ code computes them."""
    out = np.zeros((len(indices), arrays), dtype=np.int64)
    function = load_library("locate", LOCATE).locate_all
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (record, indices, out)]
    function(pointers[0], pointers[1], ctypes.c_int64(len(indices)), ctypes.c_int64(arrays), pointers[2])
    return out


def test_generated_code_finds_elements_beyond_32_bits() -> None:
    shape = (70_000, 3, 90_000)
    transposed = torch.empty((90_000, 3, 70_000), device="meta").permute(2, 1, 0)
    record = layout_record([torch.empty(shape, device="meta"), transposed])
    generator = np.random.default_rng(0)
    indices = generator.integers(0, np.prod(shape, dtype=np.int64), 1000)
    coordinates = np.unravel_index(indices, shape)
    wanted = sum(part.astype(np.int64) * stride for part, stride in zip(coordinates, transposed.stride()))
    places = located(record, indices, 2)
    assert np.array_equal(places[:, 0], indices) and np.array_equal(places[:, 1], wanted)
    assert places.max() > 2**33


def reserved(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Address space for a tensor; only the pages that are touched take memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags=flags), dtype=dtype)


def test_a_kernel_steps_behind_the_first_2_31_elements() -> None:
    tail = 1_000
    numel = 2**31 + tail
    param, grad = reserved(numel, torch.bfloat16), reserved(numel, torch.bfloat16)
    param[-tail:], grad[-tail:] = 1.0, torch.arange(tail).to(torch.bfloat16)
    weight = torch.nn.Parameter(param)
    optimizer = tilestep.Optimizer([weight], "SGD", lr=0.5)
    weight.grad = grad
    [engine] = optimizer._current_plan().engines
    [passes] = engine.passes
    segment = passes.segment
    # Only the last tile, so that no other page is touched; its number stays as far from the first as it was.
    segment.tiles.first_tile[:] = 1 - segment.tiles.count
    segment.tiles.tile_tensor = segment.tiles.tile_tensor[-1:]
    passes.upload()
    optimizer.step()
    expected = (1.0 - 0.5 * torch.arange(tail).to(torch.bfloat16).float()).to(torch.bfloat16)
    assert torch.equal(weight.detach()[-tail:], expected)


def test_more_separate_dimensions_than_a_record_holds_are_refused() -> None:
    shape = (2,) * (MAX_DIMS + 1)
    plain = torch.empty(shape, device="meta")
    backwards = plain.permute(*reversed(range(MAX_DIMS + 1)))
    assert layout_record([plain, plain])[0] == 1
    with pytest.raises(GradientError, match=f"more than {MAX_DIMS} separate dimensions"):
        layout_record([plain, backwards])
    with pytest.raises(GradientError, match="overlaps itself"):
        check_no_overlap(torch.zeros(1).expand(3), "the weight")
    with pytest.raises(GradientError, match=r"the weight of shape \(3, 3\)"):
        check_no_overlap(torch.zeros(5).as_strided((3, 3), (1, 1)), "the weight")


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    strides=st.lists(st.integers(0, 12), min_size=4, max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_a_tensor_overlaps_itself_if_two_indices_have_one_address(sizes: list[int], strides: list[int]) -> None:
    tensor = torch.zeros(200).as_strided(sizes, strides[: len(sizes)])
    places = [sum(map(operator.mul, index, tensor.stride())) for index in itertools.product(*map(range, sizes))]
    assert overlaps_itself(tensor) is (len(set(places)) < len(places))


@given(tensor=strided())
@settings(max_examples=100, deadline=None)
def test_slices_and_permutations_overlap_nowhere(tensor: torch.Tensor) -> None:
    check_no_overlap(tensor, "the weight")
