"""A segment on a backend: tables where kernels read them, and the calls of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..kernels.launch import Launch
from ..kernels.spec import KernelSpec, Output
from .batches import MatrixBatches
from .outputs import OutputTables
from .segment import ArrayTable, Segment, TileRange

Table = np.ndarray | torch.Tensor

_OF_TENSORS = {
    *("numel", "columns", "grads", "layout_index", "step", "rows", "sums"),
    *("report_sums", "first_word", "streams"),
}
"""Tables with a row per tensor; a range of tiles uses a slice of them."""


class Passes:
    """The passes of a segment on a backend; backends take the arguments of a segment except the tile size."""

    has_kernels = True  # whether kernels run the passes: they can work on ranges of tiles, leave sums and measure
    hyper: Any  # the hyperparameter table, a row per group
    slices: Any = None  # the backend's `CpuSlices` or `CudaSlices`, if the program has passes over slices
    can_be_captured = False  # whether a CUDA graph can contain them; see `require_no_branches` for matrices

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        batches = self.has_kernels and bool(segment.spec.program.matrices.scratch)
        self.matrices = MatrixBatches(segment) if batches else None  # allocates the entries' scratch arrays
        # The host may decide which matrix work a step needs, from the set of tensors with gradients.
        decides = self.matrices is not None and self.matrices.conditions is not None
        self._reads_gradients = decides or not self.has_kernels
        self.outputs: OutputTables | None = None  # outputs of steps in addition to updates
        self.arrays = ArrayTable(segment.spec, segment.entries)

    def tables(self) -> dict[str, Table]:
        """Return the tables that kernels read and write, by the kernels' names for them; arrays are on the host."""
        segment = self.segment
        return {
            "tile_tensor": segment.tiles.tile_tensor,
            "first_tile": segment.tiles.first_tile,
            "numel": segment.tiles.numel,
            "columns": segment.columns,
            "sizes": segment.sizes,
            "grads": segment.grads,
            "group": segment.group_rows.of,
            "streams": segment.group_rows.streams,
            "addresses": self.arrays.addresses,
            "layout_index": self.arrays.layout_index,
            "layouts": self.arrays.layouts,
            "hyper": self.hyper,
            "control": segment.control.numbers,
            **{name: getattr(segment, name) for name in ("step", "sums", "global_parts", "totals", "rows")},
        }

    @property
    def reads_gradients(self) -> bool:
        """Whether gradients are read as tensors and not by address."""
        return self._reads_gradients or (self.outputs is not None and self.outputs.reads_gradients)

    def upload(self) -> None:
        """Copy changed tables to where kernels read them."""

    def set_hypers(self, rows: Sequence[Sequence[float]]) -> None:
        """Copy the hyperparameter table to where kernels read it."""
        self.hyper[:] = rows

    def set_device_hyper(self, row: int, column: int, tensor: torch.Tensor) -> None:
        """Copy a hyperparameter on a device into the table; a table on the host waits for the device, as in torch."""
        self.hyper[row][column] = float(tensor)

    def set_gradients(self, grads: torch.Tensor) -> None:
        """Read the gradients' addresses from another table, int64[tensors] on the device."""
        raise NotImplementedError

    def launches(self, unscales: bool) -> list[Launch]:
        """Return the launches of a step that Triton compiles."""
        return []

    def build(self) -> None:
        """Build every kernel that a step like the last launches."""

    @property
    def is_built(self) -> bool:
        """Whether every kernel for the last kind of decision is built."""
        return True

    def set_threads(self, count: int) -> None:
        """Set the number of threads of passes on the host."""

    def scalar_calls(self, index: int) -> list[partial[Any]]:
        """Return the calls of scalar pass `index`, the same at every step."""
        raise NotImplementedError

    def tile_calls(self, index: int, tile_range: TileRange | None = None) -> list[partial[Any]]:
        """Return the calls of tile pass `index` over all tiles; the list stays the same object, its items may change.

        With a range: the calls of an elementwise pass over the range, for this step. Ranges run in the order of tiles;
        the calls of the last range finish reductions.
        """
        return []

    def leave(self, measured: tuple[Output, ...]) -> None:
        """Allocate the outputs of the spec, and these outputs of steps that measure."""
        self.outputs = OutputTables(self.segment, measured, has_kernels=self.has_kernels)

    @property
    def measures(self) -> bool:
        """Whether this step's kernels compute reports."""
        return self.outputs is not None and self.outputs.measures and self.outputs.by_kernels

    @property
    def kernels(self) -> KernelSpec:
        """The spec of this step's kernels."""
        return self.outputs.measuring if self.outputs is not None and self.measures else self.segment.spec

    def sum_up_reports(self) -> None:
        """After passes that measured: reduce the reports per tile to reports per tensor."""

    def finish_outputs(self) -> None:
        """After the passes of a step: complete its outputs."""
        if self.outputs is not None:
            if self.measures:
                self.sum_up_reports()
            self.outputs.end()


def tables_of(passes: Passes, tile_range: TileRange, tables: Mapping[str, Table]) -> dict[str, Table]:
    """Return the tables of a range of tiles, with tiles and tensors counted from the range's first."""
    tiles = slice(tile_range.tiles.start, tile_range.tiles.stop)
    tensors = slice(tile_range.tensors.start, tile_range.tensors.stop)
    own = {name: table[tensors] if name in _OF_TENSORS else table for name, table in tables.items()}
    # Without sums, these tables have no row per tile.
    of_tiles = [name for name in ("partials", "report_partials") if len(tables.get(name, ())) >= tiles.stop]
    own.update({name: tables[name][tiles] for name in of_tiles})
    own["tile_tensor"] = passes.segment.tiles.tile_tensor[tiles] - np.int32(tensors.start)
    own["first_tile"] = passes.segment.tiles.first_tile[tensors] - tiles.start
    return {**own, "addresses": passes.arrays.of_range(tile_range)}
