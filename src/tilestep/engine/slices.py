"""Tables for passes over rows, columns and other slices: which tile covers what, and where a tensor's slices lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..graph import Over, Program, Slices

Block = tuple[int, int, int]
"""Matrices, rows and columns in a tile."""


@dataclass
class ViewTiles:
    """The tiles of all tensors in one view, tensors with tiles of the same block side by side."""

    extents: np.ndarray  # int64[tensors, 3], matrices, rows and columns of each tensor
    blocks: np.ndarray  # int64[tensors, 3], how many of each are in a tile
    first_tile: np.ndarray  # int64[tensors], each tensor's first tile
    tile_count: np.ndarray  # int64[tensors], how many it has
    tile_tensor: np.ndarray  # int32[tiles], the tensor of each tile
    parts: np.ndarray  # int64[tensors, 2], where its parts of row and of column reductions begin
    part_counts: tuple[int, int]  # parts of row and of column reductions of all tensors
    ranges: list[tuple[Block, int, int]]  # each block, its first tile and how many tiles have it


def cut_view(extents: Sequence[Block], choose: Callable[[int, int, int], Block]) -> ViewTiles:
    """Cut tensors seen as matrices into tiles; an empty tensor has none.

    Example:
        >>> tiles = cut_view([(1, 3, 5), (1, 2, 2)], lambda matrices, rows, columns: (1, 2, 4))
        >>> tiles.tile_tensor.tolist(), tiles.parts.tolist(), tiles.part_counts
        ([0, 0, 0, 0, 1], [[0, 0], [6, 10]], (8, 12))
    """
    sizes = np.asarray(extents, dtype=np.int64).reshape(-1, 3)
    blocks = np.asarray([choose(*each) for each in sizes.tolist()], dtype=np.int64).reshape(-1, 3)
    grid = -(-sizes // blocks)
    counts = grid.prod(axis=1)
    order = np.lexsort(blocks.T[::-1])
    ends = np.cumsum(counts[order])
    first = np.zeros(len(sizes), dtype=np.int64)
    first[order] = ends - counts[order]
    ranges: list[tuple[Block, int, int]] = []
    # Not np.unique, which imports masked arrays first: a tenth of the first step of a process.
    for block in sorted(set(map(tuple, blocks[counts > 0].tolist()))):
        members = (blocks == block).all(axis=1)
        ranges.append((block, int(first[members].min()), int(counts[members].sum())))
    matrices, rows, columns = sizes.T
    parts = np.stack([matrices * rows * grid[:, 2], matrices * grid[:, 1] * columns], axis=1)
    return ViewTiles(
        extents=sizes,
        blocks=blocks,
        first_tile=first,
        tile_count=counts,
        tile_tensor=np.repeat(order, counts[order]).astype(np.int32),
        parts=_starts(parts)[:-1],
        part_counts=tuple(parts.sum(axis=0).tolist()),
        ranges=ranges,
    )


def _starts(counts: np.ndarray) -> np.ndarray:
    """Where each of things of these sizes begins when they lie one after the other, and where the last ends."""
    return np.concatenate([np.zeros((1, *counts.shape[1:]), dtype=np.int64), np.cumsum(counts, axis=0)])


class SliceTables:
    """What passes over slices need to know of their tensors."""

    def __init__(
        self, slices: Slices, shapes: Sequence[Sequence[int]], choose: Callable[[int, int, int], Block]
    ) -> None:
        self.views = [cut_view([view.extents(shape) for shape in shapes], choose) for view in slices.views]
        counts = [[_slice_count(shape, over) for shape in shapes] for over in slices.kinds]
        self.starts = np.asarray([_starts(np.asarray(each, dtype=np.int64)) for each in counts], dtype=np.int64)
        """int64[kinds, tensors + 1], where each tensor's slices begin in an array of all slices of a kind."""
        self.spans = np.asarray([[_span(shape, *pair) for shape in shapes] for pair in slices.spans], dtype=np.int64)
        """int64[pairs, tensors, 2], elements from one coarse slice to the next, and their distance inside one."""
        self.slot_counts = [int(self.starts[slices.kinds.index(over), -1]) for over in slices.overs]
        """Elements of each slot's array."""
        self.most_tiles = max((len(view.tile_tensor) for view in self.views), default=0)
        self._slices = slices

    def starts_of(self, slot: int) -> list[int]:
        """Where each tensor's slices begin in a slot's array, and where the last one's end."""
        return self.starts[self._slices.kinds.index(self._slices.overs[slot])].tolist()

    def part_counts(self, program: Program) -> list[int]:
        """For each slot, the parts that tiles leave of it; 0 for one that is not the result of a reduction."""
        counts = [0] * len(self._slices.overs)
        for tile in program.tile_passes():
            for slot, reduction in tile.parts:
                assert tile.view is not None and reduction.over is not None
                tiles = self.views[self._slices.views.index(tile.view)]
                counts[slot] = tiles.part_counts[int(tile.view.place(reduction.over) == "column")]
        return counts


def _slice_count(shape: Sequence[int], over: Over) -> int:
    return math.prod(shape[: over[0]]) * math.prod(shape[over[1] :])


def _span(shape: Sequence[int], fine: Over | None, coarse: Over) -> tuple[int, int]:
    inner = math.prod(shape[coarse[1] :])
    inside = [size for dim, size in enumerate(shape[: coarse[1]]) if dim >= coarse[0]]
    if fine is not None:
        inside = [size for dim, size in enumerate(inside, coarse[0]) if not fine[0] <= dim < fine[1]]
    return math.prod(inside) * inner, inner
