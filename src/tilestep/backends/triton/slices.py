"""Launches of passes over rows and columns on a GPU: tables, and the arrays that passes hand on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType

import numpy as np
import torch

from ...devices import upload
from ...graph import TilePass
from ...kernels.launch import EXACT, TableLaunch, launch_of
from ...kernels.spec import KernelSpec, tile_traffic
from ...runtime.passes import Table
from ...runtime.segment import Block, Entry, SliceTables, ViewTiles

_PROGRAMS = 4096  # least number of programs of a large segment: 32 for each processor of the largest GPUs

_MIN_ELEMENTS, _MAX_ELEMENTS = 4096, 32768
"""Bounds on the elements of a tile that a program walks sub-block by sub-block. The fewer tiles, the fewer table loads
and parts of columns; the bits of a reduction depend on the tiles, so a segment's own sizes alone decide."""

_WHOLE_ELEMENTS = 1024  # elements of a tile held at once: small matrices, or a few rows

_HELD_BYTES, _MIN_HELD, _MAX_HELD = 4096, 512, 2048
"""Bytes that the sub-blocks of all arrays read by a pass hold together, where tiles have more rows, and bounds on their
elements."""

_STAGES = 3  # sub-blocks of a tile in flight; all but the first wait in shared memory

_FEW_BYTES = 2
"""A pass that reads no more than this of an element computes about as long as it reads: the three instructions an
element that copies through shared memory take would show."""

_REGISTERS = 64
"""Registers of a thread where float32 is computed in: as many as leave half of a processor's threads in flight. Left to
itself the assembler takes twice that for the loop over unaligned rows, and the aligned ones pay for it. Tiles held
whole have all that they read under way at once; they may have twice as many."""

_ELEMENTS_PER_WARP, _MAX_WARPS = 128, 4
_WIDEST, _WIDE = 128, 1024
"""Columns of a tile at most, and where a last tile of half of them is no great part of a row any more."""

_LONGEST = 1024  # columns of the tiles of one long row

_SPANNED = 2**31  # greatest distance between two elements of a tile: kernels compute it in 32 bits

_SIDES = (1, 4, 16, 64)
_FINISH_BLOCK = 1024
_COMBINED_SLICES, _COMBINED_PARTS = 128, 8


def elements_of(total: int) -> int:
    """Elements of a tile."""
    return min(max(_power_below(total // _PROGRAMS), _MIN_ELEMENTS), _MAX_ELEMENTS)


def _power_below(number: int) -> int:
    """The largest power of two up to a number; 1 for numbers below 1."""
    return 1 << (max(number, 1).bit_length() - 1)


def block_of(elements: int, in_blocks: bool = False) -> Callable[[int, int, int], Block]:
    """A function from a tensor's matrices, rows and columns to the block of its tiles: few, as each is compiled."""

    def side(size: int, limit: int) -> int:
        return min(next((side_length for side_length in _SIDES if size <= side_length), limit), limit)

    def choose(matrices: int, rows: int, columns: int) -> Block:
        if matrices * rows == 1 and columns > _LONGEST:
            return 1, 1, _LONGEST
        is_wide = in_blocks or columns % _WIDEST != _WIDEST // 2 or columns > _WIDE
        width = side(columns, _WIDEST if is_wide else _WIDEST // 2)
        held = _WHOLE_ELEMENTS // width
        if rows > held:
            return 1, _power_below(min(elements // width, _SPANNED // max(columns, 1))), width
        height = min(side(rows, held), _power_below(_SPANNED // max(columns, 1)))
        return side(matrices, held // height if matrices * rows * columns < _SPANNED else 1), height, width

    # Many tensors share few shapes.
    return functools.cache(choose)


def held_rows(block: Block, bytes_read: float) -> int:
    """Rows of a tile held at once: enough bytes in flight, few enough registers."""
    matrices, rows, columns = block
    elements = min(max(_power_below(int(_HELD_BYTES // max(bytes_read, 1))), _MIN_HELD), _MAX_HELD)
    return rows if matrices > 1 else min(rows, max(elements // columns, 1))


def build_options(
    spec: KernelSpec, tile: TilePass, block: Block, unscale: bool
) -> tuple[dict[str, int], dict[str, int | bool]]:
    """The constants and compiler options of a pass for tiles of a block."""
    bytes_read = tile_traffic(spec, [tile]).bytes_read
    held = held_rows(block, bytes_read)
    walks = held < block[1]
    constants = {
        **dict(zip(("MATRICES", "ROWS", "COLUMNS"), block)),
        "HELD": held,
        "STAGES": _STAGES if walks and bytes_read > _FEW_BYTES else 1,
        "UNSCALE": unscale,
    }
    warps = min(max(block[0] * held * block[2] // _ELEMENTS_PER_WARP, 1), _MAX_WARPS)
    registers = {"maxnreg": _REGISTERS if walks else 2 * _REGISTERS} if spec.compute is torch.float32 else {}
    return constants, {"num_warps": warps, **registers, **EXACT}


def device_table(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of a table on a device, with at least one entry."""
    tensor = upload(array, device)
    return tensor if tensor.numel() else tensor.new_zeros(1)


def device_tables(tables: Mapping[str, Table], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies on a device of the tables that are not there."""
    return {name: t if isinstance(t, torch.Tensor) else device_table(t, device) for name, t in tables.items()}


class CudaSlices:
    """Tables of a segment's slices on its device, and the arrays that passes hand on."""

    def __init__(self, spec: KernelSpec, entries: Sequence[Entry], device: torch.device) -> None:
        self.spec, self.device = spec, device
        slices = spec.program.slices
        total = sum(entry.param.numel() for entry in entries)
        self.tables = tables = SliceTables(spec.program, entries, block_of(elements_of(total), spec.has_blocks))
        self.max_tiles = tables.max_tiles
        self._arrays = {
            "starts": device_table(tables.starts[:, :-1].T, self.device),
            "spans": device_table(tables.spans.reshape(len(slices.spans), len(entries), 2).swapaxes(0, 1), self.device),
        }
        for slot, (count, parts) in enumerate(zip(tables.slot_counts, tables.part_counts(spec.program))):
            self._arrays[f"slot_{slot}"] = torch.zeros(max(count, 1), dtype=spec.compute, device=device)
            self._arrays[f"parts_{slot}"] = torch.zeros(max(parts, 1), dtype=spec.compute, device=device)
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        self._combines: dict[tuple[int, int, int], dict[str, torch.Tensor]] = {}

    def slot(self, slot: int) -> torch.Tensor:
        """The array of all slices of a slot."""
        return self._arrays[f"slot_{slot}"]

    def _tiles(self, tile: TilePass) -> tuple[ViewTiles, dict[str, torch.Tensor]]:
        assert tile.view is not None
        index = self.spec.program.slices.views.index(tile.view)
        tiles = self.tables.views[index]
        if index not in self._views:
            arrays = {name: getattr(tiles, name) for name in ("tile_tensor", "first_tile", "tile_count", "extents")}
            arrays["part_starts"] = tiles.parts
            arrays.update({f"base_{first}": np.array([first]) for _, first, _ in tiles.ranges})
            self._views[index] = device_tables(arrays, self.device)
        return tiles, self._views[index]

    def launches(
        self, module: ModuleType, tile: TilePass, tables: Mapping[str, torch.Tensor], unscale: bool, strided: np.ndarray
    ) -> Iterator[TableLaunch]:
        """The launches of a pass: one for each block of its tiles, then launches that finish its reductions."""
        # Imported here because it needs Triton.
        from .support import combine_parts

        tiles, of_tile = self._tiles(tile)
        name, device = f"{self.spec.name}_{tile.title}", self.device
        common = {**tables, **self._arrays, **of_tile}
        for block, first, count in tiles.ranges:
            constants, options = build_options(self.spec, tile, block, unscale)
            base = {**common, "tile_base": of_tile[f"base_{first}"]}
            of_range = {**base, "tile_tensor": of_tile["tile_tensor"][first : first + count]}
            yield launch_of(getattr(module, name), count, device, constants, of_range, **options)
            listed = first + np.flatnonzero(strided[tiles.tile_tensor[first : first + count]])
            if tile.over is None and len(listed):
                options.pop("maxnreg", None)
                walked = {**base, "tile_list": device_table(listed, device)}
                yield launch_of(getattr(module, f"{name}_strided"), len(listed), device, constants, walked, **options)
        for slot, reduction in tile.parts:
            combined = self._combined(tile, slot, tile.place(reduction) == "row")
            count = len(combined["tile_tensor"]) if self.tables.slot_counts[slot] else 0
            arrays = {**common, **combined, "parts": common[f"parts_{slot}"], "out": common[f"slot_{slot}"]}
            sizes = {"OPERATION": reduction.operation, "SLICES": _COMBINED_SLICES, "PARTS": _COMBINED_PARTS}
            yield launch_of(combine_parts, count, device, sizes, arrays)
        if tile.reductions:
            finish = getattr(module, f"{name}_finish")
            yield launch_of(finish, len(common["first_tile"]), device, {"BLOCK": _FINISH_BLOCK}, common)

    def _combined(self, tile: TilePass, slot: int, along_rows: bool) -> dict[str, torch.Tensor]:
        """The tables of `combine_parts` for the parts of one slot."""
        assert tile.view is not None
        slices = self.spec.program.slices
        view, kind = slices.views.index(tile.view), slices.kinds.index(slices.overs[slot])
        key = (view, kind, int(along_rows))
        if key not in self._combines:
            tables = self.tables
            tiles, starts = tables.views[view], tables.starts[kind]
            counts = np.diff(starts)
            grid = -(-tiles.extents // tiles.blocks)
            part_counts = grid[:, 2] if along_rows else grid[:, 1]
            inner = np.maximum(counts if along_rows else tiles.extents[:, 2], 1)
            places = np.stack([counts, part_counts, inner, tiles.parts[:, int(not along_rows)], starts[:-1]], axis=1)
            programs = -(-counts // _COMBINED_SLICES)
            owners = np.repeat(np.arange(len(counts), dtype=np.int32), programs)
            first = np.cumsum(programs) - programs
            combined = {"tile_tensor": owners, "first_tile": first, "places": places}
            self._combines[key] = device_tables(combined, self.device)
        return self._combines[key]
