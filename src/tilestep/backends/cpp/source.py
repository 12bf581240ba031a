"""The C++ backend: a program as one translation unit; scalar, tile, row and column passes as functions."""

from __future__ import annotations

from ...graph import ScalarPass, TilePass, Value
from ...kernels.spec import KernelSpec, describe
from ...storage import BLOCK
from ..decision import gradient_scale
from ..emit import Writer, code, nested, write_scalars
from .runs import RunBody
from .support import BLOCKS_PRELUDE, PRELUDE, SLICES_PRELUDE
from .text import (
    C_TYPES,
    NEUTRALS,
    OPERATIONS,
    CppNames,
    CppWriter,
    accumulate,
    first_lines,
    format_functions,
    layout_line,
    number_function,
    over_tensors,
    random_functions,
    scalars_of,
)


def scalar_function(spec: KernelSpec, index: int, scalar_pass: ScalarPass) -> list[str]:
    columns, scalar = spec.columns, C_TYPES[spec.compute]
    writer = CppWriter("double", CppNames())
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
    needed = write_scalars(writer, spec, scalar_pass, places, states)
    per_tensor = any(value.level.name == "TENSOR" for value in needed)
    written, reductions = [column for column, _ in scalar_pass.rows], scalar_pass.global_reductions
    stores = [f"row[{column}] = {writer[value]};" for column, value in scalar_pass.rows]
    parts = {slot: f"launch->global_parts[t * {spec.global_count} + {slot}]" for slot, _ in reductions}
    stores += [f"{parts[slot]} = {writer[value.args[0]]};" for slot, value in reductions]
    # A tensor without a gradient adds nothing to reductions over all tensors.
    neutrals = {slot: "0" if value.operation == "global_sum" else "-INFINITY" for slot, value in reductions}
    if scalar_pass.is_last:
        stores += [f"if (!skip) {states[name]} = {writer[value]};" for name, value in scalar_pass.stores.items()]
        stores.append("launch->step[t] = next_step;")
    # Columns are those of the previous tensor; those of other passes may differ between tensors.
    copies = [f"row[{column}] = rows[same_as * {columns} + {column}];" for column in written]
    if len(written) == columns:
        copy = f"row[column] = rows[same_as * {columns} + column];"
        copies = [f"for (int64_t column = 0; column < {columns}; ++column) {copy}"]
    copies += ["launch->step[t] = next_step;"] if scalar_pass.is_last else []
    step = f"launch->step[same_as]{'' if scalar_pass.is_last else ' + (skip ? 0.0 : 1.0)'}"
    same = f"""
        if (same_as >= 0 && launch->group[t] == launch->group[same_as] &&
            {step} == next_step) {{
          {nested(copies)}
          continue;
        }}
        same_as = t;
    """
    is_shared = not per_tensor and not reductions and not scalar_pass.stores
    return code(f"""
        extern "C" void scalar_pass_{index}(const Launch* launch) {{
          const bool skip = launch->control[SKIP] != 0;
          {scalar}* rows = static_cast<{scalar}*>(launch->rows);
          int64_t same_as = -1;
          for (int64_t t = 0; t < launch->tensors; ++t) {{
            if (launch->grads[t] == 0) {{
              {nested(f"{parts[slot]} = {nothing};" for slot, nothing in neutrals.items())}
              continue;
            }}
            const double next_step = launch->step[t] + (skip ? 0.0 : 1.0);
            const double* hyper = launch->hyper + launch->group[t] * launch->hyper_count;
            {scalar}* row = rows + t * {columns};
            {nested([*(code(same) if is_shared else []), *writer.lines, *stores])}
          }}
        }}
    """)


def _scalar_state(spec: KernelSpec, name: str) -> str:
    """The array of a scalar state, with one number for each tensor."""
    position = spec.program.graph.scalar_states.index(name)
    return f"reinterpret_cast<{C_TYPES[spec.scalar_dtype(name)]}*>(launch->scalar_states[{position}])"


class _SlicePass:
    """Writes the function of a pass that reads, computes or works on slices."""

    def __init__(self, spec: KernelSpec, tile: TilePass, gaps: bool) -> None:
        assert tile.view is not None
        self.spec, self.tile, self.view, self.gaps = spec, tile, tile.view, gaps and tile.over is None
        self.slices, self.slots = spec.program.slices, spec.program.slices.slots
        self.scalar = C_TYPES[spec.compute]
        self.scalars = scalars_of(spec, tile)
        self.read = {self.slots[id(value)]: value for value in tile.slices()}
        self.row_parts, self.column_parts = tile.parts_of("row"), tile.parts_of("column")
        self.hoisted: dict[str, list[str]] = {"row": [], "matrix": [], "column": []}
        for slot, value in self.read.items():
            self._bind(slot, value)

    def _bind(self, slot: int, value: Value) -> None:
        """Bind a value from another pass: once per row, matrix or tile where it is constant."""
        place, array = self.tile.place(value), f"slot_{slot}"
        name = self.scalars.names.fresh(value.name or describe(value))
        if place == "column":
            pointer = f"const {self.scalar}* __restrict {name} = {array} + matrix * cut.columns;"
            self.hoisted[place].append(pointer)
            array = name
        index = {"row": "line", "matrix": "matrix", "own": "i", "column": "i - base"}
        span = f"i / span_{slot}[0] * span_{slot}[1] + i % span_{slot}[1]"
        element = f"{array}[{index.get(place, span)}]"
        spelled = f"({element} != 0)" if value.is_bool else element
        if place in ("row", "matrix"):
            self.hoisted[place].append(f"const {'bool' if value.is_bool else self.scalar} {name} = {spelled};")
            spelled = name
        self.scalars.bind(value, spelled)

    def function(self) -> list[str]:
        """The whole function."""
        index, columns = self.slices.views.index(self.view), self.spec.columns
        body = RunBody(self.spec, self.tile, self.scalars, gaps=self.gaps, rest=self._accumulate)
        finish = []
        for slot, reduction in self.tile.parts:
            along_rows = "true" if self.tile.place(reduction) == "row" else "false"
            operation = f"{self.scalar}, {OPERATIONS[reduction.operation]}"
            kind = self._kind(slot)
            finish.append(f"combine_parts<{operation}>(launch, slices, {index}, {kind}, {slot}, {along_rows});")
        if body.reduced:
            tile_range = "const int64_t first = view.first_tile[t], stop = first + view.tile_count[t];"
            finish += over_tensors([tile_range, *(one.total for one in body.reduced)])
        return code(f"""
            extern "C" void {self.tile.title}(const Launch* launch, const Slices* slices) {{
              if (launch->control[SKIP] != 0) return;
              const View& view = slices->views[{index}];
              #pragma omp parallel for schedule(dynamic) num_threads(launch->threads)
              for (int64_t tile = 0; tile < view.tiles; ++tile) {{
                const int64_t t = view.tile_tensor[tile];
                if (launch->grads[t] == 0) continue;
                const Cut cut = cut_of(view, t, tile - view.first_tile[t]);
                const {self.scalar}* row = static_cast<const {self.scalar}*>(launch->rows) + t * {columns};
                {nested([*first_lines(self.spec, self.tile, self.scalars), *self._slot_lines()])}
                {nested(f"double {one.part} = {NEUTRALS[one.reduction.operation]};" for one in body.reduced)}
                {layout_line(self.spec, self.gaps)}
                {nested(self._matrix_loop(body))}
                {nested(one.partial for one in body.reduced)}
              }}
              {nested(finish)}
            }}
        """)

    def _kind(self, slot: int) -> int:
        return self.slices.kinds.index(self.slices.overs[slot])

    def _slot_lines(self) -> list[str]:
        lines = []
        for slot in dict.fromkeys([*self.read, *(slot for slot, _ in self.tile.kept)]):
            is_kept = any(slot == kept for kept, _ in self.tile.kept)
            kind, start = (
                f"{'' if is_kept else 'const '}{self.scalar}",
                f"{self._kind(slot)} * (launch->tensors + 1) + t",
            )
            array = f"reinterpret_cast<{kind}*>(slices->slots[{slot}]) + slices->starts[{start}]"
            lines.append(f"{kind}* __restrict slot_{slot} = {array};")
        for slot, value in self.read.items():
            if self.tile.place(value) == "other":
                pair = self.slices.spans.index((self.tile.over, self.slices.overs[slot]))
                lines.append(f"const int64_t* span_{slot} = slices->spans + ({pair} * launch->tensors + t) * 2;")
        for slot, _ in self.tile.parts:
            array = f"reinterpret_cast<{self.scalar}*>(slices->parts[{slot}])"
            lines.append(f"{self.scalar}* __restrict parts_{slot} = {array};")
        return lines

    def _matrix_loop(self, body: RunBody) -> list[str]:
        parts = []
        for slot, reduction in self.column_parts:
            begin = "view.parts[t * 2 + 1] + (matrix * cut.row_tiles + cut.row_tile) * cut.columns"
            parts += [
                f"{self.scalar}* __restrict column_{slot} = parts_{slot} + {begin};",
                "for (int64_t x = cut.column_begin; x < cut.column_end; ++x)",
                f"  column_{slot}[x] = {NEUTRALS[reduction.operation]};",
            ]
        rows = [(f"row_{slot}", f"parts_{slot}", reduction) for slot, reduction in self.row_parts]
        place = "view.parts[t * 2] + line * cut.column_tiles + cut.column_tile"
        return code(f"""
            for (int64_t matrix = cut.matrix_begin; matrix < cut.matrix_end; ++matrix) {{
              {nested([*self.hoisted["matrix"], *self.hoisted["column"], *parts])}
              for (int64_t r = cut.row_begin; r < cut.row_end; ++r) {{
                const int64_t line = matrix * cut.rows + r;
                const int64_t base = line * cut.columns;
                {nested(self.hoisted["row"])}
                {nested(f"{self.scalar} {one.chunk} = {NEUTRALS[one.reduction.operation]};" for one in body.reduced)}
                {nested(f"{self.scalar} {name} = {NEUTRALS[reduction.operation]};" for name, _, reduction in rows)}
                {nested(self._run_loop(body))}
                {nested(one.combined for one in body.reduced)}
                {nested(f"{array}[{place}] = {name};" for name, array, _ in rows)}
              }}
            }}
        """)

    def _run_loop(self, body: RunBody) -> list[str]:
        """The loop over the runs of a tile's part of a row; only the last block of a row may be short."""
        if not body.in_blocks:
            return code(f"""
                {{
                  const int64_t first = base + cut.column_begin, count = cut.column_end - cut.column_begin;
                  {nested(body.lines())}
                }}
            """)
        return code(f"""
            for (int64_t column = cut.column_begin; column < cut.column_end; column += {BLOCK}) {{
              const int64_t first = base + column;
              const int64_t count = cut.column_end - column < {BLOCK} ? cut.column_end - column : {BLOCK};
              const int64_t block = line * ((cut.columns + {BLOCK - 1}) / {BLOCK}) + column / {BLOCK};
              const int64_t pair = line * ((cut.columns + 1) / 2) + column / 2, pairs = (count + 1) / 2;
              {nested(body.lines())}
            }}
        """)

    def _accumulate(self, inner: Writer) -> list[str]:
        places = [(f"row_{slot}", reduction) for slot, reduction in self.row_parts]
        places += [(f"column_{slot}[i - base]", reduction) for slot, reduction in self.column_parts]
        kept = [f"slot_{slot}[i] = {inner[value]};" for slot, value in self.tile.kept]
        return kept + [accumulate(reduction, place, inner[reduction.args[0]]) for place, reduction in places]


def _tile_function(spec: KernelSpec, index: int, tile: TilePass, gaps: bool) -> list[str]:
    scalar, columns, scalars = C_TYPES[spec.compute], spec.columns, scalars_of(spec, tile)
    body = RunBody(spec, tile, scalars, gaps=gaps)
    outputs, every, skips = body.outputs, [*body.reduced, *body.outputs.reported], "launch->control[SKIP] != 0"
    chunks = [f"{scalar} {one.chunk} = {NEUTRALS[one.reduction.operation]};" for one in every]
    parts = [one.combined for one in every]
    loop = _run_loop(body, [*chunks, *body.lines(), *parts])
    if outputs.reported:
        loop = code(f"""
            if (skips) {{
            {nested(_run_loop(body, [*chunks, *outputs.skipped(body), *parts]))}
            }} else {{
            {nested(loop)}
            }}
        """)
    blocks = f"""
        const int64_t columns = launch->columns[t];
        const int64_t per_row = (columns + {BLOCK - 1}) / {BLOCK};
    """
    tiles = """
        const int64_t first = launch->first_tile[t];
        const int64_t stop = first + (launch->numel[t] + launch->tile_size - 1) / launch->tile_size;
    """
    return code(f"""
        extern "C" void tile_pass_{index}(const Launch* launch) {{
          {f"const bool skips = {skips};" if outputs.reported else f"if ({skips}) return;"}
          #pragma omp parallel for schedule(static) num_threads(launch->threads)
          for (int64_t tile = 0; tile < launch->tiles; ++tile) {{
            const int64_t t = launch->tile_tensor[tile];
            if (launch->grads[t] == 0) continue;
            const int64_t begin = (tile - launch->first_tile[t]) * launch->tile_size;
            const int64_t rest = launch->numel[t] - begin;
            const int64_t end = begin + (rest < launch->tile_size ? rest : launch->tile_size);
            const {scalar}* row = static_cast<const {scalar}*>(launch->rows) + t * {columns};
            {nested([*(code(blocks) if spec.has_blocks else []), *first_lines(spec, tile, scalars)])}
            {nested(f"double {one.part} = {NEUTRALS[one.reduction.operation]};" for one in every)}
            {nested(outputs.tile_lines())}
            {layout_line(spec, gaps)}
            {nested([*loop, *(one.partial for one in every)])}
          }}
          {nested(over_tensors([*code(tiles), *(one.total for one in every)]) if every else [])}
        }}
    """)


def _run_loop(body: RunBody, statements: list[str]) -> list[str]:
    """The loop over the runs of a tile; tiles of blocks count short blocks as full ones."""
    size = body.size
    if not body.in_blocks:
        return code(f"""
            for (int64_t first = begin; first < end; first += {body.longest}) {{
              const int64_t count = end - first < {body.longest} ? end - first : {body.longest};
              {nested(statements)}
            }}
        """)
    return code(f"""
        for (int64_t block = begin / {size}; block * {size} < end; ++block) {{
          const int64_t line = block / per_row;
          const int64_t column = (block - line * per_row) * {size};
          const int64_t first = line * columns + column;
          const int64_t count = columns - column < {size} ? columns - column : {size};
          const int64_t pair = line * ((columns + 1) / 2) + column / 2, pairs = (count + 1) / 2;
          {nested(statements)}
        }}
    """)


def source(spec: KernelSpec, *, gaps: bool = True) -> str:
    """The translation unit of a spec; without `gaps` for tensors without gaps only."""
    functions = [
        *format_functions(spec.storages.values()),
        *(random_functions(spec.draws.values()) if spec.draws else ()),
    ]
    parts = [number_function("gradient_scale_of", gradient_scale)]
    parts += [[BLOCKS_PRELUDE.strip()]] if spec.has_blocks else []
    parts += [*functions, *([[SLICES_PRELUDE.strip()]] if spec.program.slices.views else [])]
    for index, scalar_pass in enumerate(spec.program.scalars):
        parts.append(scalar_function(spec, index, scalar_pass))
        for tile in spec.program.passes_of(index):
            by_slices = tile.view is not None
            parts.append(
                _SlicePass(spec, tile, gaps).function() if by_slices else _tile_function(spec, index, tile, gaps)
            )
    return "\n\n".join([spec.header("//", "C++"), PRELUDE.strip(), *map("\n".join, parts)]) + "\n"
