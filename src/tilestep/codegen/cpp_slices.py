"""Passes in C++ that work on rows and columns: tiles are blocks of a matrix, walked row by row."""

from __future__ import annotations

from ..graph import TilePass, Value, View
from .cpp_text import (
    COMBINERS,
    TileBody,
    accumulate,
    array_lines,
    combine,
    key_lines,
    layout_width,
    neutral,
    scalar_type,
    scalars_of,
    unscale_loop,
    writer_of,
)
from .emit import Writer
from .spec import KernelSpec
from .tidy import describe

_OPERATIONS = {"reduce_sum": "Add", "reduce_amax": "Larger", "reduce_amin": "Smaller"}


def slice_function(spec: KernelSpec, tile: TilePass) -> str:
    """The function of a pass that reads, makes or is over slices."""
    return "\n".join(_SlicePass(spec, tile).lines())


class _SlicePass:
    """Writes one function, from the outermost loop to the innermost."""

    def __init__(self, spec: KernelSpec, tile: TilePass) -> None:
        assert tile.view is not None
        self.spec, self.tile, self.view = spec, tile, tile.view
        self.slices = spec.program.slices
        self.scalar = scalar_type(spec)
        self.unscales = spec.program.unscales(tile)
        self.scalars = scalars_of(spec, tile)
        self.read = tile.slices()
        self.row_parts = [(s, v) for s, v in tile.parts if self._place(v, self.view) == "row"]
        self.column_parts = [(s, v) for s, v in tile.parts if self._place(v, self.view) == "column"]
        self.hoisted: dict[str, list[str]] = {"row": [], "matrix": [], "column": []}
        self._bind_slices()

    @staticmethod
    def _place(value: Value, view: View) -> str:
        assert value.over is not None
        return view.place(value.over)

    def _bind_slices(self) -> None:
        """Spell what is read from other passes: once a row, matrix or tile where it is the same there."""
        indents = {"row": "        ", "matrix": "      ", "column": "      "}
        index = {"row": "line", "matrix": "matrix", "own": "i", "column": "i - base"}
        for value in self.read:
            place = self._place(value, self.view)
            slot = self.slices.slots[id(value)]
            array = f"slot_{slot}"
            name = self.scalars.names.fresh(value.name or describe(value))
            if place == "column":
                self.hoisted[place].append(
                    f"{indents[place]}const {self.scalar}* __restrict {name} = {array} + matrix * cut.columns;"
                )
                array = name
            element = f"{array}[{index.get(place) or self._span_index(value)}]"
            spelled = f"({element} != 0)" if value.is_bool else element
            if place in ("row", "matrix"):
                kind = "bool" if value.is_bool else self.scalar
                self.hoisted[place].append(f"{indents[place]}const {kind} {name} = {spelled};")
                spelled = name
            self.scalars.bind(value, spelled)

    def _span_index(self, value: Value) -> str:
        slot = self.slices.slots[id(value)]
        return f"i / span_{slot}[0] * span_{slot}[1] + i % span_{slot}[1]"

    def lines(self) -> list[str]:
        """The whole function."""
        index = self.slices.views.index(self.view)
        spec, columns = self.spec, max(len(self.spec.program.columns), 1)
        lines = [
            f'extern "C" void {self.tile.title}(const Launch* launch, const Slices* slices) {{',
            "  if (launch->control[SKIP] != 0) return;",
            f"  const View& view = slices->views[{index}];",
            "#pragma omp parallel for schedule(dynamic) num_threads(launch->threads)",
            "  for (int64_t tile = 0; tile < view.tiles; ++tile) {",
            "    const int64_t t = view.tile_tensor[tile];",
            "    if (launch->grads[t] == 0) continue;",
            "    const Cut cut = cut_of(view, t, tile - view.first_tile[t]);",
            f"    const {self.scalar}* row = static_cast<const {self.scalar}*>(launch->rows) + t * {columns};",
            *self.scalars.lines,
            *array_lines(spec, self.tile, self.unscales),
            *key_lines(spec, self.tile),
            *self._slot_lines(),
            *(f"    double part_{slot} = {neutral(reduction)};" for slot, reduction in self.tile.reductions),
        ]
        if self.tile.over is None:
            lines.append("    const bool plain = launch->layout_index[t] < 0;")
            place = f"launch->layout_index[t] * {layout_width(spec)}"
            lines.append(f"    const int64_t* layout = plain ? nullptr : launch->layouts + {place};")
        lines += self._matrix_loop()
        for slot, _ in self.tile.reductions:
            lines.append(f"    launch->partials[tile * {spec.reduction_count} + {slot}] = part_{slot};")
        return [*lines, "  }", *self._finish(index), "}"]

    def _slot_lines(self) -> list[str]:
        lines = []
        slots = {self.slices.slots[id(value)]: "const " for value in self.read}
        slots.update({slot: "" for slot, _ in self.tile.kept})
        for slot, qualifier in slots.items():
            c_type = f"{qualifier}{self.scalar}"
            kind = self.slices.kinds.index(self.slices.overs[slot])
            start = f"slices->starts[{kind} * (launch->tensors + 1) + t]"
            lines.append(
                f"    {c_type}* __restrict slot_{slot} = reinterpret_cast<{c_type}*>(slices->slots[{slot}]) + {start};"
            )
        for value in self.read:
            if self._place(value, self.view) == "other":
                slot = self.slices.slots[id(value)]
                pair = self.slices.spans.index((self.tile.over, self.slices.overs[slot]))
                lines.append(f"    const int64_t* span_{slot} = slices->spans + ({pair} * launch->tensors + t) * 2;")
        for slot, _ in self.tile.parts:
            lines.append(
                f"    {self.scalar}* __restrict parts_{slot} = reinterpret_cast<{self.scalar}*>(slices->parts[{slot}]);"
            )
        return lines

    def _matrix_loop(self) -> list[str]:
        lines = ["    for (int64_t matrix = cut.matrix_begin; matrix < cut.matrix_end; ++matrix) {"]
        lines += [*self.hoisted["matrix"], *self.hoisted["column"]]
        for slot, reduction in self.column_parts:
            begin = "view.parts[t * 2 + 1] + (matrix * cut.row_tiles + cut.row_tile) * cut.columns"
            lines.append(f"      {self.scalar}* __restrict column_{slot} = parts_{slot} + {begin};")
            lines.append("      for (int64_t x = cut.column_begin; x < cut.column_end; ++x)")
            lines.append(f"        column_{slot}[x] = {neutral(reduction)};")
        lines += [
            "      for (int64_t r = cut.row_begin; r < cut.row_end; ++r) {",
            "        const int64_t line = matrix * cut.rows + r;",
            "        const int64_t base = line * cut.columns;",
            "        const int64_t chunk = base + cut.column_begin, chunk_end = base + cut.column_end;",
            *self.hoisted["row"],
        ]
        for slot, reduction in self.tile.reductions:
            lines.append(f"        {self.scalar} chunk_{slot} = {neutral(reduction)};")
        for slot, reduction in self.row_parts:
            lines.append(f"        {self.scalar} row_{slot} = {neutral(reduction)};")
        if self.tile.over is None:
            lines += ["        if (plain) {", *self._element_loop(False), "        } else {", *self._element_loop(True)]
            lines.append("        }")
        else:
            lines += self._element_loop(False)
        for slot, reduction in self.tile.reductions:
            lines.append("        " + combine(reduction, f"part_{slot}", f"chunk_{slot}"))
        for slot, _ in self.row_parts:
            place = "view.parts[t * 2] + line * cut.column_tiles + cut.column_tile"
            lines.append(f"        parts_{slot}[{place}] = row_{slot};")
        return [*lines, "      }", "    }"]

    def _element_loop(self, strided: bool) -> list[str]:
        inner = writer_of(self.scalar, "            ", self.scalars.names.within())
        inner.expressions.update(self.scalars.expressions)
        body = TileBody(self.spec, self.tile, inner, strided, inner_indent := "            ")
        body.emit()
        for slot, value in self.tile.kept:
            inner.lines.append(f"{inner_indent}slot_{slot}[i] = {inner[value]};")
        self._accumulate(inner, inner_indent)
        reduced = [(f"chunk_{slot}", value) for slot, value in self.tile.reductions]
        reduced += [(f"row_{slot}", value) for slot, value in self.row_parts]
        clause = "".join(f" reduction({COMBINERS[value.operation]} : {name})" for name, value in reduced)
        lines = [] if strided else [f"#pragma omp simd{clause}"]
        lines.append("          for (int64_t i = chunk; i < chunk_end; ++i) {")
        if strided:
            arrays = 1 + len(self.spec.arrays)
            lines += [f"            int64_t at[{arrays}];", f"            locate(layout, i, {arrays}, at);"]
        lines += [*inner.lines, "          }"]
        return lines + (unscale_loop(self.spec, strided) if self.unscales else [])

    def _accumulate(self, inner: Writer, indent: str) -> None:
        for slot, reduction in self.row_parts:
            inner.lines.append(indent + accumulate(reduction, f"row_{slot}", inner[reduction.args[0]]))
        for slot, reduction in self.column_parts:
            place = f"column_{slot}[i - base]"
            inner.lines.append(indent + accumulate(reduction, place, inner[reduction.args[0]]))

    def _finish(self, index: int) -> list[str]:
        """What the tiles have left, combined in their order: per slice, and per tensor."""
        lines = []
        for slot, reduction in self.tile.parts:
            kind = self.slices.kinds.index(self.slices.overs[slot])
            along_rows = "true" if self._place(reduction, self.view) == "row" else "false"
            operation = f"{self.scalar}, {_OPERATIONS[reduction.operation]}"
            lines.append(f"  combine_parts<{operation}>(launch, slices, {index}, {kind}, {slot}, {along_rows});")
        if not self.tile.reductions:
            return lines
        lines += [
            "#pragma omp parallel for schedule(static) num_threads(launch->threads)",
            "  for (int64_t t = 0; t < launch->tensors; ++t) {",
            "    if (launch->grads[t] == 0) continue;",
            "    const int64_t first = view.first_tile[t], stop = first + view.tile_count[t];",
        ]
        count = self.spec.reduction_count
        for slot, reduction in self.tile.reductions:
            lines.append(f"    double total_{slot} = {neutral(reduction)};")
            lines.append("    for (int64_t tile = first; tile < stop; ++tile)")
            lines.append("      " + combine(reduction, f"total_{slot}", f"launch->partials[tile * {count} + {slot}]"))
            lines.append(f"    launch->sums[t * {count} + {slot}] = total_{slot};")
        return [*lines, "  }"]
