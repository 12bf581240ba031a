"""How C++ says things: operations, numbers, declarations, and the statements of one element."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..graph import TilePass, Value
from ..storage import BLOCK, Array, codec_of, dtype_name, read_arrays
from .cpp_names import CppNames
from .emit import Names, Writer
from .spec import KernelSpec
from .tidy import describe

C_TYPES = {
    "float32": "float",
    "float64": "double",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "uint8": "uint8_t",
    "float8_e4m3fn": "uint8_t",
}

SPELLING = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "pow": "std::pow({0}, {1})",
    "remainder": "remainder_of({0}, {1})",
    "fmod": "std::fmod({0}, {1})",
    "atan2": "std::atan2({0}, {1})",
    "copysign": "std::copysign({0}, {1})",
    "maximum": "maximum({0}, {1})",
    "minimum": "minimum({0}, {1})",
    "neg": "(-{0})",
    "abs": "std::fabs({0})",
    "sqrt": "std::sqrt({0})",
    "rsqrt": "(1 / std::sqrt({0}))",
    "exp": "std::exp({0})",
    "exp2": "std::exp2({0})",
    "expm1": "std::expm1({0})",
    "log": "std::log({0})",
    "log2": "std::log2({0})",
    "log1p": "std::log1p({0})",
    "sin": "std::sin({0})",
    "cos": "std::cos({0})",
    **{name: f"std::{name}({{0}})" for name in ("tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "log10")},
    **{name: f"std::{name}({{0}})" for name in ("asinh", "acosh", "atanh", "erfc")},
    "lgamma": "log_gamma({0})",
    "erf": "std::erf({0})",
    "sign": "sign_of({0})",
    "floor": "std::floor({0})",
    "ceil": "std::ceil({0})",
    "round": "std::nearbyint({0})",
    "trunc": "std::trunc({0})",
    "number": "number({0})",
    "where": "select({0}, {1}, {2})",
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "gt": "({0} > {1})",
    "ge": "({0} >= {1})",
    "eq": "({0} == {1})",
    "ne": "({0} != {1})",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
    "not": "(!{0})",
    "isnan": "({0} != {0})",
    "isinf": "(std::fabs({0}) == INFINITY)",
    "widen": "read({0})",
    "narrow to float32": "float({0})",
    "narrow to bfloat16": "to_bfloat16({0})",
    "narrow to float16": "to_float16({0})",
    "bits": "bits_of({0})",
    "of_bits to ": "float_of({0})",
    "of_bits to bfloat16": "bfloat16{{static_cast<uint16_t>({0})}}",
    "of_bits to float16": "float16{{static_cast<uint16_t>({0})}}",
    "of_bits to int16": "static_cast<int16_t>({0})",
    "of_bits to int8": "static_cast<int8_t>({0})",
    "of_bits to uint8": "static_cast<uint8_t>({0})",
    "whole": "static_cast<int32_t>({0})",
    "real": "static_cast<float>({0})",
    "add int32": "int32_t(uint32_t({0}) + uint32_t({1}))",
    "sub int32": "int32_t(uint32_t({0}) - uint32_t({1}))",
    "mul int32": "int32_t(uint32_t({0}) * uint32_t({1}))",
    "shift_left": "int32_t(uint32_t({0}) << {1})",
    "shift_right": "({0} >> {1})",
    "bit_and": "({0} & {1})",
    "bit_or": "({0} | {1})",
    "bit_xor": "({0} ^ {1})",
    "nibble": "((int32_t({0}) >> (is_odd * 4)) & 15)",
    "quotient": "({0} / {1})",
    "root": "std::sqrt({0})",
    "of_bits to float8_e4m3fn": "static_cast<uint8_t>({0})",
}


def _constant(scalar: str) -> Callable[[float | bool], str]:
    def spell(number: float | bool) -> str:
        if isinstance(number, bool):
            return "true" if number else "false"
        if isinstance(number, int):
            return f"int32_t({number})"
        if math.isnan(number):
            return f"{scalar}(NAN)"
        if math.isinf(number):
            return f"{scalar}({'-' if number < 0 else ''}INFINITY)"
        return f"{scalar}({number!r})"

    return spell


def scalar_type(spec: KernelSpec) -> str:
    """The C++ type that a spec computes in."""
    return C_TYPES[dtype_name(spec.compute)]


def writer_of(scalar: str, indent: str, names: Names) -> Writer:
    """A writer of C++ statements."""

    def declare(name: str, expression: str, value: Value) -> str:
        from_row = expression.startswith("row[")
        kind = C_TYPES[value.dtype] if value.dtype else "bool" if value.is_bool and not from_row else scalar
        return f"{indent}const {kind} {name} = {expression};"

    spelling = {**SPELLING, "number": f"{scalar}({{0}})"}
    return Writer(spelling, declare, _constant(scalar), names)


class TileBody:
    """Writes the statements of one element of a tile, the loads and stores of its buffers among them."""

    def __init__(self, spec: KernelSpec, tile: TilePass, writer: Writer, strided: bool, indent: str) -> None:
        self.spec, self.tile, self.writer, self.indent, self.is_strided = spec, tile, writer, indent, strided
        order = [spec.grad, *spec.arrays]
        self.index = {array.name: f"at[{position}]" if strided else "i" for position, array in enumerate(order)}
        self.index.update({array.name: "pair + j / 2" for array in order if array.elements == 2})

    def element(self, array: Array) -> str:
        """The expression of an array's element."""
        if array.elements == BLOCK:
            return f"{array.name}_entry"
        return f"{array.name}_array[{self.index[array.name]}]"

    def load(self, name: str) -> str:
        """The expression of a buffer's value."""
        storage = self.spec.storages[name]
        codec = codec_of(storage)
        function = "read" if codec.is_element else f"join_{storage.title}"
        is_odd = ["j & 1"] if codec.is_packed else []
        return f"{function}({', '.join([*map(self.element, read_arrays(storage, name)), *is_odd])})"

    def store(self, name: str, value: str) -> None:
        """Write the statement that keeps a buffer's new value; in blocks, that gets it ready."""
        storage = self.spec.storages[name]
        if codec_of(storage).has_blocks:
            self.writer.lines += [
                f"{self.indent}{name}_of_block[j] = {value};",
                f"{self.indent}const uint32_t {name}_size = measure_{storage.title}({name}_of_block[j]);",
                f"{self.indent}{name}_largest = {name}_size > {name}_largest ? {name}_size : {name}_largest;",
            ]
            return
        function = "write" if codec_of(storage).is_plain else f"split_{storage.title}"
        elements = ", ".join(map(self.element, storage.arrays(name)))
        self.writer.lines.append(f"{self.indent}{function}({elements}, {value}{self.random(name, 'i')});")

    def random(self, name: str, place: str) -> str:
        """A further argument: the random bits by which a buffer's element at this place of the tensor is rounded."""
        if name not in self.spec.draws:
            return ""
        index = f"offset_of(layout, {place}, {1 + len(self.spec.arrays)})" if self.is_strided else place
        return f", random_{self.spec.draws[name]}(key_0, key_1, origin + {index})"

    def entries(self, indent: str) -> list[str]:
        """Variables of what is read of a block: a store of bytes could change it in memory, as compilers see it."""
        read = {name for name in self.tile.reads() if codec_of(self.spec.storages[name]).has_blocks}
        arrays = [a for name in read for a in read_arrays(self.spec.storages[name], name) if a.elements == BLOCK]
        return [
            f"{indent}const {C_TYPES[dtype_name(array.dtype)]} {array.name}_entry = {array.name}_array[block];"
            for array in sorted(arrays, key=lambda array: array.name)
        ]

    def kept_in_blocks(self) -> list[str]:
        """Names of the buffers that this pass stores in blocks."""
        return [name for name in self.tile.stores if codec_of(self.spec.storages[name]).has_blocks]

    def keep_blocks(self, indent: str, strided: bool) -> list[str]:
        """The statements after the elements of a block: its scales, and the elements over them."""
        lines = []
        for name in self.kept_in_blocks():
            storage = self.spec.storages[name]
            arrays = storage.arrays(name)
            scales = [array for array in arrays if array.elements == BLOCK]
            of_block = ", ".join(f"{array.name}_kept" for array in scales)
            (array,) = [array for array in arrays if array.elements != BLOCK]
            for scale in scales:
                lines.append(f"{indent}{C_TYPES[dtype_name(scale.dtype)]} {scale.name}_kept;")
            lines.append(f"{indent}keep_{storage.title}({of_block}, {name}_largest);")
            lines += [f"{indent}{scale.name}_array[block] = {scale.name}_kept;" for scale in scales]
            if array.elements == 2:
                lines += [
                    f"{indent}if (count & 1) {name}_of_block[count] = 0;",
                    f"{indent}for (int64_t j = 0; j < count; j += 2)",
                    f"{indent}  {self.element(array)} = static_cast<uint8_t>("
                    f"split_{storage.title}({of_block}, {name}_of_block[j]{self.random(name, 'first + j')}) | "
                    f"split_{storage.title}({of_block}, {name}_of_block[j + 1]{self.random(name, 'first + j + 1')})"
                    " << 4);",
                ]
                continue
            lines += [] if strided else ["#pragma omp simd"]
            lines.append(f"{indent}for (int64_t j = 0; j < count; ++j) {{")
            if strided:
                lines += [f"{indent}  int64_t at[{1 + len(self.spec.arrays)}];"]
                lines += [f"{indent}  locate(layout, first + j, {1 + len(self.spec.arrays)}, at);"]
            else:
                lines.append(f"{indent}  const int64_t i = first + j;")
            code = f"split_{storage.title}({of_block}, {name}_of_block[j]{self.random(name, 'first + j')})"
            lines.append(f"{indent}  {self.element(array)} = {code};")
            lines.append(f"{indent}}}")
        return lines

    def emit(self) -> None:
        for value in self.tile.values():
            buffer = self.tile.loads.get(id(value))
            if buffer is None and value.operation == "load" and not self.tile.leaves(value):
                buffer = value.attribute
            if buffer is not None:
                self.writer.name(value, self.load(buffer), buffer)
        self.writer.write(self.tile.values())
        for slot, reduction in self.tile.reductions:
            self.writer.lines.append(
                self.indent + accumulate(reduction, f"chunk_{slot}", self.writer[reduction.args[0]])
            )
        for name, value in self.tile.stores.items():
            self.store(name, self.writer[value])


def accumulate(reduction: Value, total: str, expression: str) -> str:
    """The statement that takes an element into a reduction in the type computed in."""
    if reduction.operation == "reduce_sum":
        return f"{total} += {expression};"
    function = "maximum" if reduction.operation == "reduce_amax" else "minimum"
    return f"{total} = {function}({total}, {expression});"


COMBINERS = {"reduce_sum": "+", "reduce_amax": "maximum_of_all", "reduce_amin": "minimum_of_all"}
"""OpenMP's names for reductions; its own max and min lose a NaN."""


def neutral(reduction: Value) -> str:
    """What a reduction of nothing is."""
    return {"reduce_sum": "0", "reduce_amax": "-INFINITY", "reduce_amin": "INFINITY"}[reduction.operation]


def combine(reduction: Value, total: str, part: str) -> str:
    """The statement that adds a part of a reduction to its float64 total."""
    if reduction.operation == "reduce_sum":
        return f"{total} += {part};"
    function = "maximum" if reduction.operation == "reduce_amax" else "minimum"
    return f"{total} = {function}({total}, double({part}));"


def layout_width(spec: KernelSpec) -> str:
    """Entries of a row of the layout table."""
    return f"(1 + MAX_DIMS * {2 + len(spec.arrays) + bool(spec.draws)})"


def unscale_loop(spec: KernelSpec, strided: bool) -> list[str]:
    """Writes the gradients of a chunk back without the loss scale; in a loop of its own, they are in the cache."""
    at = f"{spec.grad.name}_array[{'at' if strided else 'i'}]"
    return [
        "        if (unscale) {",
        *([] if strided else ["#pragma omp simd"]),
        "          for (int64_t i = chunk; i < chunk_end; ++i) {",
        *(["            int64_t at;", "            locate(layout, i, 1, &at);"] if strided else []),
        f"            write({at}, read({at}) * inverse_scale);",
        "          }",
        "        }",
    ]


def scalars_of(spec: KernelSpec, tile: TilePass) -> Writer:
    """A writer that has read what a tile pass takes from the scalar passes, each in a variable of its own."""
    suffixes = ("array", "of_block", "largest", "size", "entry", "kept") if spec.has_blocks else ("array",)
    names = CppNames(f"{array.name}_{suffix}" for array in [spec.grad, *spec.arrays] for suffix in suffixes)
    scalars = writer_of(scalar_type(spec), "    ", names)
    for value in tile.values():
        if tile.leaves(value) and value.operation != "constant" and id(value) in spec.program.columns:
            name = scalars.name(value, f"row[{spec.program.columns[id(value)]}]", value.name or describe(value))
            if value.is_bool:
                scalars.bind(value, f"({name} != 0)")
    return scalars


def array_lines(spec: KernelSpec, tile: TilePass, unscales: bool) -> list[str]:
    """Pointers to the arrays that a tile pass touches, and what it takes to leave gradients without loss scale."""
    written = {array.name for name in tile.stores for array in spec.storages[name].arrays(name)}
    used = {array.name for name in tile.reads() for array in spec.storages[name].arrays(name)} | written
    lines = []
    if unscales:
        used.add(spec.grad.name)
        written.add(spec.grad.name)
        lines.append("    const bool unscale = launch->control[UNSCALE] != 0;")
        lines.append(f"    const {scalar_type(spec)} inverse_scale = launch->control[INVERSE_SCALE];")
    for position, array in enumerate([spec.grad, *spec.arrays]):
        if array.name not in used:
            continue
        c_type = ("" if array.name in written else "const ") + C_TYPES[dtype_name(array.dtype)]
        address = "launch->grads[t]" if position == 0 else f"launch->addresses[{position - 1} * launch->tensors + t]"
        lines.append(f"    {c_type}* __restrict {array.name}_array = reinterpret_cast<{c_type}*>({address});")
    return lines


def key_lines(spec: KernelSpec, tile: TilePass) -> list[str]:
    """The keys of a tensor's random bits at this step, and where what of it is here begins in the whole."""
    if not spec.draws_in(tile):
        return []
    # The last scalar pass has counted the step.
    later = int(tile.stage < len(spec.program.scalars) - 1)
    halves = "int32_t(stream), int32_t(stream >> 32), steps_taken"
    return [
        "    const int64_t stream = launch->streams[t * 2], origin = launch->streams[t * 2 + 1];",
        f"    const int32_t steps_taken = static_cast<int32_t>(launch->step[t]) + {later};",
        *(f"    const int32_t key_{place} = stream_key_{place}({halves});" for place in (0, 1)),
    ]


TILES_OF_TENSORS = (
    "#pragma omp parallel for schedule(static) num_threads(launch->threads)",
    "  for (int64_t t = 0; t < launch->tensors; ++t) {",
    "    if (launch->grads[t] == 0) continue;",
    "    const int64_t first = launch->first_tile[t];",
    "    const int64_t stop = first + (launch->numel[t] + launch->tile_size - 1) / launch->tile_size;",
)
"""A loop over tensors that take part, each with its tiles from `first` up to `stop`."""
