"""The Triton backend: a program as one Python module, scalar passes and tile passes as kernels."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

from ..graph import TilePass
from .spec import MAX_DIMS, KernelSpec
from .triton_formats import format_functions
from .triton_math import TileMath, finish_kernel
from .triton_scalars import scalar_kernel
from .triton_slices import slice_kernels
from .triton_text import (
    HELPERS,
    POINTERS,
    REDUCTIONS,
    TileBody,
    decorator,
    pointer_to,
)

_LONGEST_LINE = 120
_NO_BREAK = "\0=\0"

_CONSTANTS = "TILE: tl.constexpr, SPAN: tl.constexpr, UNSCALE: tl.constexpr"
"""Constants of a tile pass: elements held at once, elements of a program, whether gradients lose their scale."""


class _Kernel(TileMath):
    """The kernels that load and store around the math of one tile pass."""

    def __init__(self, spec: KernelSpec, index: int, tile: TilePass) -> None:
        super().__init__(spec, tile, f"math_{index}")
        self.index = index

    @property
    def title(self) -> str:
        return f"{self.spec.name}_tile_pass_{self.index}"

    def _call(self, indent: str, offset: Callable[[str], str], mask: str) -> list[str]:
        lines: list[str] = []
        body = TileBody(self.spec, lines, indent, offset, mask)
        self.load_inputs(body)
        lines.append(self.call(indent))
        self.store_results(body)
        for slot, reduction in self.tile.reductions:
            neutral, combine = REDUCTIONS[reduction.operation]
            term = f"tl.where({mask}, term_{slot}, {neutral})" if mask else f"term_{slot}"
            lines.append(f"{indent}part_{slot} = {combine}(part_{slot}, {term})")
        return lines

    def _accumulators(self, indent: str) -> list[str]:
        return [
            f"{indent}part_{slot} = tl.full((TILE,), {REDUCTIONS[reduction.operation][0]}, tl.{self.type})"
            for slot, reduction in self.tile.reductions
        ]

    def _partials(self, indent: str) -> list[str]:
        lines = []
        for slot, reduction in self.tile.reductions:
            total = f"tl.reduce(part_{slot}, 0, {REDUCTIONS[reduction.operation][1]}).to(tl.float64)"
            lines.append(f"{indent}tl.store(partials + tile * {self.spec.reduction_count} + {slot}, {total})")
        return lines

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
            *self.table_loads(),
        ]

    def kernel(self) -> list[str]:
        """The kernel over all tensors that are walked in memory order.

        A program walks SPAN elements of one tensor in tiles: the chain of table loads is paid once a span, and the loop
        keeps registers, and with them the number of programs in flight, as for one tile.
        """
        lines = decorator(POINTERS["tile"])
        lines.append(f"def {self.title}({', '.join(POINTERS['tile'])}, {_CONSTANTS}):")
        lines += self._prologue("tl.program_id(0)")
        together = " | ".join(f"{array.name}_address" for _, array in self.used()) or "grad_address"
        lines += [
            "    lane = tl.arange(0, TILE)",
            "    if (skip == 0.0) & (grad_address != 0) & (layout_row < 0):",
            f"        aligned = (({together}) & 15) == 0",
            *self._accumulators("        "),
            "        start = begin",
            "        whole = tl.where(aligned, stop - TILE + 1, begin)",
            "        while start < whole:",
        ]
        for _, array in self.used():
            place = f"tl.multiple_of({pointer_to(array)}, 16) + tl.multiple_of(start, TILE)"
            lines.append(f"            {array.name}_array = {place} + lane")
        lines += self._call("            ", lambda name: f"{name}_array", "")
        lines += ["            start += TILE", "        while start < stop:", "            mask = lane < stop - start"]
        lines += [f"            {array.name}_array = {pointer_to(array)} + start + lane" for _, array in self.used()]
        lines += self._call("            ", lambda name: f"{name}_array", "mask")
        return [*lines, "            start += TILE", *self._partials("        ")]

    def strided_kernel(self) -> list[str]:
        """The kernel over the tiles of tensors that must be walked by coordinates."""
        pointers = POINTERS["tile"] + POINTERS["strided"]
        width = 1 + MAX_DIMS * (1 + len(self.arrays))
        lines = decorator(pointers)
        lines.append(f"def {self.title}_strided({', '.join(pointers)}, {_CONSTANTS}):")
        lines += self._prologue("tl.load(tile_list + tl.program_id(0))")
        lines += [
            "    lane = tl.arange(0, TILE)",
            "    if (skip == 0.0) & (grad_address != 0):",
            f"        layout = layouts + layout_row * {width}",
            *self._accumulators("        "),
            "        start = begin",
            "        while start < stop:",
        ]
        inside = [
            "mask = lane < stop - start",
            "index = start + lane",
            *(f"at_{position} = index * 0" for position, _ in self.used()),
            "dims = tl.load(layout)",
            "for back in tl.range(0, loop_bound(dims)):",
            "    dim = dims - 1 - back",
            "    size = tl.maximum(tl.load(layout + 1 + dim), 1)",
            "    coordinate = index % size",
            "    index = index // size",
        ]
        for position, _ in self.used():
            stride = f"tl.load(layout + {1 + MAX_DIMS * (1 + position)} + dim)"
            inside.append(f"    at_{position} += coordinate * {stride}")
        for position, array in self.used():
            inside.append(f"{array.name}_array = {pointer_to(array)} + at_{position}")
        lines += [f"            {line}" for line in inside]
        lines += self._call("            ", lambda name: f"{name}_array", "mask")
        return [*lines, "            start += TILE", *self._partials("        ")]

    def finish(self) -> list[str]:
        """The kernel that adds up the tile partials of each tensor, in tile order."""
        stop = "first + (tl.load(numel + t) + SPAN - 1) // SPAN"
        constants = "SPAN: tl.constexpr, BLOCK: tl.constexpr"
        return finish_kernel(self.spec, self.tile, f"finish_{self.index}", POINTERS["finish"], constants, stop)


def source(spec: KernelSpec) -> str:
    """The whole module of a spec.

    Args:
        spec: program, storages and compute type.
    """
    parts = format_functions(spec.storages.values())
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
