"""Passes in Triton that work on rows and columns: a tile is a block of a few matrices, rows and columns.

A program walks the rows of its tile in sub-blocks of a few at a time. What it holds at once, and with it how many
programs are in flight, does not grow with the tile; the table loads and what is left of columns are paid once a tile.
"""

from __future__ import annotations

from ..graph import TilePass, Value
from .spec import MAX_DIMS, KernelSpec
from .triton_math import TileMath, finish_kernel
from .triton_text import REDUCTIONS, TileBody, decorator, pointer_to, random_pointers

SLICE_POINTERS = [
    "grads",
    "addresses",
    "tile_base",
    "tile_tensor",
    "first_tile",
    "extents",
    "part_starts",
    "starts",
    "spans",
    "rows",
    "control",
    "layout_index",
    "partials",
]
"""Pointer parameters of a pass over slices, before those of `slice_pointers`."""

STRIDED_POINTERS = ["layouts", "tile_list"]

FINISH_POINTERS = ["partials", "sums", "grads", "first_tile", "tile_count"]

_NAMES = ("MATRICES", "ROWS", "COLUMNS", "HELD", "STAGES", "UNSCALE")
_CONSTANTS = ", ".join(f"{name}: tl.constexpr" for name in _NAMES)
"""The sides of a tile, how many of its rows are held at once, how many such sub-blocks are computed or on their way,
whether gradients lose their loss scale."""

_SHAPE = "(MATRICES, HELD, COLUMNS)"

_COLUMNS_INSIDE = "(matrix < matrices_left) & (column < columns_left)"


def slice_pointers(spec: KernelSpec, tile: TilePass) -> list[str]:
    """The arrays of slots and parts that a pass takes, as names of pointer parameters: `slot_<n>`, `parts_<n>`."""
    slots = spec.program.slices.slots
    read = [slots[id(value)] for value in tile.slices()]
    return [
        *random_pointers(spec),
        *(f"slot_{slot}" for slot in dict.fromkeys([*read, *(slot for slot, _ in tile.kept)])),
        *(f"parts_{slot}" for slot, _ in tile.parts),
    ]


def slice_kernels(spec: KernelSpec, tile: TilePass) -> list[list[str]]:
    """The functions of a pass that reads, makes or is over slices."""
    kernel = _SliceKernel(spec, tile)
    parts = [kernel.math(), kernel.kernel()]
    if tile.over is None:
        parts.append(kernel.strided_kernel())
    if tile.reductions:
        stop = "first + tl.load(tile_count + t)"
        title = f"{tile.title}_finish"
        parts.append(finish_kernel(spec, tile, title, FINISH_POINTERS, "BLOCK: tl.constexpr", stop))
    return parts


class _SliceKernel(TileMath):
    """The kernels that load and store around the math of one pass."""

    def __init__(self, spec: KernelSpec, tile: TilePass) -> None:
        super().__init__(spec, tile, f"{tile.title}_math")
        assert tile.view is not None
        self.view, self.all_slices = tile.view, spec.program.slices
        self.row_parts = [(slot, value) for slot, value in tile.parts if self._place(value) == "row"]
        self.column_parts = [(slot, value) for slot, value in tile.parts if self._place(value) == "column"]
        self.whole_tile = self._whole_tile()

    def _kind(self, slot: int) -> int:
        return self.all_slices.kinds.index(self.all_slices.overs[slot])

    def _slot(self, value: Value) -> int:
        return self.all_slices.slots[id(value)]

    def _place(self, value: Value) -> str:
        assert value.over is not None
        return self.view.place(value.over)

    def _whole_tile(self) -> set[int]:
        """The values with an element for each of the tile, by identity; others are the same along some side."""
        found = set(self.element_inputs)
        found.update(id(value) for _, value in self.slices if self._place(value) in ("own", "other"))
        for value in self.tile.values():
            if not self.tile.leaves(value) and any(id(arg) in found for arg in value.args):
                found.add(id(value))
        return found

    def _prologue(self) -> list[str]:
        """Every table load, and which matrices, rows and columns the tile covers.

        Where a tile lies in its tensor needs 64 bits; what it spans is known to fit 32, as are the numbers of tiles:
        these take half the registers and are divided faster.
        """
        slots = [*(self._slot(value) for _, value in self.slices), *(slot for slot, _ in self.tile.kept)]
        kinds = sorted({self._kind(slot) for slot in slots})
        lines = [
            "    skip = tl.load(control + 1)",
            "    grad_address = tl.load(grads + t)",
            "    layout_row = tl.load(layout_index + t)",
            "    matrices = tl.load(extents + t * 3)",
            "    height = tl.load(extents + t * 3 + 1)",
            "    width = tl.load(extents + t * 3 + 2)",
            "    local = (tile - tl.load(first_tile + t)).to(tl.int32)",
            *self.table_loads(),
        ]
        count = len(self.all_slices.kinds)
        lines += [f"    start_{kind} = tl.load(starts + t * {count} + {kind})" for kind in kinds]
        for _, value in self.slices:
            if self._place(value) == "other":
                slot, spans = self._slot(value), self.all_slices.spans
                pair = spans.index((self.tile.over, self.all_slices.overs[slot]))
                lines.append(f"    span_{slot} = tl.load(spans + (t * {len(spans)} + {pair}) * 2)")
                lines.append(f"    inner_{slot} = tl.load(spans + (t * {len(spans)} + {pair}) * 2 + 1)")
        if self.row_parts:
            lines.append("    row_parts = tl.load(part_starts + t * 2)")
        if self.column_parts:
            lines.append("    column_parts = tl.load(part_starts + t * 2 + 1)")
        return [
            *lines,
            "    column_tiles = ((width + COLUMNS - 1) // COLUMNS).to(tl.int32)",
            "    row_tiles = ((height + ROWS - 1) // ROWS).to(tl.int32)",
            "    rest = local // column_tiles",
            "    column_tile = (local % column_tiles).to(tl.int64)",
            "    row_tile = (rest % row_tiles).to(tl.int64)",
            "    matrix_tile = (rest // row_tiles).to(tl.int64)",
            "    first_matrix = matrix_tile * MATRICES",
            "    first_column = column_tile * COLUMNS",
            "    first_line = first_matrix * height + row_tile * ROWS",
            "    corner = first_line * width + first_column",
            "    matrices_left = tl.minimum(matrices - first_matrix, MATRICES).to(tl.int32)",
            "    rows_left = tl.minimum(height - row_tile * ROWS, ROWS).to(tl.int32)",
            "    columns_left = tl.minimum(width - first_column, COLUMNS).to(tl.int32)",
            "    pitch = width.to(tl.int32)",
            "    matrix = tl.arange(0, MATRICES)[:, None, None]",
            "    across = tl.arange(0, HELD)[None, :, None]",
            "    column = tl.arange(0, COLUMNS)[None, None, :]",
            "    line = matrix * height.to(tl.int32) + across",
        ]

    def kernel(self) -> list[str]:
        """The kernel over tensors that lie row by row: a loop over full rows that are aligned, one for all others."""
        pointers = [*SLICE_POINTERS, *slice_pointers(self.spec, self.tile)]
        together = " | ".join(f"{array.name}_address" for _, array in self.used()) or "0"
        unit = self._unit()
        lines = decorator(pointers)
        lines.append(f"def {self.spec.name}_{self.tile.title}({', '.join(pointers)}, {_CONSTANTS}):")
        lines += ["    tile = tl.load(tile_base) + tl.program_id(0)"]
        lines += ["    t = tl.load(tile_tensor + tl.program_id(0)).to(tl.int64)", *self._prologue()]
        plain = " & (layout_row < 0)" if self.tile.over is None else ""
        lines += [
            f"    if (skip == 0.0) & (grad_address != 0){plain}:",
            *self._before_loops("        "),
            "        aligned = (matrices_left == MATRICES) & (columns_left == COLUMNS)",
            f"        aligned = aligned & (width % {unit} == 0) & ((({together}) & 15) == 0)",
            # Not multiple_of(width): that promise would hold in the masked loop too, which then reads past rows.
            f"        even_pitch = pitch // {unit} * {unit}",
            "        even_place = line * even_pitch + column",
            f"        even_corner = first_line * (width // {unit} * {unit}) + first_column",
            "        whole = tl.where(aligned, rows_left // HELD * HELD, 0)",
            "        for start in tl.range(0, loop_bound(whole), HELD, num_stages=STAGES):",
            "            place = start * even_pitch + even_place",
        ]
        for _, array in self.used():
            corner = f"tl.multiple_of({pointer_to(array)}, 16) + even_corner"
            lines.append(f"            {array.name}_array = {corner} + place")
        lines += self.element_index("            ", "even_corner + place")
        lines += self._work("            ", masked=False)
        lines += [
            "        odd_place = line * pitch + column",
            "        for start in tl.range(loop_bound(whole), loop_bound(rows_left), HELD):",
        ]
        lines += self._masks("            ")
        lines += [f"            {array.name}_array = {pointer_to(array)} + corner + place" for _, array in self.used()]
        lines += self.element_index("            ", "corner + place")
        lines += self._work("            ", masked=True)
        return lines + self._after_loops("        ")

    def _unit(self) -> int:
        """Elements of the narrowest array in 16 bytes."""
        return 16 // min((array.dtype.itemsize for _, array in self.used()), default=4)

    def _masks(self, indent: str) -> list[str]:
        return [
            f"{indent}place = start * pitch + odd_place",
            f"{indent}inside = (matrix < matrices_left) & (across < rows_left - start)",
            f"{indent}mask = inside & (column < columns_left)",
        ]

    def strided_kernel(self) -> list[str]:
        """The kernel over tensors that must be walked by coordinates."""
        pointers = [*SLICE_POINTERS, *STRIDED_POINTERS, *slice_pointers(self.spec, self.tile)]
        lines = decorator(pointers)
        lines.append(f"def {self.spec.name}_{self.tile.title}_strided({', '.join(pointers)}, {_CONSTANTS}):")
        lines += [
            "    tile = tl.load(tile_list + tl.program_id(0))",
            "    t = tl.load(tile_tensor + tile).to(tl.int64)",
        ]
        lines += [*self._prologue(), "    if (skip == 0.0) & (grad_address != 0):", *self._before_loops("        ")]
        lines += [
            "        odd_place = line * pitch + column",
            "        for start in tl.range(0, loop_bound(rows_left), HELD):",
        ]
        lines += [*self._masks("            "), *self._located("            ")]
        lines += self._work("            ", masked=True)
        return lines + self._after_loops("        ")

    def _located(self, indent: str) -> list[str]:
        lines = [f"layout = layouts + layout_row * {self.layout_width}", "index = corner + place"]
        lines += [f"at_{position} = index * 0" for position, _ in self.walked]
        lines += [
            "dims = tl.load(layout)",
            "for back in tl.range(0, loop_bound(dims)):",
            "    dim = dims - 1 - back",
            "    size = tl.maximum(tl.load(layout + 1 + dim), 1)",
            "    coordinate = index % size",
            "    index = index // size",
        ]
        for position, _ in self.walked:
            stride = f"tl.load(layout + {1 + MAX_DIMS * (1 + position)} + dim)"
            lines.append(f"    at_{position} += coordinate * {stride}")
        for position, array in self.used():
            lines.append(f"{array.name}_array = {pointer_to(array)} + at_{position}")
        lines += self.element_index("", f"at_{len(self.arrays)}")
        return [indent + line for line in lines]

    def _before_loops(self, indent: str) -> list[str]:
        """Loads that all rows of the tile share, and what columns and the whole tile are accumulated in."""
        lines = [
            f"{indent}{name} = {self._load_slice(value, masked=True)}"
            for name, value in self.slices
            if self._place(value) in ("column", "matrix")
        ]
        for name, reduction in self._accumulated():
            neutral = REDUCTIONS[reduction.operation][0]
            lines.append(f"{indent}all_{name} = tl.full({_SHAPE}, {neutral}, tl.{self.type})")
        return lines

    def _accumulated(self) -> list[tuple[str, Value]]:
        """Names of what is reduced over the whole tile or its columns, with the reduction."""
        return [
            *((f"share_{slot}", reduction) for slot, reduction in self.column_parts),
            *((f"term_{slot}", reduction) for slot, reduction in self.tile.reductions),
        ]

    def _work(self, indent: str, *, masked: bool) -> list[str]:
        lines: list[str] = []
        body = TileBody(self.spec, lines, indent, lambda name: f"{name}_array", "mask" if masked else "")
        self.load_inputs(body)
        for name, value in self.slices:
            if self._place(value) not in ("column", "matrix"):
                lines.append(f"{indent}{name} = {self._load_slice(value, masked)}")
        lines.append(self.call(indent))
        self.store_results(body)
        for slot, _ in self.tile.kept:
            pointer = f"slot_{slot} + start_{self._kind(slot)} + corner + place"
            masked_by = ", mask=mask" if masked else ""
            lines.append(f"{indent}tl.store({pointer}, kept_{slot}.to(tl.{self.type}){masked_by})")
        for slot, reduction in self.row_parts:
            part = _reduced(reduction, self._term(f"share_{slot}", reduction, masked), 2)
            masked_by = ", mask=inside" if masked else ""
            pointer = f"parts_{slot} + row_parts + column_tile * (matrices * height) + first_line + (line + start)"
            lines.append(f"{indent}tl.store({pointer}, {part}{masked_by})")
        for name, reduction in self._accumulated():
            neutral, combine = REDUCTIONS[reduction.operation]
            term = f"tl.where(mask, {name}, {neutral})" if masked else name
            lines.append(f"{indent}all_{name} = {combine}(all_{name}, {term})")
        return lines

    def _load_slice(self, value: Value, masked: bool) -> str:
        slot = self._slot(value)
        pointer, mask = {
            "own": ("corner + place", "mask"),
            "row": ("first_line + (line + start)", "inside"),
            "column": ("(first_matrix * width + first_column) + (matrix * pitch + column)", _COLUMNS_INSIDE),
            "matrix": ("first_matrix + matrix", "matrix < matrices_left"),
            "other": (
                f"((corner + place) // span_{slot} * inner_{slot} + (corner + place) % inner_{slot})",
                "mask",
            ),
        }[self._place(value)]
        masked_by = f", mask={mask}, other=0.0" if masked else ""
        return f"tl.load(slot_{slot} + start_{self._kind(slot)} + {pointer}{masked_by})"

    def _term(self, name: str, reduction: Value, masked: bool) -> str:
        """What is reduced, of the sub-block's whole shape."""
        if masked:
            return f"tl.where(mask, {name}, {REDUCTIONS[reduction.operation][0]})"
        return name if id(reduction.args[0]) in self.whole_tile else f"({name} + tl.zeros({_SHAPE}, tl.{self.type}))"

    def _after_loops(self, indent: str) -> list[str]:
        """Leave what was accumulated."""
        lines = []
        for slot, reduction in self.column_parts:
            line = "((first_matrix + matrix) * row_tiles + row_tile)"
            place = f"parts_{slot} + column_parts + {line} * width + first_column + column"
            part = _reduced(reduction, f"all_share_{slot}", 1)
            lines.append(f"{indent}tl.store({place}, {part}, mask={_COLUMNS_INSIDE})")
        for slot, reduction in self.tile.reductions:
            total = _reduced(reduction, f"all_term_{slot}", None)
            place = f"partials + tile * {self.spec.reduction_count} + {slot}"
            lines.append(f"{indent}tl.store({place}, {total}.to(tl.float64))")
        return lines


def _reduced(reduction: Value, term: str, axis: int | None) -> str:
    kept = ", keep_dims=True" if axis is not None else ""
    if reduction.operation == "reduce_sum":
        return f"tl.sum({term}, {axis}{kept})"
    return f"tl.reduce({term}, {axis}, {REDUCTIONS[reduction.operation][1]}{kept})"
