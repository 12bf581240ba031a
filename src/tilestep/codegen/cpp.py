"""The C++ backend: a program as one translation unit, scalar passes and tile passes as functions."""

from __future__ import annotations

from ..graph import TilePass
from ..storage import BLOCK
from .cpp_formats import format_functions, random_functions
from .cpp_scalars import GRADIENT_SCALE, scalar_function
from .cpp_slices import slice_function
from .cpp_slices_support import SLICES_PRELUDE
from .cpp_support import PRELUDE
from .cpp_taps import TapText
from .cpp_text import (
    COMBINERS,
    TILES_OF_TENSORS,
    TileBody,
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
from .taps import taps_of

_CHUNK = 1024
"""Elements summed in the compute type before they are added to a float64 sum."""


def _tile_function(spec: KernelSpec, index: int, tile: TilePass) -> str:
    scalar = scalar_type(spec)
    columns = max(len(spec.program.columns), 1)
    unscales = index == spec.program.unscaling_pass
    found = taps_of(spec, tile)
    taps = TapText(found) if found is not None else None
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


def _layout_line(spec: KernelSpec) -> str:
    return f"      const int64_t* layout = launch->layouts + launch->layout_index[t] * {layout_width(spec)};"


def _located(spec: KernelSpec) -> list[str]:
    arrays = 1 + len(spec.arrays)
    return [f"          int64_t at[{arrays}];", f"          locate(layout, i, {arrays}, at);"]


def _skipped_loop(spec: KernelSpec, scalars: Writer, taps: TapText, strided: bool) -> list[str]:
    """What a skipped step measures: the gradient, and what is kept."""
    inner = writer_of(scalar_type(spec), "          ", scalars.names.within())
    body = TileBody(spec, taps.tile, inner, strided, "          ")
    inner.lines += taps.loads(body, {})
    lines = [_layout_line(spec)] if strided else []
    lines.append(f"      for (int64_t chunk = begin; chunk < end; chunk += {_CHUNK}) {{")
    lines.append(f"        const int64_t chunk_end = chunk + {_CHUNK} < end ? chunk + {_CHUNK} : end;")
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
    lines = _blocks() if spec.has_blocks else _chunks()
    for slot, reduction in tile.reductions:
        lines.append(f"        {scalar} chunk_{slot} = {neutral(reduction)};")
    lines += body.entries("        ")
    for name in body.kept_in_blocks():
        lines.append(f"        float {name}_of_block[{BLOCK}];")
        lines.append(f"        uint32_t {name}_largest = 0;")
        clause += f" reduction(max : {name}_largest)"
    lines += taps.chunk_lines(scalar) if taps is not None else []
    if not strided:
        lines.append(f"#pragma omp simd{clause}{taps.clause if taps is not None else ''}")
    if spec.has_blocks:
        lines += ["        for (int64_t j = 0; j < count; ++j) {", "          const int64_t i = first + j;"]
    else:
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
    lines += body.keep_blocks("        ", strided)
    lines.append("      }")
    return lines


def _chunks() -> list[str]:
    """The head of the loop over the chunks of a tile."""
    return [
        f"      for (int64_t chunk = begin; chunk < end; chunk += {_CHUNK}) {{",
        f"        const int64_t chunk_end = chunk + {_CHUNK} < end ? chunk + {_CHUNK} : end;",
    ]


def _blocks() -> list[str]:
    """The head of the loop over the blocks of a tile, each of which is a chunk: tiles count as if none were short."""
    return [
        f"      for (int64_t block = begin / {BLOCK}; block * {BLOCK} < end; ++block) {{",
        "        const int64_t line = block / per_row;",
        f"        const int64_t column = (block - line * per_row) * {BLOCK};",
        "        const int64_t first = line * columns + column;",
        f"        const int64_t count = columns - column < {BLOCK} ? columns - column : {BLOCK};",
        "        const int64_t chunk = first, chunk_end = first + count;",
        "        const int64_t pair = line * ((columns + 1) / 2) + column / 2;",
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
    parts += format_functions(spec.storages.values())
    parts += random_functions(spec.draws.values()) if spec.draws else []
    if spec.program.slices.views:
        parts.append(SLICES_PRELUDE.strip())
    for index, (scalar_pass, tile) in enumerate(zip(spec.program.scalars, spec.program.tiles)):
        parts.append(scalar_function(spec, index, scalar_pass))
        parts += [slice_function(spec, here) for here in spec.program.slices_before(index)]
        if tile is not None:
            parts.append(slice_function(spec, tile) if tile.view else _tile_function(spec, index, tile))
    return "\n\n".join(parts) + "\n"
