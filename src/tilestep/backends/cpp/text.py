"""How C++ says things: names that are free, operations, numbers, the statements of one element, storage formats."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

from ...graph import TilePass, Value, ancestors
from ...storage import BLOCK, Array, Codec, Storage, bits_graph, codec_of, dtype_name, keys_graph, read_arrays
from ..emit import Names, Writer
from ..spec import KernelSpec, describe

_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class compl
concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default delete do
double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable namespace
new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires return
short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try typedef
typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
linux typeof unix
"""

_AROUND = """
Launch Control bfloat16 float16 int16_t int32_t int64_t uint16_t uint32_t uint64_t std
read write to_bfloat16 to_float16 bits_of float_of select maximum minimum sign_of remainder_of locate gradient_scale_of
math_errhandling fused
launch tiles tile tile_pass scalar_pass t begin rest end row rows layout chunk chunk_end i at first stop
unscale inverse_scale skip same_as next_step hyper column
Slices View Cut Add Larger Smaller cut_of combine_parts combine_range base cut line matrix plain r slices view x
block count pair pairs columns per_row j low high walk run_of copied put_back largest_of unpack pack indices_of
offset_of ask_ahead random stream origin steps_taken stream_key_0 stream_key_1 key_0 key_1
"""

_RESERVED = frozenset((*_KEYWORDS.split(), *_AROUND.split()))

_MACRO_OR_SLOT = re.compile(
    r"[A-Z][A-Z0-9_].*|_[A-Z_].*|(join|keep|measure|split)_.*|(chunk|column|part|parts|random|row|slot|span|total)_[0-9]+|tap_.*"
)
"""What begins with capitals may be a macro (INFINITY, M_PIf64) or a control number; join, split, keep and
measure are functions of storage formats; numbered ones are reductions'."""


class CppNames(Names):
    """Hands out identifiers for a C++ function.

    Example:
        >>> names = CppNames(["param_array"])
        >>> [names.fresh(wanted) for wanted in ("update", "update", "new", "M_PI", "param_array", "\u03b2")]
        ['update', 'update_2', 'new_2', 'M_PI_', 'param_array_2', 'beta']
    """

    reserved, slots = _RESERVED, _MACRO_OR_SLOT


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
    "nibble": "int32_t({0})",
    "quotient": "({0} / {1})",
    "root": "std::sqrt({0})",
    "rough_ceiling": "std::ceil({0} / {1})",
    "fused": "fused({0}, {1}, {2})",
    "rough_root": "std::sqrt({0})",
    "float8_number": "{0}",
    "float8_element": "{0}",
    "within": "select(({0} < {1}), {0}, {1})",
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

    def element(self, array: Array) -> str:
        """The expression of an array's element."""
        return f"{array.name}_array[{self.index[array.name]}]"

    def load(self, name: str) -> str:
        """The expression of a buffer's value."""
        storage = self.spec.storages[name]
        function = "read" if codec_of(storage).is_element else f"join_{storage.title}"
        return f"{function}({', '.join(map(self.element, read_arrays(storage, name)))})"

    def store(self, name: str, value: str) -> str:
        """The statement that keeps a buffer's new value."""
        storage = self.spec.storages[name]
        function = "write" if codec_of(storage).is_plain else f"split_{storage.title}"
        elements = ", ".join(map(self.element, storage.arrays(name)))
        random = ""
        if name in self.spec.draws:
            place = f"offset_of(layout, i, {1 + len(self.spec.arrays)})" if self.is_strided else "i"
            index = f"origin + {place}"
            random = f", random_{self.spec.draws[name]}(key_0, key_1, int32_t({index}), int32_t(({index}) >> 32))"
        return f"{function}({elements}, {value}{random});"

    def emit(self) -> None:
        write_math(self.tile, self.writer, self.load, self.indent)
        for slot, reduction in self.tile.reductions:
            self.writer.lines.append(
                self.indent + accumulate(reduction, f"chunk_{slot}", self.writer[reduction.args[0]])
            )
        for name, value in self.tile.stores.items():
            self.writer.lines.append(self.indent + self.store(name, self.writer[value]))


def touches_blocks(spec: KernelSpec, tile: TilePass) -> bool:
    """Whether a pass reads or stores something in blocks."""
    return any(codec_of(spec.storages[name]).has_blocks for name in (*tile.reads(), *tile.stores))


def write_math(tile: TilePass, writer: Writer, load: Callable[[str], str], indent: str) -> None:
    """Write what a pass computes of one element, from the expressions of what it reads."""
    for value in tile.values():
        buffer = tile.loads.get(id(value))
        if buffer is None and value.operation == "load" and not tile.leaves(value):
            buffer = value.attribute
        if buffer is not None:
            writer.name(value, load(buffer), buffer)
    writer.write(tile.values())


class BlockBody:
    """Writes what a pass does with one block, in loops of exactly 128 over numbers of one width.

    A loop over codes of a byte and numbers of four computes as many numbers at once as a vector has bytes, and runs out
    of registers: so each buffer is made numbers in a loop of its own, and made codes in another. Blocks that are short
    or lie with gaps are copied, so that one loop does for all of them.

    writer: has spelled what a pass takes from others. clause: its loop's reductions, for OpenMP. rest: writes what else
    it does with an element `i`; then the loop ends with a short block.
    """

    def __init__(
        self,
        spec: KernelSpec,
        tile: TilePass,
        writer: Writer,
        unscales: bool,
        clause: str,
        rest: Callable[[Writer, str], None] | None = None,
    ) -> None:
        self.spec, self.tile, self.writer, self.unscales, self.clause = spec, tile, writer, unscales, clause
        self.rest = rest
        self.storages = {name: spec.storages[name] for name in dict.fromkeys([*tile.reads(), *tile.stores])}
        if unscales:
            self.storages.setdefault("grad", spec.storages["grad"])
        self.arrays = [array for name, storage in self.storages.items() for array in storage.arrays(name)]
        self.kept = [name for name in tile.stores if codec_of(self.storages[name]).has_blocks]
        self.written = [a for name in tile.stores for a in self.storages[name].arrays(name) if a.elements < BLOCK]

    def lines(self) -> list[str]:
        """All statements of a block."""
        lines = [line for array in self.arrays for line in self._begin(array)]
        lines += [f"float {name}_values[{BLOCK}];" for name in self.storages if not self._is_direct(name)]
        lines += self._indices()
        lines += [line for name in self.tile.reads() if not self._is_direct(name) for line in self._join(name)]
        lines += self._math()
        apart = [name for name in self.tile.stores if not self._is_direct(name) and name not in self.kept]
        lines += [line for name in apart for line in self._split(name)]
        if self.unscales:
            unscaled = _each("write(grad_run[j], read(grad_run[j]) * inverse_scale);")
            back = [f"  {self._back(self.spec.grad)}"]
            lines += ["if (unscale) {", *(line if line[0] == "#" else f"  {line}" for line in unscaled), *back, "}"]
        lines += [line for name in self.kept for line in self._keep(name)]
        return [*lines, *map(self._back, self.written)]

    def _is_direct(self, name: str) -> bool:
        """Whether a buffer's elements are the numbers that are computed with."""
        storage = self.spec.storages[name]
        return codec_of(storage).is_plain and storage.arrays(name)[0].dtype is self.spec.compute

    def _at(self, array: Array) -> str:
        """Where an array's part of the block is: the arguments of `run_of` and `put_back` behind the arrays."""
        position = [self.spec.grad, *self.spec.arrays].index(array)
        return "nullptr, pair, pairs, 0" if array.elements == 2 else f"layout, first, count, {position}"

    def _begin(self, array: Array) -> list[str]:
        kind, name = C_TYPES[dtype_name(array.dtype)], array.name
        if array.elements == BLOCK:
            is_read = any(array in read_arrays(self.storages[read], read) for read in self.tile.reads())
            return [f"const {kind} {name}_entry = {name}_array[block];"] if is_read else []
        run = f"auto* {name}_run = run_of({name}_array, {name}_spare, {self._at(array)});"
        size = BLOCK // array.elements
        return [f"{kind} {name}_spare[{size}];", run, f"ask_ahead<{size}>({name}_run, 0);"]

    def _back(self, array: Array) -> str:
        name = array.name
        return f"if ({name}_run == {name}_spare) put_back({name}_array, {name}_spare, {self._at(array)});"

    def _indices(self) -> list[str]:
        if not self.spec.draws_in(self.tile):
            return []
        indices = f"indices_of(low, high, origin, layout, first, count, {1 + len(self.spec.arrays)});"
        return [f"int32_t low[{BLOCK}], high[{BLOCK}];", indices]

    def _random(self, name: str) -> str:
        return f", random_{self.spec.draws[name]}(key_0, key_1, low[j], high[j])" if name in self.spec.draws else ""

    def _join(self, name: str) -> list[str]:
        storage, elements, lines = self.storages[name], [], []
        for array in read_arrays(storage, name):
            if array.elements == 2:
                lines += [f"uint8_t {array.name}_codes[{BLOCK}];", f"unpack({array.name}_codes, {array.name}_run);"]
            element = {BLOCK: "entry", 2: "codes[j]"}.get(array.elements, "run[j]")
            elements.append(f"{array.name}_{element}")
        function = "read" if codec_of(storage).is_element else f"join_{storage.title}"
        return [*lines, *_each(f"{name}_values[j] = {function}({', '.join(elements)});")]

    def _math(self) -> list[str]:
        scalar, inner = scalar_type(self.spec), self.writer

        def load(name: str) -> str:
            return f"read({name}_run[j])" if self._is_direct(name) else f"{name}_values[j]"

        write_math(self.tile, inner, load, "  ")
        for slot, reduction in self.tile.reductions:
            term = inner[reduction.args[0]]
            if self.rest is None:
                term = f"select(j < count, {scalar}({term}), {scalar}({neutral(reduction)}))"
            inner.lines.append("  " + accumulate(reduction, f"chunk_{slot}", term))
        for name, value in self.tile.stores.items():
            number = inner[value]
            direct = self._is_direct(name)
            inner.lines.append(f"  write({name}_run[j], {number});" if direct else f"  {name}_values[j] = {number};")
            if name in self.kept:
                inner.lines += [
                    f"  const uint32_t {name}_size = measure_{self.storages[name].title}({name}_values[j]);",
                    f"  {name}_largest = {name}_size > {name}_largest ? {name}_size : {name}_largest;",
                ]
        head = [f"{_EACH} {{"]
        if self.rest is not None:
            self.rest(inner, "  ")
            head = ["for (int64_t j = 0; j < count; ++j) {", "  const int64_t i = first + j;"]
        largest = "".join(f" reduction(max : {name}_largest)" for name in self.kept)
        sizes = [f"uint32_t {name}_largest = 0;" for name in self.kept]
        return [*sizes, f"#pragma omp simd{self.clause}{largest}", *head, *inner.lines, "}"]

    def _split(self, name: str) -> list[str]:
        storage = self.storages[name]
        function = "write" if codec_of(storage).is_plain else f"split_{storage.title}"
        elements = ", ".join(f"{array.name}_run[j]" for array in storage.arrays(name))
        return _each(f"{function}({elements}, {name}_values[j]{self._random(name)});")

    def _keep(self, name: str) -> list[str]:
        """The scales of a block, and its elements over them."""
        storage = self.storages[name]
        arrays = storage.arrays(name)
        scales = [array for array in arrays if array.elements == BLOCK]
        of_block = ", ".join(f"{array.name}_kept" for array in scales)
        (codes,) = [array for array in arrays if array.elements != BLOCK]
        target = f"{codes.name}_{'kept' if codes.elements == 2 else 'run'}"
        return [
            *(f"{C_TYPES[dtype_name(scale.dtype)]} {scale.name}_kept;" for scale in scales),
            f"if (count < {BLOCK}) {name}_largest = largest_of({name}_values, count, measure_{storage.title});",
            f"keep_{storage.title}({of_block}, {name}_largest);",
            *(f"{scale.name}_array[block] = {scale.name}_kept;" for scale in scales),
            *([f"uint8_t {target}[{BLOCK}];"] if codes.elements == 2 else []),
            *_each(f"{target}[j] = split_{storage.title}({of_block}, {name}_values[j]{self._random(name)});"),
            *([f"pack({codes.name}_run, {target});"] if codes.elements == 2 else []),
        ]


_EACH = f"for (int64_t j = 0; j < {BLOCK}; ++j)"


def _each(statement: str) -> list[str]:
    """A statement for each element of a block."""
    return ["#pragma omp simd", f"{_EACH} {statement}"]


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
    suffixes = (
        ("array", "spare", "run", "values", "codes", "entry", "kept", "size", "largest")
        if spec.has_blocks
        else ("array",)
    )
    names = CppNames(f"{array.name}_{suffix}" for array in [spec.grad, *spec.arrays] for suffix in suffixes)
    scalars = writer_of(scalar_type(spec), "    ", names)
    for value in tile.values():
        if tile.leaves(value) and value.operation != "constant" and id(value) in spec.program.columns:
            name = scalars.name(value, f"row[{spec.program.columns[id(value)]}]", value.name or describe(value))
            if value.is_bool:
                scalars.bind(value, f"({name} != 0)")
    return scalars


def arrays_of(spec: KernelSpec, tile: TilePass, unscales: bool) -> list[Array]:
    """The arrays that a tile pass touches, in the order of the address table."""
    used = {array.name for name in (*tile.reads(), *tile.stores) for array in spec.storages[name].arrays(name)}
    used |= {spec.grad.name} if unscales else set()
    return [array for array in (spec.grad, *spec.arrays) if array.name in used]


def array_lines(spec: KernelSpec, tile: TilePass, unscales: bool) -> list[str]:
    """Pointers to the arrays that a tile pass touches, and what it takes to leave gradients without loss scale."""
    written = {array.name for name in tile.stores for array in spec.storages[name].arrays(name)}
    used = arrays_of(spec, tile, unscales)
    lines = []
    if unscales:
        written.add(spec.grad.name)
        lines.append("    const bool unscale = launch->control[UNSCALE] != 0;")
        lines.append(f"    const {scalar_type(spec)} inverse_scale = launch->control[INVERSE_SCALE];")
    for position, array in enumerate([spec.grad, *spec.arrays]):
        if array not in used:
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


def format_functions(storages: Iterable[Storage]) -> list[str]:
    """The functions of all formats that are more than one array of one dtype, `join_<title>` and `split_<title>`; with
    blocks also `measure_<title>` and `keep_<title>`."""
    chosen = {storage.title: codec_of(storage) for storage in storages if not codec_of(storage).is_plain}
    return [text for title, codec in chosen.items() for text in _functions(title, codec)]


def _functions(title: str, codec: Codec) -> list[str]:
    if codec.largest is None:
        return [*([] if codec.is_element else [_join(title, codec)]), _split(title, codec)]
    return [_join(title, codec), *_split_blocks(title, codec, codec.largest)]


def _written(roots: Iterable[Value], bound: Sequence[tuple[Value, str]] = ()) -> Writer:
    """A writer that has written a format's graph in statements; some of its values are there already."""
    writer = writer_of("float", "  ", CppNames(["number", "largest", "stored_scale"]))
    for value, name in bound:
        writer.bind(value, name)
    values = _needed(roots, {id(value) for value, _ in bound})
    for value in values:
        if value.operation == "load" and id(value) not in writer.expressions:
            writer.bind(value, value.attribute)
    writer.write(values)
    return writer


def _needed(roots: Iterable[Value], given: set[int]) -> list[Value]:
    """The roots and what they depend on, down to what is given."""
    chosen: set[int] = set()
    stack = list(roots)
    listed = ancestors(stack)
    while stack:
        value = stack.pop()
        if id(value) not in chosen:
            chosen.add(id(value))
            stack += [] if id(value) in given else value.args
    return [value for value in listed if id(value) in chosen]


def _format_constant(array: Array) -> str:
    return f"const {C_TYPES[dtype_name(array.dtype)]}& {array.name}"


def _join(title: str, codec: Codec) -> str:
    writer = _written([codec.loaded])
    parameters = [_format_constant(codec.arrays[place]) for place in codec.reads]
    body = [*writer.lines, f"  return {writer[codec.loaded]};"]
    return "\n".join([f"inline float join_{title}({', '.join(parameters)}) {{", *body, "}"])


def _split(title: str, codec: Codec) -> str:
    writer = _written(codec.stored)
    parameters = ", ".join(f"{C_TYPES[dtype_name(array.dtype)]}& {array.name}" for array in codec.arrays)
    body = list(writer.lines)
    for array, value in zip(codec.arrays, codec.stored):
        body.append(_assignment(array, writer[value]))
    return "\n".join([f"inline void split_{title}({parameters}, float number{_random(codec)}) {{", *body, "}"])


def _random(codec: Codec) -> str:
    return ", int32_t random" if codec.is_random else ""


def random_functions(slots: Iterable[int]) -> list[str]:
    """What makes random bits: the keys of a tensor at a step, and the bits of an element for each of these slots."""
    heads = {
        f"stream_key_{place}(int32_t low, int32_t high, int32_t count)": key for place, key in enumerate(keys_graph())
    }
    heads.update(
        {f"random_{slot}(int32_t key_0, int32_t key_1, int32_t low, int32_t high)": bits_graph(slot) for slot in slots}
    )
    functions = []
    for head, root in heads.items():
        writer = _written([root])
        functions.append("\n".join([f"inline int32_t {head} {{", *writer.lines, f"  return {writer[root]};", "}"]))
    return functions


def _assignment(array: Array, element: str) -> str:
    # Of a type with bits these alone: GCC does not vectorize the copy of a structure.
    bits = ".bits" if array.dtype.is_floating_point and array.dtype.itemsize == 2 else ""
    return f"  {array.name}{bits} = {element}{bits};"


def _split_blocks(title: str, codec: Codec, largest: Value) -> list[str]:
    (measured,) = largest.args
    measure = _written([measured])
    stored = list(zip(codec.arrays, codec.stored))
    of_block = [(array, value) for array, value in stored if array.elements == BLOCK]
    keep = _written([value for _, value in of_block], [(largest, "largest")])
    parameters = ", ".join(f"{C_TYPES[dtype_name(array.dtype)]}& {array.name}" for array, _ in of_block)
    lines = [*keep.lines, *(_assignment(array, keep[value]) for array, value in of_block)]
    functions = [
        "\n".join([f"inline {head} {{", *body, "}"])
        for head, body in (
            (f"uint32_t measure_{title}(float number)", [*measure.lines, f"  return {measure[measured]};"]),
            (f"void keep_{title}({parameters}, int32_t largest)", lines),
        )
    ]
    (value,) = [value for array, value in stored if array.elements != BLOCK]
    value = value.args[0] if value.operation == "pack" else value
    split = _written([value], [(value, array.name) for array, value in of_block])
    kind = C_TYPES[value.dtype]
    parameters = ", ".join(_format_constant(array) for array, _ in of_block)
    head = f"inline {kind} split_{title}({parameters}, float number{_random(codec)}) {{"
    functions.append("\n".join([head, *split.lines, f"  return {split[value]};", "}"]))
    return functions
