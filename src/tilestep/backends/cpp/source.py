"""The C++ backend: a program as one translation unit; scalar, tile, row and column passes as functions."""

from __future__ import annotations

from ...graph import ScalarPass, TilePass, Value, scalar_needs
from ...kernels.spec import KernelSpec, describe
from ...storage import BLOCK, dtype_name
from ..decision import gradient_scale
from ..emit import Writer, scalar_source
from ..outputs import PassOutputs
from .runs import OutputText, RunBody
from .support import BLOCKS_PRELUDE, PRELUDE, SLICES_PRELUDE
from .text import (
    C_TYPES,
    COMBINERS,
    OPERATIONS,
    TENSORS,
    TILES_OF_TENSORS,
    CppNames,
    CppWriter,
    accumulate,
    array_lines,
    clause_of,
    combine,
    format_functions,
    key_lines,
    layout_line,
    neutral,
    number_function,
    random_functions,
    reductions_of,
    scalar_type,
    scalars_of,
)


def scalar_function(spec: KernelSpec, index: int, scalar_pass: ScalarPass) -> str:
    columns = max(len(spec.program.columns), 1)
    scalar = scalar_type(spec)
    needed = scalar_needs(scalar_pass)
    per_tensor = any(value.level.name == "TENSOR" for value in needed)
    writer = CppWriter("double", "    ", CppNames())
    states = {name: f"{_scalar_state(spec, name)}[t]" for name in spec.program.graph.scalar_states}
    control = ", ".join(f"launch->control[{name}]" for name in ("NORM", "INVERSE_SCALE", "CLIP"))
    places = {
        "reduction": f"launch->sums[t * {spec.reduction_count} + {{}}]",
        "total": "launch->totals[{}]",
        "size": f"launch->sizes[t * {len(spec.sizes)} + {{}}]",
        "hyper": "hyper[{}]",
        "step": "next_step",
        "machine_epsilon": repr(spec.machine_epsilon),
        "gradient_scale": f"gradient_scale_of({control}, {{}})",
    }
    for value in needed:
        source = scalar_source(spec, value, places, states)
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
    """Copy a pass's columns from the previous tensor; those of other passes may differ between tensors."""
    if len(own) == columns:
        copy = f"row[column] = rows[same_as * {columns} + column];"
        return [f"      for (int64_t column = 0; column < {columns}; ++column) {copy}"]
    return [f"      row[{column}] = rows[same_as * {columns} + {column}];" for column in own]


def _absent(spec: KernelSpec, scalar_pass: ScalarPass) -> list[str]:
    """A tensor without gradient adds nothing to reductions over all tensors."""
    return [
        f"      launch->global_parts[t * {spec.global_count} + {slot}] = "
        f"{'0' if value.operation == 'global_sum' else '-INFINITY'};"
        for slot, value in scalar_pass.global_reductions
    ]


def _step_of(index: str, scalar_pass: ScalarPass) -> str:
    return f"launch->step[{index}]" if scalar_pass.is_last else f"launch->step[{index}] + (skip ? 0.0 : 1.0)"


def _scalar_state(spec: KernelSpec, name: str) -> str:
    """The array of a scalar state, with one number for each tensor."""
    position = spec.program.graph.scalar_states.index(name)
    return f"reinterpret_cast<{C_TYPES[dtype_name(spec.scalar_dtype(name))]}*>(launch->scalar_states[{position}])"


def slice_function(spec: KernelSpec, tile: TilePass, gaps: bool) -> str:
    """The function of a pass that reads, computes or works on slices."""
    return "\n".join(_SlicePass(spec, tile, gaps).lines())


class _SlicePass:
    """Writes one function, from the outermost loop to the innermost."""

    def __init__(self, spec: KernelSpec, tile: TilePass, gaps: bool) -> None:
        assert tile.view is not None
        self.spec, self.tile, self.view, self.gaps = spec, tile, tile.view, gaps and tile.over is None
        self.slices = spec.program.slices
        self.scalar = scalar_type(spec)
        self.unscales = spec.program.unscales(tile)
        self.scalars = scalars_of(spec, tile)
        self.read = tile.slices()
        self.reduced = reductions_of(spec, tile)
        self.row_parts, self.column_parts = tile.parts_of("row"), tile.parts_of("column")
        self.hoisted: dict[str, list[str]] = {"row": [], "matrix": [], "column": []}
        self._bind_slices()

    def _bind_slices(self) -> None:
        """Bind values read from other passes: once a row, matrix or tile if they are the same there."""
        indents = {"row": "        ", "matrix": "      ", "column": "      "}
        index = {"row": "line", "matrix": "matrix", "own": "i", "column": "i - base"}
        for value in self.read:
            place = self.tile.place(value)
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
            *(f"    double {one.part} = {neutral(one.reduction)};" for one in self.reduced),
        ]
        lines.append(layout_line(spec, self.gaps))
        lines += self._matrix_loop()
        lines += [one.partial for one in self.reduced]
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
            if self.tile.place(value) == "other":
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
            *self.hoisted["row"],
        ]
        lines += [f"        {self.scalar} {one.chunk} = {neutral(one.reduction)};" for one in self.reduced]
        for slot, reduction in self.row_parts:
            lines.append(f"        {self.scalar} row_{slot} = {neutral(reduction)};")
        lines += self._run_loop()
        lines += ["        " + combine(one.reduction, one.part, one.chunk) for one in self.reduced]
        for slot, _ in self.row_parts:
            place = "view.parts[t * 2] + line * cut.column_tiles + cut.column_tile"
            lines.append(f"        parts_{slot}[{place}] = row_{slot};")
        return [*lines, "      }", "    }"]

    @property
    def _clause(self) -> str:
        rows = (f" reduction({COMBINERS[value.operation]} : row_{slot})" for slot, value in self.row_parts)
        return clause_of(self.reduced) + "".join(rows)

    def _run_loop(self) -> list[str]:
        """The loop over the runs of a tile's part of a row; only the last block of a row may be short."""
        inner = CppWriter(self.scalar, "  ", self.scalars.names.within())
        inner.expressions.update(self.scalars.expressions)
        body = RunBody(
            self.spec,
            self.tile,
            inner,
            MOST_COLUMNS,
            gaps=self.gaps,
            unscales=self.unscales,
            clause=self._clause,
            rest=self._accumulate,
        )
        if not body.in_blocks:
            loop = "        {"
            head = ["const int64_t first = base + cut.column_begin, count = cut.column_end - cut.column_begin;"]
        else:
            loop = f"        for (int64_t column = cut.column_begin; column < cut.column_end; column += {BLOCK}) {{"
            head = [
                "const int64_t first = base + column;",
                f"const int64_t count = cut.column_end - column < {BLOCK} ? cut.column_end - column : {BLOCK};",
                f"const int64_t block = line * ((cut.columns + {BLOCK - 1}) / {BLOCK}) + column / {BLOCK};",
                "const int64_t pair = line * ((cut.columns + 1) / 2) + column / 2, pairs = (count + 1) / 2;",
            ]
        lines = (*head, *body.lines())
        return [loop, *(line if line[0] == "#" else f"          {line}" for line in lines), "        }"]

    def _accumulate(self, inner: Writer, indent: str) -> None:
        for slot, value in self.tile.kept:
            inner.lines.append(f"{indent}slot_{slot}[i] = {inner[value]};")
        for slot, reduction in self.row_parts:
            inner.lines.append(indent + accumulate(reduction, f"row_{slot}", inner[reduction.args[0]]))
        for slot, reduction in self.column_parts:
            place = f"column_{slot}[i - base]"
            inner.lines.append(indent + accumulate(reduction, place, inner[reduction.args[0]]))

    def _finish(self, index: int) -> list[str]:
        """The partial results of tiles combined in order, for slices and for tensors."""
        lines = []
        for slot, reduction in self.tile.parts:
            kind = self.slices.kinds.index(self.slices.overs[slot])
            along_rows = "true" if self.tile.place(reduction) == "row" else "false"
            operation = f"{self.scalar}, {OPERATIONS[reduction.operation]}"
            lines.append(f"  combine_parts<{operation}>(launch, slices, {index}, {kind}, {slot}, {along_rows});")
        if not self.reduced:
            return lines
        own = "    const int64_t first = view.first_tile[t], stop = first + view.tile_count[t];"
        return [*lines, *TENSORS, own, *(one.total for one in self.reduced), "  }"]


MOST_COLUMNS = 2048
"""The most elements of a row that a tile of a pass over rows and columns has."""

_RUN = 1024
"""Elements of a run, which are summed in the compute type before that sum is added to a float64 sum."""


def _tile_function(spec: KernelSpec, index: int, tile: TilePass, gaps: bool) -> str:
    scalar = scalar_type(spec)
    columns = max(len(spec.program.columns), 1)
    unscales = index == spec.program.unscaling_pass
    outputs = PassOutputs(spec, tile)
    text = OutputText(outputs) if outputs else None
    reduced, reported = reductions_of(spec, tile), text.reported if text is not None else []
    skips = "launch->control[SKIP] != 0"
    lines = [
        f'extern "C" void tile_pass_{index}(const Launch* launch) {{',
        f"  const bool skips = {skips};" if reported else f"  if ({skips}) return;",
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
    every = [*reduced, *reported]
    lines += [f"    double {one.part} = {neutral(one.reduction)};" for one in every]
    lines += text.tile_lines() if text is not None else []
    lines.append(layout_line(spec, gaps))
    chunks = [f"{scalar} {one.chunk} = {neutral(one.reduction)};" for one in every]
    parts = [combine(one.reduction, one.part, one.chunk) for one in every]
    clause = clause_of(reduced if text is not None and text.is_apart else every)

    inner = CppWriter(scalar, "  ", scalars.names.within())
    inner.expressions.update(scalars.expressions)
    body = RunBody(spec, tile, inner, _RUN, gaps=gaps, unscales=unscales, clause=clause, outputs=text)
    loop = _run_loop(body, [*chunks, *body.lines(), *parts])
    if text is not None and reported:
        skipped = _run_loop(body, [*chunks, *text.skipped(body), *parts])
        loop = ["    if (skips) {", *skipped, "    } else {", *loop, "    }"]
    lines += [*loop, *(one.partial for one in every), "  }"]
    finish = [*TILES_OF_TENSORS, *(one.total for one in every), "  }"] if every else []
    return "\n".join([*lines, *finish, "}"])


def _run_loop(body: RunBody, statements: list[str]) -> list[str]:
    """The loop over the runs of a tile; tiles of blocks count short blocks as full ones."""
    size = body.size
    if body.in_blocks:
        loop = f"    for (int64_t block = begin / {size}; block * {size} < end; ++block) {{"
        head = [
            "const int64_t line = block / per_row;",
            f"const int64_t column = (block - line * per_row) * {size};",
            "const int64_t first = line * columns + column;",
            f"const int64_t count = columns - column < {size} ? columns - column : {size};",
            "const int64_t pair = line * ((columns + 1) / 2) + column / 2, pairs = (count + 1) / 2;",
        ]
    else:
        loop = f"    for (int64_t first = begin; first < end; first += {body.longest}) {{"
        head = [f"const int64_t count = end - first < {body.longest} ? end - first : {body.longest};"]
    return [loop, *(line if line[0] == "#" else f"      {line}" for line in (*head, *statements)), "    }"]


def source(spec: KernelSpec, *, gaps: bool = True) -> str:
    """The translation unit of a spec; without `gaps` only for tensors whose memory has none."""
    parts = [spec.header("//", "C++"), PRELUDE.strip()]
    parts.append(number_function("gradient_scale_of", gradient_scale))
    parts += [BLOCKS_PRELUDE.strip()] if spec.has_blocks else []
    parts += format_functions(spec.storages.values())
    parts += random_functions(spec.draws.values()) if spec.draws else []
    if spec.program.slices.views:
        parts.append(SLICES_PRELUDE.strip())
    for index, (scalar_pass, tile) in enumerate(zip(spec.program.scalars, spec.program.tiles)):
        parts.append(scalar_function(spec, index, scalar_pass))
        parts += [slice_function(spec, slice_pass, gaps) for slice_pass in spec.program.slices_before(index)]
        if tile is not None:
            if tile.view:
                parts.append(slice_function(spec, tile, gaps))
            else:
                parts.append(_tile_function(spec, index, tile, gaps))
    return "\n\n".join(parts) + "\n"
