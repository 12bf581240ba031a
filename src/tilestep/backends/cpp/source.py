"""The C++ backend: a program as one translation unit; scalar, tile, row and column passes as functions."""

from __future__ import annotations

from collections.abc import Mapping

from ...graph import ScalarPass, TilePass, Value, View, scalar_needs, size_from_end
from ...storage import BLOCK, Array, codec_of, dtype_name
from ..emit import Writer
from ..spec import KernelSpec, describe
from ..taps import FAR, NEAR, SPLIT, PassTaps, taps_of
from .support import BLOCKS_PRELUDE, PRELUDE, SLICES_PRELUDE
from .text import (
    C_TYPES,
    COMBINERS,
    TILES_OF_TENSORS,
    BlockBody,
    CppNames,
    TileBody,
    accumulate,
    array_lines,
    arrays_of,
    combine,
    format_functions,
    key_lines,
    layout_width,
    neutral,
    random_functions,
    scalar_type,
    scalars_of,
    touches_blocks,
    unscale_loop,
    writer_of,
)

GRADIENT_SCALE = """
namespace {
// What gradients are multiplied by: one over the loss scale, times the clip coefficient of the unscaled norm.
inline double gradient_scale_of(const double* control, double max_grad_norm) {
  if (max_grad_norm < 0) {  // an adaptive limit beside it
    max_grad_norm = -max_grad_norm < control[CLIP] ? -max_grad_norm : control[CLIP];
  }
  if (max_grad_norm == INFINITY) return control[INVERSE_SCALE];
  const double coefficient = max_grad_norm / (control[NORM] + 1e-6);
  return control[INVERSE_SCALE] * (coefficient > 1 ? 1.0 : coefficient);
}
}  // namespace
"""


def scalar_function(spec: KernelSpec, index: int, scalar_pass: ScalarPass) -> str:
    columns = max(len(spec.program.columns), 1)
    scalar = scalar_type(spec)
    needed = scalar_needs(scalar_pass)
    per_tensor = any(value.level.name == "TENSOR" for value in needed)
    writer = writer_of("double", "    ", CppNames())
    for value in needed:
        source = _scalar_source(spec, value)
        if source:
            writer.name(value, source)
    writer.write(needed)
    lines = [
        f'extern "C" void scalar_pass_{index}(const Launch* launch) {{',
        "  const bool skip = launch->control[SKIP] != 0;",
        f"  {scalar}* rows = static_cast<{scalar}*>(launch->rows);",
        "  int64_t same_as = -1;",
        "  for (int64_t t = 0; t < launch->tensors; ++t) {",
        "    if (launch->grads[t] == 0) {",
        *_absent(spec, scalar_pass),
        "      continue;",
        "    }",
        "    const double next_step = launch->step[t] + (skip ? 0.0 : 1.0);",
        "    const double* hyper = launch->hyper + launch->group[t] * launch->hyper_count;",
        f"    {scalar}* row = rows + t * {columns};",
    ]
    if not per_tensor and not scalar_pass.global_reductions and not scalar_pass.stores:
        lines += [
            "    if (same_as >= 0 && launch->group[t] == launch->group[same_as] &&",
            f"        {_step_of('same_as', scalar_pass)} == next_step) {{",
            *_copied_columns(columns, [column for column, _ in scalar_pass.rows]),
            *(["      launch->step[t] = next_step;"] if scalar_pass.is_last else []),
            "      continue;",
            "    }",
            "    same_as = t;",
        ]
    lines += writer.lines
    lines += [f"    row[{column}] = {writer[value]};" for column, value in scalar_pass.rows]
    for slot, value in scalar_pass.global_reductions:
        lines.append(f"    launch->global_parts[t * {spec.global_count} + {slot}] = {writer[value.args[0]]};")
    if scalar_pass.is_last:
        for name, value in scalar_pass.stores.items():
            lines.append(f"    if (!skip) {_scalar_state(spec, name)}[t] = {writer[value]};")
        lines.append("    launch->step[t] = next_step;")
    return "\n".join([*lines, "  }", "}"])


def _copied_columns(columns: int, own: list[int]) -> list[str]:
    """Take a pass's columns from the tensor before; those of other passes may differ between tensors."""
    if len(own) == columns:
        copy = f"row[column] = rows[same_as * {columns} + column];"
        return [f"      for (int64_t column = 0; column < {columns}; ++column) {copy}"]
    return [f"      row[{column}] = rows[same_as * {columns} + {column}];" for column in own]


def _absent(spec: KernelSpec, scalar_pass: ScalarPass) -> list[str]:
    """A tensor without gradient adds nothing to what spans tensors."""
    return [
        f"      launch->global_parts[t * {spec.global_count} + {slot}] = "
        f"{'0' if value.operation == 'global_sum' else '-INFINITY'};"
        for slot, value in scalar_pass.global_reductions
    ]


def _step_of(index: str, scalar_pass: ScalarPass) -> str:
    return f"launch->step[{index}]" if scalar_pass.is_last else f"launch->step[{index}] + (skip ? 0.0 : 1.0)"


def _scalar_state(spec: KernelSpec, name: str) -> str:
    """The array of a state of one number for each tensor."""
    position = spec.program.graph.scalar_states.index(name)
    return f"reinterpret_cast<{C_TYPES[dtype_name(spec.scalar_dtype(name))]}*>(launch->scalar_states[{position}])"


def _scalar_source(spec: KernelSpec, value: Value) -> str | None:
    """Where a scalar pass finds a value it does not compute."""
    if id(value) in spec.program.reductions:
        return f"launch->sums[t * {spec.reduction_count} + {spec.program.reductions[id(value)]}]"
    if id(value) in spec.program.global_reductions:
        return f"launch->totals[{spec.program.global_reductions[id(value)]}]"
    if value.operation == "load":
        return f"{_scalar_state(spec, value.attribute)}[t]"
    if value.operation != "hyper":
        return None
    if value.attribute == "step":
        return "next_step"
    if value.attribute == "machine_epsilon":
        return repr(spec.machine_epsilon)
    if value.attribute == "numel" or size_from_end(value.attribute):
        return f"launch->sizes[t * {len(spec.sizes)} + {spec.sizes.index(size_from_end(value.attribute))}]"
    if value.attribute == "gradient_scale":
        clip = f"hyper[{spec.hypers.index('max_grad_norm')}]"
        return f"gradient_scale_of(launch->control, {clip})"
    return f"hyper[{spec.hypers.index(value.attribute)}]"


class TapText:
    """Writes the statements of a pass's taps, from the innermost loop to the tensor's totals."""

    def __init__(self, taps: PassTaps) -> None:
        self._taps, self.stats, self.grad, self.tile = taps, taps.stats, taps.grad, taps.tile
        self._spec, self._columns = taps.spec, taps.columns
        self._arrays: list[Array] = []
        if taps.compared:
            listed = self._spec.storages["param"].arrays("param")
            self._arrays = [listed[place] for place in taps.compared]

    @property
    def _slots(self) -> list[int]:
        return self._taps.slots if self.stats else []

    def tile_lines(self) -> list[str]:
        """What a tile begins with."""
        lines = [f"    double tap_part_{slot} = 0;" for slot in self._slots]
        if self._taps.changes:
            lines.append("    uint32_t* tap_words = launch->tap_words + launch->first_word[t];")
        return lines

    def chunk_lines(self, scalar: str, *, skipped: bool = False) -> list[str]:
        """What a chunk begins with."""
        lines = [f"        {scalar} tap_{slot} = 0;" for slot in self._slots]
        if self._taps.changes and not skipped:
            lines.append(f"        uint8_t tap_flags[{_SUMMED if self.stats else _CHUNK}] = {{0}};")
        return lines

    @property
    def clause(self) -> str:
        """The reductions of a chunk's loop, for OpenMP."""
        names: dict[str, list[str]] = {"maximum_of_all": [], "+": []}
        for slot in self._slots:
            names["maximum_of_all" if self._columns.is_extreme(slot) else "+"].append(f"tap_{slot}")
        return "".join(f" reduction({how} : {', '.join(variables)})" for how, variables in names.items() if variables)

    def loads(self, body: TileBody, already_read: Mapping[str, str]) -> list[str]:
        """The numbers of buffers before the step, those that the pass has read already by their names."""
        wanted = [*(["grad"] if self.grad else []), *self._taps.buffers] if self.stats else []
        return [
            f"{body.indent}const auto tap_old_{name} = {already_read.get(name) or body.load(name)};" for name in wanted
        ]

    def before(self, body: TileBody) -> list[str]:
        """What is remembered of an element before it is written."""
        compared = [
            f"{body.indent}const auto tap_was_{place} = bits_of({body.element(array)});"
            for place, array in enumerate(self._arrays)
        ]
        return [*self.loads(body, {}), *compared]

    def after(self, body: TileBody, inner: Writer) -> list[str]:
        """What becomes of an element that was written."""
        lines = [
            f"{body.indent}const bool tap_other_{place} = bits_of({body.element(array)}) != tap_was_{place};"
            for place, array in enumerate(self._arrays)
        ]
        if self._taps.changes:
            lines.append(f"{body.indent}tap_flags[i - chunk] = tap_other_0;")
            if body.is_strided:
                place = body.index[self._arrays[0].name]
                bit = f"__atomic_fetch_or(&tap_words[{place} >> 5], 1u << ({place} & 31), __ATOMIC_RELAXED)"
                lines[-1] = f"{body.indent}if (tap_other_0) {bit};"
        if not self.stats:
            return lines
        start = len(inner.lines)
        inner.write(self._taps.move_values)
        moved = inner.lines[start:]
        del inner.lines[start:]
        lines += moved
        for name in self._taps.buffers:
            storage = self._spec.storages[name]
            value = inner[self.tile.stores[name]]
            kept = f"read({body.element(storage.arrays(name)[0])})" if codec_of(storage).is_element else value
            lines.append(f"{body.indent}const auto tap_now_{name} = {kept};")
        if "param" in self._taps.buffers:
            lines.append(f"{body.indent}const auto tap_update = {inner[self.tile.stores['param']]} - tap_old_param;")
            moves = "" if self._taps.moves is None else f" | {inner[self._taps.moves]}"
            same = " & ".join(f"!tap_other_{place}" for place in range(len(self._arrays)))
            lines.append(f"{body.indent}const bool tap_lost = ((tap_update != 0){moves}) & {same};")
        return lines + self.sums("now", body.indent)

    def sums(self, which: str | None, indent: str) -> list[str]:
        """The accumulation of an element, after the step ("now") or of what a skipped one leaves (None)."""
        lines: list[str] = []
        if not self.stats:
            return lines
        kept = which or "old"

        def add(column: str, term: str) -> None:
            lines.append(f"tap_{self._columns.slot(column)} += {term};")

        def extreme(column: str, term: str) -> None:
            name = f"tap_{self._columns.slot(column)}"
            lines.append(f"{name} = maximum({name}, std::fabs({term}));")

        if self.grad:
            add("grad_squares", "tap_old_grad * tap_old_grad")
            extreme("grad_max", "tap_old_grad")
            add("grad_zeros", "tap_old_grad == 0")
        if "param" in self._taps.buffers:
            add("param_squares", f"tap_{kept}_param * tap_{kept}_param")
            extreme("param_max", f"tap_{kept}_param")
            if which:
                add("update_squares", "tap_update * tap_update")
                extreme("update_max", "tap_update")
                add("lost", "tap_lost")
        for name in self._taps.states:
            number = f"tap_{kept}_{name}"
            lines.append(f"const bool tap_large_{name} = std::fabs({number}) >= {SPLIT!r}f;")
            scale = f"(tap_large_{name} ? {FAR!r}f : {NEAR!r}f)"
            lines.append(f"const auto tap_scaled_{name} = {number} * {scale};")
            square = f"tap_scaled_{name} * tap_scaled_{name}"
            add(f"{name}_near", f"tap_large_{name} ? 0 : {square}")
            add(f"{name}_far", f"tap_large_{name} ? {square} : 0")
            extreme(f"{name}_max", number)
        return [indent + line for line in lines]

    def after_chunk(self, *, strided: bool = False, skipped: bool = False) -> list[str]:
        """What a chunk leaves."""
        lines = []
        for slot in self._slots:
            part = f"tap_part_{slot}"
            largest = f"{part} = maximum({part}, double(tap_{slot}));"
            lines.append("        " + (largest if self._columns.is_extreme(slot) else f"{part} += tap_{slot};"))
        if self._taps.changes and not strided and not skipped:
            lines += [
                "        for (int64_t word = 0; word * 32 < chunk_end - chunk; ++word) {",
                "          const uint32_t bits = packed(tap_flags + word * 32);",
                "          if (bits != 0) tap_words[chunk / 32 + word] |= bits;",
                "        }",
            ]
        return lines

    def partials(self) -> list[str]:
        """What a tile leaves."""
        width = len(self._columns)
        return [f"    launch->tap_partials[tile * {width} + {slot}] = tap_part_{slot};" for slot in self._slots]

    def finish(self) -> list[str]:
        """The totals of each tensor, of its tiles in their order."""
        if not self._slots:
            return []
        width = len(self._columns)
        lines = [*TILES_OF_TENSORS]
        for slot in self._slots:
            part = f"launch->tap_partials[tile * {width} + {slot}]"
            extreme = self._columns.is_extreme(slot)
            combined = f"total = maximum(total, {part});" if extreme else f"total += {part};"
            lines.append("    {")
            lines.append("      double total = 0;")
            lines.append(f"      for (int64_t tile = first; tile < stop; ++tile) {combined}")
            lines.append(f"      launch->tap_totals[t * {width} + {slot}] = total;")
            lines.append("    }")
        return [*lines, "  }"]


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
        if touches_blocks(self.spec, self.tile):
            lines += self._block_loop()
        elif self.tile.over is None:
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
        TileBody(self.spec, self.tile, inner, strided, "            ").emit()
        self._accumulate(inner, "            ")
        lines = [] if strided else [f"#pragma omp simd{self._clause}"]
        lines.append("          for (int64_t i = chunk; i < chunk_end; ++i) {")
        if strided:
            arrays = 1 + len(self.spec.arrays)
            lines += [f"            int64_t at[{arrays}];", f"            locate(layout, i, {arrays}, at);"]
        lines += [*inner.lines, "          }"]
        return lines + (unscale_loop(self.spec, strided) if self.unscales else [])

    @property
    def _clause(self) -> str:
        reduced = [(f"chunk_{slot}", value) for slot, value in self.tile.reductions]
        reduced += [(f"row_{slot}", value) for slot, value in self.row_parts]
        return "".join(f" reduction({COMBINERS[value.operation]} : {name})" for name, value in reduced)

    def _block_loop(self) -> list[str]:
        """The loop over the blocks of a tile's part of a row; only a row's last one may be short."""
        inner = writer_of(self.scalar, "  ", self.scalars.names.within())
        inner.expressions.update(self.scalars.expressions)
        body = BlockBody(self.spec, self.tile, inner, self.unscales, self._clause, self._accumulate)
        head = [
            f"const int64_t block = line * ((cut.columns + {BLOCK - 1}) / {BLOCK}) + column / {BLOCK};",
            "const int64_t first = base + column;",
            f"const int64_t count = cut.column_end - column < {BLOCK} ? cut.column_end - column : {BLOCK};",
            "const int64_t pair = line * ((cut.columns + 1) / 2) + column / 2, pairs = (count + 1) / 2;",
        ]
        return [
            f"        for (int64_t column = cut.column_begin; column < cut.column_end; column += {BLOCK}) {{",
            *(line if line[0] == "#" else f"          {line}" for line in (*head, *body.lines())),
            "        }",
        ]

    def _accumulate(self, inner: Writer, indent: str) -> None:
        for slot, value in self.tile.kept:
            inner.lines.append(f"{indent}slot_{slot}[i] = {inner[value]};")
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


_CHUNK, _SUMMED = 64, 1024
"""Elements of a loop: one that sums goes on in the compute type that long, before it adds to a float64 sum."""


def _tile_function(spec: KernelSpec, index: int, tile: TilePass) -> str:
    scalar = scalar_type(spec)
    columns = max(len(spec.program.columns), 1)
    unscales = index == spec.program.unscaling_pass
    tile_taps = taps_of(spec, tile)
    taps = TapText(tile_taps) if tile_taps is not None else None
    lines = [f'extern "C" void tile_pass_{index}(const Launch* launch) {{']
    measures = taps is not None and taps.stats
    skips = "launch->control[SKIP] != 0"
    lines.append(f"  const bool skips = {skips};" if measures else f"  if ({skips}) return;")
    lines += [
        "#pragma omp parallel for schedule(static) num_threads(launch->threads)",
        "  for (int64_t tile = 0; tile < launch->tiles; ++tile) {",
        "    const int64_t t = launch->tile_tensor[tile];",
        "    if (launch->grads[t] == 0) continue;",
        "    const int64_t begin = (tile - launch->first_tile[t]) * launch->tile_size;",
        "    const int64_t rest = launch->numel[t] - begin;",
        "    const int64_t end = begin + (rest < launch->tile_size ? rest : launch->tile_size);",
        f"    const {scalar}* row = static_cast<const {scalar}*>(launch->rows) + t * {columns};",
    ]
    if spec.has_blocks:
        lines.append("    const int64_t columns = launch->columns[t];")
        lines.append(f"    const int64_t per_row = (columns + {BLOCK - 1}) / {BLOCK};")
    scalars = scalars_of(spec, tile)
    lines += [*scalars.lines, *array_lines(spec, tile, unscales), *key_lines(spec, tile)]
    for slot, reduction in tile.reductions:
        lines.append(f"    double part_{slot} = {neutral(reduction)};")
    lines += taps.tile_lines() if taps is not None else []
    if spec.has_blocks:
        lines += _block_loop(spec, tile, scalars, unscales)
    else:
        branch = "if"
        if taps is not None and taps.stats:
            for strided in (False, True):
                lines.append(f"    {branch} (skips && launch->layout_index[t] {'>= 0' if strided else '< 0'}) {{")
                lines += _skipped_loop(spec, scalars, taps, strided)
                branch = "} else if"
        lines.append(f"    {branch} (launch->layout_index[t] < 0) {{")
        lines += _element_loop(spec, tile, scalars, taps, strided=False, unscales=unscales)
        lines += ["    } else {", _layout_line(spec)]
        lines += _element_loop(spec, tile, scalars, taps, strided=True, unscales=unscales)
        lines.append("    }")
    lines += taps.partials() if taps is not None else []
    for slot, _ in tile.reductions:
        lines.append(f"    launch->partials[tile * {spec.reduction_count} + {slot}] = part_{slot};")
    lines += ["  }", *(taps.finish() if taps is not None else ()), *_finish(spec, tile), "}"]
    return "\n".join(lines)


def _chunk_head(size: int) -> list[str]:
    return [
        f"      for (int64_t chunk = begin; chunk < end; chunk += {size}) {{",
        f"        const int64_t chunk_end = chunk + {size} < end ? chunk + {size} : end;",
    ]


def _layout_line(spec: KernelSpec) -> str:
    return f"      const int64_t* layout = {_layout_of(spec)};"


def _layout_of(spec: KernelSpec) -> str:
    return f"launch->layouts + launch->layout_index[t] * {layout_width(spec)}"


def _located(spec: KernelSpec) -> list[str]:
    arrays = 1 + len(spec.arrays)
    return [f"          int64_t at[{arrays}];", f"          locate(layout, i, {arrays}, at);"]


def _skipped_loop(spec: KernelSpec, scalars: Writer, taps: TapText, strided: bool) -> list[str]:
    """What a skipped step measures: the gradient, and what is kept."""
    inner = writer_of(scalar_type(spec), "          ", scalars.names.within())
    body = TileBody(spec, taps.tile, inner, strided, "          ")
    inner.lines += taps.loads(body, {})
    lines = [_layout_line(spec)] if strided else []
    lines += _chunk_head(_SUMMED)
    lines += taps.chunk_lines(scalar_type(spec), skipped=True)
    if not strided:
        lines.append(f"#pragma omp simd{taps.clause}")
    lines.append("        for (int64_t i = chunk; i < chunk_end; ++i) {")
    lines += _located(spec) if strided else []
    return [
        *lines,
        *inner.lines,
        *taps.sums(None, "          "),
        "        }",
        *taps.after_chunk(skipped=True),
        "      }",
    ]


def _element_loop(
    spec: KernelSpec, tile: TilePass, scalars: Writer, taps: TapText | None, *, strided: bool, unscales: bool
) -> list[str]:
    scalar = scalar_type(spec)
    inner = writer_of(scalar, "          ", scalars.names.within())
    inner.expressions.update(scalars.expressions)
    body = TileBody(spec, tile, inner, strided, "          ")
    if taps is not None:
        inner.lines += taps.before(body)
    body.emit()
    if taps is not None:
        inner.lines += taps.after(body, inner)
    clause = "".join(
        f" reduction({COMBINERS[reduction.operation]} : chunk_{slot})" for slot, reduction in tile.reductions
    )
    sums = bool(tile.reductions) or (taps is not None and taps.stats)
    lines = _chunk_head(_SUMMED if sums else _CHUNK)
    if not sums and not strided:
        lines += [
            f"        ask_ahead<{_CHUNK}>({array.name}_array, chunk);" for array in arrays_of(spec, tile, unscales)
        ]
    for slot, reduction in tile.reductions:
        lines.append(f"        {scalar} chunk_{slot} = {neutral(reduction)};")
    lines += taps.chunk_lines(scalar) if taps is not None else []
    if not strided:
        lines.append(f"#pragma omp simd{clause}{taps.clause if taps is not None else ''}")
    lines.append("        for (int64_t i = chunk; i < chunk_end; ++i) {")
    lines += _located(spec) if strided else []
    lines += inner.lines
    lines.append("        }")
    for slot, reduction in tile.reductions:
        lines.append("        " + combine(reduction, f"part_{slot}", f"chunk_{slot}"))
    if taps is not None:
        lines += taps.after_chunk(strided=strided)
    if unscales:
        lines += unscale_loop(spec, strided)
    lines.append("      }")
    return lines


def _block_loop(spec: KernelSpec, tile: TilePass, scalars: Writer, unscales: bool) -> list[str]:
    """The loop over the blocks of a tile: tiles count as if none were short."""
    inner = writer_of(scalar_type(spec), "  ", scalars.names.within())
    inner.expressions.update(scalars.expressions)
    clause = "".join(f" reduction({COMBINERS[value.operation]} : chunk_{slot})" for slot, value in tile.reductions)
    body = BlockBody(spec, tile, inner, unscales, clause)
    head = [
        "const int64_t line = block / per_row;",
        f"const int64_t column = (block - line * per_row) * {BLOCK};",
        "const int64_t first = line * columns + column;",
        f"const int64_t count = columns - column < {BLOCK} ? columns - column : {BLOCK};",
    ]
    if any(array.elements == 2 for array in body.arrays):
        head += ["const int64_t pair = line * ((columns + 1) / 2) + column / 2, pairs = (count + 1) / 2;"]
    sums = [f"{scalar_type(spec)} chunk_{slot} = {neutral(value)};" for slot, value in tile.reductions]
    totals = [combine(value, f"part_{slot}", f"chunk_{slot}") for slot, value in tile.reductions]
    return [
        "    const bool is_strided = launch->layout_index[t] >= 0;",
        f"    const int64_t* layout = is_strided ? {_layout_of(spec)} : nullptr;",
        f"    for (int64_t block = begin / {BLOCK}; block * {BLOCK} < end; ++block) {{",
        *(line if line[0] == "#" else f"      {line}" for line in (*head, *sums, *body.lines(), *totals)),
        "    }",
    ]


def _finish(spec: KernelSpec, tile: TilePass) -> list[str]:
    """Per-tensor results of the tile partials, in tile order."""
    if not tile.reductions:
        return []
    count = spec.reduction_count
    lines = [*TILES_OF_TENSORS]
    for slot, reduction in tile.reductions:
        lines.append(f"    double total_{slot} = {neutral(reduction)};")
        lines.append("    for (int64_t tile = first; tile < stop; ++tile)")
        lines.append("      " + combine(reduction, f"total_{slot}", f"launch->partials[tile * {count} + {slot}]"))
        lines.append(f"    launch->sums[t * {count} + {slot}] = total_{slot};")
    return [*lines, "  }"]


def source(spec: KernelSpec) -> str:
    """The whole translation unit of a spec."""
    parts = [spec.header("//", "C++"), PRELUDE.strip(), GRADIENT_SCALE.strip()]
    parts += [BLOCKS_PRELUDE.strip()] if spec.has_blocks else []
    parts += format_functions(spec.storages.values())
    parts += random_functions(spec.draws.values()) if spec.draws else []
    if spec.program.slices.views:
        parts.append(SLICES_PRELUDE.strip())
    for index, (scalar_pass, tile) in enumerate(zip(spec.program.scalars, spec.program.tiles)):
        parts.append(scalar_function(spec, index, scalar_pass))
        parts += [slice_function(spec, slice_pass) for slice_pass in spec.program.slices_before(index)]
        if tile is not None:
            parts.append(slice_function(spec, tile) if tile.view else _tile_function(spec, index, tile))
    return "\n\n".join(parts) + "\n"
