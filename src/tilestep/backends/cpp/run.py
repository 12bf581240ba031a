"""Passes on the CPU: one ctypes call per pass, with torch's number of threads, or one thread after a fork."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ... import devices
from ...errors import BuildError
from ...kernels.spec import KernelSpec, Output
from ...runtime.gradients import Stale
from ...runtime.passes import Passes, Table, tables_of
from ...runtime.segment import Block, Entry, Segment, SliceTables, TileRange
from ..tuning import tile_shape
from . import source
from .compile import load_library, user_flags, warn_of_failure, wide_vectors
from .runs import MAX_COLUMNS
from .support import Launch, SliceLaunch, ViewTables

_MIN_ROWS, _MAX_ROWS = 64, 256
"""Rows of a block: the sum of a column is taken in the type computed in inside a block, in float64 over blocks."""

_ELEMENTS = 1 << 16


def block_of(matrices: int, rows: int, columns: int) -> Block:
    """The part of a tensor that one thread works on at a time: rows long enough for vectors, sums kept in the cache."""
    width = max(min(columns, MAX_COLUMNS), 1)
    height = max(min(rows, max(_MIN_ROWS, _ELEMENTS // width), _MAX_ROWS), 1)
    holds_matrices = height >= rows and width >= columns
    return (max(min(matrices, _ELEMENTS // (height * width)), 1) if holds_matrices else 1), height, width


class CpuSlices:
    """The tables of a segment's slices, and the launch record that points to them."""

    def __init__(self, spec: KernelSpec, entries: Sequence[Entry]) -> None:
        compute = np.dtype(np.float64 if spec.compute.itemsize == 8 else np.float32)
        self.tables = SliceTables(spec.program, entries, block_of)
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
        """The array of all slices of a slot, in memory that passes write."""
        return torch.from_numpy(self._slots[slot])


_libraries: dict[tuple[int, bool, tuple[str, ...]], ctypes.CDLL] = {}
_without_gaps: set[int] = set()
"""Specs, by identity, whose kernels for gaps could not be built: their next segment asks for them again, and fails."""


_FEW_COPIES = ("--param", "max-completely-peel-times=4")
"""The up to 15 elements behind a loop's vectors stay a loop: GCC would write out a body for each of them."""


def load(spec: KernelSpec, *, gaps: bool = False) -> ctypes.CDLL:
    """The kernels of a spec, built or from the cache; kernels for tensors with gaps take twice as long to build."""
    key = (id(spec), gaps, user_flags())
    if key not in _libraries:
        _libraries[key] = load_library(spec.name, source.source(spec, gaps=gaps), (*_FEW_COPIES, *_flags(spec)))
        weakref.finalize(spec, _libraries.pop, key, None)
    return _libraries[key]


def _flags(spec: KernelSpec) -> tuple[str, ...]:
    # A vector's lanes are parts of a sum: programs with sums keep as many as they have without wider vectors.
    return () if spec.reduction_count or spec.program.slices.views else wide_vectors()


def _point(launch: Launch, tables: Mapping[str, Table]) -> None:
    """Point a launch record to tables; the caller keeps them alive."""
    for name, table in tables.items():
        setattr(launch, name, table.data_ptr() if isinstance(table, torch.Tensor) else table.ctypes.data)


class CppPasses(Passes):
    """Tables in host memory and passes that are C functions; arguments as for `Segment`."""

    def __init__(self, spec: KernelSpec, entries: Sequence[Entry], *arguments: Any) -> None:
        size = tile_shape(spec, entries[0].param.device).span
        super().__init__(Segment(spec, entries, *arguments, tile_size=size))
        segment, program = self.segment, spec.program
        self._gaps = self._has_gaps or id(spec) in _without_gaps
        _without_gaps.discard(id(spec))
        library = load(spec, gaps=self._gaps)
        self.slices: CpuSlices | None = CpuSlices(spec, segment.entries) if program.slices.views else None
        tiles = max(segment.tiles.count, self.slices.tables.max_tiles if self.slices else 0)
        self._partials = segment.zeros(tiles, max(spec.reduction_count, 1))
        self.hyper = np.zeros((len(segment.group_rows.indices), len(spec.hypers)))
        states = segment.scalar_states.values()
        self._state_addresses = np.asarray([array.data_ptr() for array in states], dtype=np.int64)
        self._scalar = [getattr(library, f"scalar_pass_{index}") for index in range(len(program.scalars))]
        self._launch = Launch()
        self._argument = ctypes.byref(self._launch)
        self._tile = self._all_functions(library)
        self._calls: list[list[partial[Any]]] = [[] for _ in self._tile]
        self._measuring: list[list[tuple[Any, tuple[Any, ...]]]] = []
        self._of_ranges: dict[TileRange, tuple[Launch, dict[str, Table]]] = {}
        """Launch records of ranges, with the tables that they point at."""
        self._report_partials = segment.zeros(1, 1)
        self.upload()

    def leave(self, measured: tuple[Output, ...]) -> None:
        super().leave(measured)
        segment, outputs = self.segment, self.outputs
        assert outputs is not None
        if outputs.by_kernels:
            try:
                library = load(outputs.measuring, gaps=self._gaps)
            except BuildError as error:
                # The plain kernels may be from the cache, of a machine with a compiler.
                warn_of_failure(error)
                outputs.use_torch()
            else:
                self._measuring = self._all_functions(library)
                self._report_partials = segment.zeros(segment.tiles.count, len(outputs.names))
        self.upload()

    @property
    def _passes(self) -> list[list[tuple[Any, tuple[Any, ...]]]]:
        return self._measuring if self.measures else self._tile

    @property
    def _has_gaps(self) -> bool:
        return bool((self.arrays.layout_index >= 0).any())

    def _take_gaps(self) -> None:
        """Load kernels for tensors with gaps at the first gradient with gaps."""
        if self._gaps or not self._has_gaps:
            return
        try:
            self._tile = self._all_functions(load(self.segment.spec, gaps=True))
            if self._measuring and self.outputs is not None:
                self._measuring = self._all_functions(load(self.outputs.measuring, gaps=True))
        except BuildError as error:
            # The others may be from the cache, of a machine with a compiler: the next segment is eager.
            _without_gaps.add(id(self.segment.spec))
            raise Stale("kernels for gradients with gaps could not be built") from error
        self._gaps = True

    def _all_functions(self, library: ctypes.CDLL) -> list[list[tuple[Any, tuple[Any, ...]]]]:
        """The functions of each tile pass and of the passes before it, with their arguments."""
        program, by_slices = self.segment.spec.program, (self.slices.argument,) if self.slices else ()
        return [
            [
                (getattr(library, tile.title), (self._argument, *(by_slices if tile.view else ())))
                for tile in program.passes_of(index)
            ]
            for index in range(len(program.tiles))
        ]

    def upload(self) -> None:
        """Point the launch record to the current tables."""
        self._take_gaps()
        for calls, functions in zip(self._calls, self._tile):
            calls[:] = [partial(function, *arguments) for function, arguments in functions]
        launch, segment, tiles = self._launch, self.segment, self.segment.tiles
        launch.tensors, launch.tiles, launch.tile_size = len(segment.entries), tiles.count, tiles.size
        launch.hyper_count, launch.threads = self.hyper.shape[1], devices.thread_count()
        self._tables = {**self.tables(), "scalar_states": self._state_addresses, "partials": self._partials}
        if (outputs := self.outputs) is not None:
            self._tables.update(report_sums=outputs.totals, report_partials=self._report_partials)
            self._tables.update(words=outputs.words, first_word=outputs.first_word)
        _point(launch, self._tables)
        self._of_ranges.clear()

    def _launch_of(self, tile_range: TileRange) -> Launch:
        """The launch record of a range; reductions are right after the last range that has tiles of their tensor."""
        if tile_range not in self._of_ranges:
            tables, launch = tables_of(self, tile_range, self._tables), Launch.from_buffer_copy(self._launch)
            launch.tensors, launch.tiles = len(tile_range.tensors), len(tile_range.tiles)
            _point(launch, tables)
            self._of_ranges[tile_range] = launch, tables
        return self._of_ranges[tile_range][0]

    def set_threads(self, count: int) -> None:
        for launch in (self._launch, *(launch for launch, _ in self._of_ranges.values())):
            launch.threads = count

    def scalar_calls(self, index: int) -> list[partial[Any]]:
        return [partial(self._scalar[index], self._argument)]

    def tile_calls(self, index: int, tile_range: TileRange | None = None) -> list[partial[Any]]:
        if tile_range is not None:
            launch = self._launch_of(tile_range)
            return [partial(function, ctypes.byref(launch)) for function, _ in self._passes[index]]
        return [partial(self._tile_pass, index)] if self.outputs is not None else self._calls[index]

    def _tile_pass(self, index: int) -> None:
        """Run the kernels of this step, which measure or do not."""
        for function, arguments in self._passes[index]:
            function(*arguments)
