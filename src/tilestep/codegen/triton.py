"""The Triton backend: a program as one Python module, scalar passes and tile passes as kernels."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

from ..graph import TilePass
from ..storage import BLOCK
from .spec import MAX_DIMS, KernelSpec
from .taps import taps_of
from .triton_formats import format_functions, random_functions
from .triton_math import TileMath, finish_kernel
from .triton_scalars import scalar_kernel
from .triton_slices import slice_kernels
from .triton_taps import TapText
from .triton_text import (
    HELPERS,
    POINTERS,
    REDUCTIONS,
    TileBody,
    decorator,
    is_16_bits,
    pointer_to,
    tile_pointers,
)

_LONGEST_LINE = 120
_NO_BREAK = "\0=\0"

_CONSTANTS = "TILE: tl.constexpr, SPAN: tl.constexpr, UNSCALE: tl.constexpr"
"""Constants of a tile pass: elements held at once, elements of a program, whether gradients lose their scale."""


_PARTS = (("part", "TILE"), ("rest", BLOCK))
"""What a reduction has of whole tiles and of what is walked with a mask where tiles are of blocks, and of how many."""


class _Kernel(TileMath):
    """The kernels that load and store around the math of one tile pass."""

    def __init__(self, spec: KernelSpec, index: int, tile: TilePass) -> None:
        super().__init__(spec, tile, f"math_{index}")
        self.index = index
        taps = taps_of(spec, tile)
        self.taps = TapText(self, taps) if taps is not None else None

    @property
    def title(self) -> str:
        return f"{self.spec.name}_tile_pass_{self.index}"

    @property
    def _shape(self) -> str:
        """The shape of the elements that are held at once: a row for each block."""
        return f"(TILE // {BLOCK}, {BLOCK})" if self.spec.has_blocks else "(TILE,)"

    @property
    def _rest(self) -> str:
        """The shape of what is held at once with a mask, one block: its indices take registers."""
        return f"(1, {BLOCK})"

    def _lanes(self) -> list[str]:
        if not self.spec.has_blocks:
            return ["    lane = tl.arange(0, TILE)"]
        return [
            f"    block_lane = tl.arange(0, TILE // {BLOCK})[:, None]",
            f"    pair_lane = tl.arange(0, {BLOCK // 2})[None, :]",
            f"    lane = tl.arange(0, {BLOCK})[None, :]",
        ]

    def _whole_pointers(self, indent: str) -> list[str]:
        """Pointers to the elements of a tile without an end in it."""
        lines = []
        widest = max(array.dtype.itemsize for _, array in self.used() if array.elements == 1)
        for _, array in self.used():
            # Of blocks a thread has as many neighbours of each array: numbers would change threads otherwise.
            aligned = 16 * array.dtype.itemsize // widest if self.spec.has_blocks else 16
            base, start = f"tl.multiple_of({pointer_to(array)}, {aligned})", "tl.multiple_of(start, TILE)"
            place = f"{base} + {start} + lane"
            if self.spec.has_blocks:
                place = f"{base} + ({start} + block_lane * {BLOCK} + lane)"
            if array.elements == BLOCK:
                place = f"{pointer_to(array)} + (start // {BLOCK} + block_lane)"
            if array.elements == 2:
                base = f"tl.multiple_of({pointer_to(array)}, {aligned // 2})"
                place = f"{base} + ({start} // 2 + block_lane * {BLOCK // 2} + pair_lane)"
            lines.append(f"{indent}{array.name}_array = {place}")
        place = f"start + block_lane * {BLOCK} + lane" if self.spec.has_blocks else "start + lane"
        return lines + self.element_index(indent, place)

    def _masks(self, indent: str) -> list[str]:
        """Which elements of a tile there are, and their indices; of blocks, each row of the tensor begins one."""
        if not self.spec.has_blocks:
            return [f"{indent}mask = lane < stop - start", f"{indent}index = start + lane"]
        lines = [
            f"block = start // {BLOCK} + tl.arange(0, 1)[:, None]",
            f"block_mask = block * {BLOCK} < stop",
            # In 32 bits, whose division is a few instructions: blocks of a tensor are fewer.
            "first_line = (block.to(tl.int32) // per_row.to(tl.int32)).to(tl.int64)",
            f"first_column = (block - first_line * per_row) * {BLOCK}",
            "line_column = first_column + lane",
            "mask = block_mask & (line_column < columns_of_row)",
            "index = first_line * columns_of_row + line_column",
        ]
        if any(array.elements == 2 for array in self.arrays):
            lines += [
                "packed_columns = (columns_of_row + 1) // 2",
                "pair_mask = block_mask & (first_column // 2 + pair_lane < packed_columns)",
            ]
        return [f"{indent}{line}" for line in lines]

    def _block_pointers(self, indent: str) -> list[str]:
        """Pointers to what a tile has of arrays with an entry for several elements."""
        lines = []
        for _, array in self.used():
            if array.elements == BLOCK:
                lines.append(f"{indent}{array.name}_array = {pointer_to(array)} + block")
            elif array.elements == 2:
                first = f"{pointer_to(array)} + (first_line * packed_columns + first_column // 2)"
                lines.append(f"{indent}{array.name}_array = {first} + pair_lane")
        return lines

    def _call(self, indent: str, offset: Callable[[str], str], mask: str, *, strided: bool = False) -> list[str]:
        lines: list[str] = []
        body = TileBody(self.spec, lines, indent, offset, mask)
        self.load_inputs(body)
        if self.taps is not None:
            self.taps.before(body, strided=strided)
        lines.append(self.call(indent))
        self.store_results(body)
        if self.taps is not None:
            self.taps.after(body, strided=strided)
        for slot, reduction in self.tile.reductions:
            neutral, combine = REDUCTIONS[reduction.operation]
            term = f"tl.where({mask}, term_{slot}, {neutral})" if mask else f"term_{slot}"
            part = f"rest_{slot}" if mask and self.spec.has_blocks else f"part_{slot}"
            lines.append(f"{indent}{part} = {combine}({part}, {term})")
        return lines

    def _accumulators(self, indent: str) -> list[str]:
        """What reductions begin with; with blocks apart for what is walked with a mask."""
        shapes = {"part": self._shape, **({"rest": self._rest} if self.spec.has_blocks else {})}
        parts = [
            f"{indent}{name}_{slot} = tl.full({shape}, {REDUCTIONS[reduction.operation][0]}, tl.{self.type})"
            for slot, reduction in self.tile.reductions
            for name, shape in shapes.items()
        ]
        return [*(self.taps.accumulators(indent) if self.taps is not None else ()), *parts]

    def _partials(self, indent: str) -> list[str]:
        lines = self.taps.partials(indent) if self.taps is not None else []
        for slot, reduction in self.tile.reductions:
            combine = REDUCTIONS[reduction.operation][1]
            total = f"tl.reduce(part_{slot}, 0, {combine})"
            if self.spec.has_blocks:
                both = [f"tl.reduce(tl.reshape({name}_{slot}, ({size},)), 0, {combine})" for name, size in _PARTS]
                total = f"{combine}({both[0]}, {both[1]})"
            total = f"{total}.to(tl.float64)"
            lines.append(f"{indent}tl.store(partials + tile * {self.spec.reduction_count} + {slot}, {total})")
        return lines

    @property
    def tap_pointers(self) -> list[str]:
        """The pointer parameters of what the kernels put out beside the update."""
        return self.taps.pointers if self.taps is not None else []

    @property
    def _runs(self) -> str:
        """Whether a program has something to do: where it measures, in a skipped step too."""
        measures = self.taps is not None and self.taps.stats
        return "(grad_address != 0)" if measures else "(skip == 0.0) & (grad_address != 0)"

    def _prologue(self, tile: str) -> list[str]:
        """Every table load before the first branch: they overlap, where a return between them would serialize them."""
        return [
            f"    tile = {tile}",
            "    t = tl.load(tile_tensor + tile).to(tl.int64)",
            "    skip = tl.load(control + 1)",
            "    grad_address = tl.load(grads + t)",
            "    layout_row = tl.load(layout_index + t)",
            "    begin = (tile - tl.load(first_tile + t)) * SPAN",
            "    stop = tl.minimum(begin + SPAN, tl.load(numel + t))",
            *(["    columns_of_row = tl.load(columns + t)"] if self.spec.has_blocks else []),
            *self.table_loads(),
            *(self.taps.prologue() if self.taps is not None else ()),
        ]

    def _rows(self) -> list[str]:
        if not self.spec.has_blocks:
            return []
        return [f"        per_row = tl.maximum((columns_of_row + {BLOCK - 1}) // {BLOCK}, 1)"]

    def kernel(self) -> list[str]:
        """The kernel over all tensors that are walked in memory order.

        A program walks SPAN elements of one tensor in tiles: the chain of table loads is paid once a span, and the loop
        keeps registers, and with them the number of programs in flight, as for one tile.
        """
        pointers = tile_pointers(self.spec, self.tap_pointers)
        lines = decorator(pointers)
        lines.append(f"def {self.title}({', '.join(pointers)}, {_CONSTANTS}):")
        lines += self._prologue("tl.program_id(0)")
        alike = [array for _, array in self.used() if array.elements != BLOCK]
        together = " | ".join(f"{array.name}_address" for array in alike) or "grad_address"
        # Rows that end inside of a block are walked with a mask.
        is_even = ["        aligned = aligned & (columns_of_row >= tl.load(numel + t))"] if self.spec.has_blocks else []
        lines += [
            *self._lanes(),
            f"    if {self._runs} & (layout_row < 0):",
            f"        aligned = (({together}) & 15) == 0",
            *is_even,
            *(["        aligned = aligned & (skip == 0.0)"] if self.taps is not None and self.taps.stats else []),
            *self._rows(),
            *self._accumulators("        "),
            "        start = begin",
            "        whole = tl.where(aligned, stop - TILE + 1, begin)",
            "        while start < whole:",
            *self._whole_pointers("            "),
        ]
        lines += self._call("            ", lambda name: f"{name}_array", "")
        lines += ["            start += TILE", "        while start < stop:"]
        if self.spec.has_blocks:
            lines += self._masks("            ")
            plain = [array for _, array in self.used() if array.elements == 1]
            lines += [f"            {array.name}_array = {pointer_to(array)} + index" for array in plain]
            lines += [*self._block_pointers("            "), *self.element_index("            ", "index")]
        else:
            lines.append("            mask = lane < stop - start")
            lines += self.element_index("            ", "start + lane")
            lines += [
                f"            {array.name}_array = {pointer_to(array)} + start + lane" for _, array in self.used()
            ]
        lines += self._call("            ", lambda name: f"{name}_array", "mask")
        return [*lines, f"            start += {self._masked}", *self._partials("        ")]

    @property
    def _masked(self) -> str:
        """Elements that are held at once where they are walked with a mask."""
        return str(BLOCK) if self.spec.has_blocks else "TILE"

    def strided_kernel(self) -> list[str]:
        """The kernel over the tiles of tensors that must be walked by coordinates."""
        pointers = tile_pointers(self.spec, self.tap_pointers, strided=True)
        lines = decorator(pointers)
        lines.append(f"def {self.title}_strided({', '.join(pointers)}, {_CONSTANTS}):")
        lines += self._prologue("tl.load(tile_list + tl.program_id(0))")
        lines += [
            *self._lanes(),
            f"    if {self._runs}:",
            f"        layout = layouts + layout_row * {self.layout_width}",
            *self._rows(),
            *self._accumulators("        "),
            "        start = begin",
            "        while start < stop:",
        ]
        used = [(position, array) for position, array in self.walked if array is None or array.elements == 1]
        inside = [
            *self._masks(""),
            *(f"at_{position} = index * 0" for position, _ in used),
            "dims = tl.load(layout)",
            "for back in tl.range(0, loop_bound(dims)):",
            "    dim = dims - 1 - back",
            "    size = tl.maximum(tl.load(layout + 1 + dim), 1)",
            "    coordinate = index % size",
            "    index = index // size",
        ]
        for position, _ in used:
            stride = f"tl.load(layout + {1 + MAX_DIMS * (1 + position)} + dim)"
            inside.append(f"    at_{position} += coordinate * {stride}")
        for position, array in used:
            if array is not None:
                inside.append(f"{array.name}_array = {pointer_to(array)} + at_{position}")
        inside += [*self._block_pointers(""), *self.element_index("", f"at_{len(self.arrays)}")]
        lines += [f"            {line}" for line in inside]
        lines += self._call("            ", lambda name: f"{name}_array", "mask", strided=True)
        return [*lines, f"            start += {self._masked}", *self._partials("        ")]

    def finish(self) -> list[str]:
        """The kernel that adds up the tile partials of each tensor, in tile order."""
        stop = "first + (tl.load(numel + t) + SPAN - 1) // SPAN"
        constants = "SPAN: tl.constexpr, BLOCK: tl.constexpr"
        return finish_kernel(self.spec, self.tile, f"finish_{self.index}", POINTERS["finish"], constants, stop)


def source(spec: KernelSpec) -> str:
    """The whole module of a spec."""
    quick = all(is_16_bits(spec, tile) for tile in spec.program.tiles if tile is not None)
    parts = format_functions(spec.storages.values(), quick)
    parts += random_functions(spec.draws.values()) if spec.draws else []
    for index, (scalar_pass, tile) in enumerate(zip(spec.program.scalars, spec.program.tiles)):
        parts.append(scalar_kernel(spec, index, scalar_pass))
        for here in (*spec.program.slices_before(index), tile):
            if here is not None and here.view is not None:
                parts += slice_kernels(spec, here)
        if tile is not None and tile.view is None:
            kernel = _Kernel(spec, index, tile)
            parts += [kernel.math(), kernel.kernel(), kernel.strided_kernel()]
            if tile.reductions:
                parts.append(kernel.finish())
    body = "\n\n\n".join("\n".join(part) for part in parts) + "\n"
    helpers = ", ".join(name for name in HELPERS if re.search(rf"\b{name}\b", body))
    imports = "import triton\nimport triton.language as tl"
    if helpers:
        imports += f"\n\nfrom tilestep.codegen.triton_support import {helpers}"
    lines = f"{spec.header('#', 'Triton')}\n{imports}\n\n\n{body}".split("\n")
    return "\n".join(part for line in lines for part in _folded(line))


def _folded(line: str) -> list[str]:
    """A long call, definition or import in lines of at most 120 columns, each inside its parentheses."""
    starts = ("def ", "@triton.jit", "from ")
    if len(line) <= _LONGEST_LINE or not (line.startswith(starts) or "_math_" in line):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    if line.startswith("from ") and "(" not in line:
        line = line.replace(" import ", " import (", 1) + ")"
    results, equals, call = line.partition(" = ")
    if equals and len(results) + call.find(",") > _LONGEST_LINE - 3:
        # Too many results for the line that the call's parentheses begin in: they get their own.
        begin = len(results) - len(results.lstrip())
        line = f"{results[:begin]}({results[begin:]}){_NO_BREAK}{call}"
    lines = textwrap.wrap(
        line, _LONGEST_LINE, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, tabsize=4
    )
    return [part.replace(_NO_BREAK, " = ") for part in lines]
