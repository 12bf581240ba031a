"""The second argument of C++ functions that work on rows and columns: tables, and the arrays passes hand on."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from ..codegen.cpp_slices_support import SliceLaunch, ViewTables
from ..codegen.spec import KernelSpec
from .slices import Block, SliceTables

_MOST_COLUMNS = 2048
_FEWEST_ROWS, _MOST_ROWS = 64, 256
"""Rows of a block: the sum of a column is taken in the type computed in inside a block, in float64 over blocks."""

_ELEMENTS = 1 << 16


def block_of(matrices: int, rows: int, columns: int) -> Block:
    """The part of a tensor that one thread works on at a time: rows long enough for vectors, sums kept in the cache.

    Example:
        >>> block_of(1, 4096, 4096), block_of(4096, 3, 3), block_of(1, 4099, 1)
        ((1, 64, 2048), (4096, 3, 3), (1, 256, 1))
    """
    width = max(min(columns, _MOST_COLUMNS), 1)
    height = max(min(rows, max(_FEWEST_ROWS, _ELEMENTS // width), _MOST_ROWS), 1)
    whole = height >= rows and width >= columns
    return (max(min(matrices, _ELEMENTS // (height * width)), 1) if whole else 1), height, width


class CpuSlices:
    """The tables of a segment's slices, kept alive beside the record that points at them."""

    def __init__(self, spec: KernelSpec, shapes: Sequence[Sequence[int]]) -> None:
        slices, compute = spec.program.slices, np.dtype(np.float64 if spec.compute.itemsize == 8 else np.float32)
        self.tables = SliceTables(slices, shapes, block_of)
        self._views = (ViewTables * len(self.tables.views))()
        for record, tiles in zip(self._views, self.tables.views):
            record.tiles = len(tiles.tile_tensor)
            for name in ("tile_tensor", "first_tile", "tile_count", "extents", "blocks", "parts"):
                array = np.ascontiguousarray(getattr(tiles, name))
                setattr(tiles, name, array)
                setattr(record, name, array.ctypes.data)
        self._slots = [np.zeros(count, dtype=compute) for count in self.tables.slot_counts]
        self._parts = [np.zeros(count, dtype=compute) for count in self.tables.part_counts(spec.program)]
        self._addresses = [
            np.asarray([array.ctypes.data for array in arrays], dtype=np.int64) for arrays in (self._slots, self._parts)
        ]
        self._launch = SliceLaunch(
            ctypes.addressof(self._views),
            self.tables.starts.ctypes.data,
            self.tables.spans.ctypes.data,
            *(addresses.ctypes.data for addresses in self._addresses),
        )
        self.argument = ctypes.byref(self._launch)

    def slot(self, slot: int) -> torch.Tensor:
        """The array of all slices of a slot, in the memory that passes write."""
        return torch.from_numpy(self._slots[slot])
