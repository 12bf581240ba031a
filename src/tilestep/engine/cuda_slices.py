"""Launches of the passes that work on rows and columns on a GPU: tables, and the arrays passes hand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import numpy as np
import torch

from ..codegen.launch_triton import EXACT, Launcher, prepare
from ..codegen.spec import KernelSpec
from ..codegen.triton_slices import FINISH_POINTERS, SLICE_POINTERS, STRIDED_POINTERS, slice_pointers
from ..graph import TilePass
from .slices import Block, SliceTables, ViewTiles

__all__ = ["CudaSlices", "Launch"]

Launch = tuple[Launcher, list[torch.Tensor]]

_REDUCED_ELEMENTS = 8192
"""Elements of a tile whose rows or columns are reduced: what a tile leaves of them is read again."""

_ELEMENTS = 2048
"""Elements of other tiles."""

_ELEMENTS_A_WARP, _MOST_WARPS = 512, 8
_WIDEST = 128
_SIDES = (1, 4, 16, 64)
_FINISH_BLOCK = 1024
_COMBINED_SLICES, _COMBINED_PARTS = 32, 32


def block_of(elements: int) -> Callable[[int, int, int], Block]:
    """A function from matrices, rows and columns of a tensor to the block of its tiles.

    Sides are powers of two from a short list: each block that occurs is built and launched once.

    Args:
        elements: the most elements of a tile.

    Example:
        >>> choose = block_of(8192)
        >>> choose(1, 4096, 4096), choose(1, 4096, 10), choose(64, 3, 3)
        ((1, 64, 128), (1, 512, 16), (64, 4, 4))
    """

    def side(size: int, most: int) -> int:
        return min(next((each for each in _SIDES if size <= each), most), most)

    def choose(matrices: int, rows: int, columns: int) -> Block:
        width = side(columns, _WIDEST)
        height = side(rows, elements // width)
        return side(matrices, elements // (width * height)), height, width

    return choose


class CudaSlices:
    """Tables of a segment's slices on its device, and what the passes leave for each other.

    Args:
        spec: what the kernels are built from.
        shapes: shapes of the tensors.
        device: where they are.
    """

    def __init__(self, spec: KernelSpec, shapes: Sequence[Sequence[int]], device: torch.device) -> None:
        self.spec, self.device = spec, device
        slices = spec.program.slices
        self._cuts = {
            reduced: SliceTables(slices, shapes, block_of(_REDUCED_ELEMENTS if reduced else _ELEMENTS))
            for reduced in (False, True)
        }
        self.tables = tables = self._cuts[True]
        self.most_tiles = max(cut.most_tiles for cut in self._cuts.values())
        self._arrays = {
            "starts": self._table(tables.starts[:, :-1].T),
            "spans": self._table(tables.spans.reshape(len(slices.spans), len(shapes), 2).swapaxes(0, 1)),
        }
        for slot, (count, parts) in enumerate(zip(tables.slot_counts, tables.part_counts(spec.program))):
            self._arrays[f"slot_{slot}"] = torch.zeros(max(count, 1), dtype=spec.compute, device=device)
            if parts:
                self._arrays[f"parts_{slot}"] = torch.zeros(parts, dtype=spec.compute, device=device)
        self._views: dict[tuple[bool, int], dict[str, torch.Tensor]] = {}
        self._combines: dict[tuple[int, int, int], dict[str, torch.Tensor]] = {}

    def slot(self, slot: int) -> torch.Tensor:
        """The array of all slices of a slot."""
        return self._arrays[f"slot_{slot}"]

    def _table(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
        return tensor if tensor.numel() else tensor.new_zeros(1)

    def _tiles(self, tile: TilePass) -> tuple[ViewTiles, dict[str, torch.Tensor]]:
        assert tile.view is not None
        reduced = bool(tile.parts)
        index = self.spec.program.slices.views.index(tile.view)
        tiles = self._cuts[reduced].views[index]
        if (reduced, index) not in self._views:
            names = ("tile_tensor", "first_tile", "tile_count", "extents")
            found = {name: self._table(getattr(tiles, name)) for name in names}
            found["part_starts"] = self._table(tiles.parts)
            found.update({f"base_{first}": self._table(np.array([first])) for _, first, _ in tiles.ranges})
            self._views[reduced, index] = found
        return tiles, self._views[reduced, index]

    def launches(
        self, module: ModuleType, tile: TilePass, tables: Mapping[str, torch.Tensor], unscale: bool, strided: np.ndarray
    ) -> list[Launch]:
        """The launches of a pass: one for each block that its tiles have, then what finishes its reductions.

        Args:
            module: the generated module.
            tile: the pass.
            tables: the segment's tables by name.
            unscale: whether gradients lose their loss scale.
            strided: bool[tensors], those that must be walked by coordinates.
        """
        tiles, own = self._tiles(tile)
        name = f"{self.spec.name}_{tile.title}"
        known = {**tables, **self._arrays, **own}
        launches: list[Launch] = []
        for block, first, count in tiles.ranges:
            constants = {**dict(zip(("MATRICES", "ROWS", "COLUMNS"), block)), "UNSCALE": unscale}
            options = {
                "num_warps": max(1, min(_MOST_WARPS, block[0] * block[1] * block[2] // _ELEMENTS_A_WARP)),
                **EXACT,
            }
            here = {
                "tile_tensor": own["tile_tensor"][first : first + count],
                "tile_base": own[f"base_{first}"],
            }
            pointers = [*SLICE_POINTERS, *slice_pointers(self.spec, tile)]
            kernel = prepare(getattr(module, name), count, self.device, constants, **options)
            launches.append((kernel, [{**known, **here}[pointer] for pointer in pointers]))
            listed = first + np.flatnonzero(strided[tiles.tile_tensor[first : first + count]])
            if tile.over is None and len(listed):
                here = {"tile_list": self._table(listed), "tile_base": here["tile_base"]}
                pointers = [*SLICE_POINTERS, *STRIDED_POINTERS, *slice_pointers(self.spec, tile)]
                strided_kernel = getattr(module, f"{name}_strided")
                kernel = prepare(strided_kernel, len(listed), self.device, constants, **options)
                launches.append((kernel, [{**known, **here}[pointer] for pointer in pointers]))
        return launches + self._finishing(module, tile, known)

    def _finishing(self, module: ModuleType, tile: TilePass, known: Mapping[str, torch.Tensor]) -> list[Launch]:
        # Imported here because it needs Triton.
        from ..codegen.triton_slices_support import COMBINE_POINTERS, combine_parts

        launches = []
        for slot, reduction in tile.parts:
            assert tile.view is not None and reduction.over is not None
            along_rows = tile.view.place(reduction.over) == "row"
            found = self._combined(tile, slot, along_rows)
            count = len(found["tile_tensor"]) if self._cuts[True].slot_counts[slot] else 0
            here = {**known, **found, "parts": known[f"parts_{slot}"], "out": known[f"slot_{slot}"]}
            constants = {
                "OPERATION": reduction.operation,
                "ALONG_ROWS": along_rows,
                "SLICES": _COMBINED_SLICES,
                "PARTS": _COMBINED_PARTS,
            }
            combine = prepare(combine_parts, count, self.device, constants)
            launches.append((combine, [here[pointer] for pointer in COMBINE_POINTERS]))
        if tile.reductions:
            kernel = getattr(module, f"{self.spec.name}_{tile.title}_finish")
            finish = prepare(kernel, len(known["first_tile"]), self.device, {"BLOCK": _FINISH_BLOCK})
            launches.append((finish, [known[pointer] for pointer in FINISH_POINTERS]))
        return launches

    def _combined(self, tile: TilePass, slot: int, along_rows: bool) -> dict[str, torch.Tensor]:
        """The tables of `combine_parts` for the parts of one slot."""
        assert tile.view is not None
        slices = self.spec.program.slices
        view, kind = slices.views.index(tile.view), slices.kinds.index(slices.overs[slot])
        key = (view, kind, int(along_rows))
        if key not in self._combines:
            tables = self._cuts[True]
            tiles, starts = tables.views[view], tables.starts[kind]
            counts = np.diff(starts)
            grid = -(-tiles.extents // tiles.blocks)
            part_counts = grid[:, 2] if along_rows else grid[:, 1]
            inner = np.ones_like(counts) if along_rows else np.maximum(tiles.extents[:, 2], 1)
            places = np.stack([counts, part_counts, inner, tiles.parts[:, int(not along_rows)], starts[:-1]], axis=1)
            programs = -(-counts // _COMBINED_SLICES)
            owners = np.repeat(np.arange(len(counts), dtype=np.int32), programs)
            self._combines[key] = {
                "tile_tensor": self._table(owners),
                "first_tile": self._table(np.cumsum(programs) - programs),
                "places": self._table(places),
            }
        return self._combines[key]
