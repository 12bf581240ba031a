"""C++ text: free names, operations, constants, the statements of an element, storage formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...graph import TilePass, Value
from ...kernels.spec import KernelSpec, describe
from ...storage import BLOCK, Array, Codec, Storage, bits_graph, codec_of, keys_graph
from ..decision import graph_of
from ..emit import SIGNS, Names, Writer, code, nested

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
read write to_bfloat16 to_float16 bits_of float_of select maximum minimum sign_of remainder_of gradient_scale_of
math_errhandling fused log_gamma smaller_of larger_of first_above
launch tiles tile tile_pass scalar_pass t begin rest end row rows layout i first stop copies mark
unscale inverse_scale skip skips same_as next_step hyper column
Slices View Cut Add Larger Smaller total_of cut_of combine_parts combine_range base cut line matrix plain r slices
view x block count pair pairs columns per_row j low high walk run_of copied put_back largest_of unpack pack indices_of
ask_ahead random stream origin steps_taken stream_key_0 stream_key_1 key_0 key_1
"""

CppNames = partial(
    Names,
    reserved=(*_KEYWORDS.split(), *_AROUND.split()),
    slots=r"[A-Z][A-Z0-9_].*|_[A-Z_].*|(join|keep|measure|split)_.*|(chunk|column|part|parts|random|row|slot|span|total)_[0-9]+|(report|seen)_.*",
)
"""Makes unique identifiers for a C++ function.

A name that begins with capitals may be a macro (INFINITY, M_PIf64) or a control number; join, split, keep and measure
are functions of storage formats; numbered names belong to reductions.
"""

_OF_NAMES = {
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
C_TYPES: dict[Any, str] = {**_OF_NAMES, **{getattr(torch, name): kind for name, kind in _OF_NAMES.items()}}
"""C++ types by dtype and by its name."""

_STANDARD = """
exp exp2 expm1 log log2 log1p log10 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc
sqrt floor ceil trunc
"""
"""Functions of one number that the standard library has under the operation's name."""

SPELLING = {
    **{name: f"({{0}} {sign} {{1}})" for name, sign in {**SIGNS, "div": "/", "quotient": "/"}.items()},
    **{name: f"std::{name}({{0}})" for name in _STANDARD.split()},
    **{name: f"std::{name}({{0}}, {{1}})" for name in ("pow", "fmod", "atan2", "copysign")},
    **{f"{name} int32": f"int32_t(uint32_t({{0}}) {SIGNS[name]} uint32_t({{1}}))" for name in ("add", "sub", "mul")},
    **{f"of_bits to {name}": f"{name}{{{{static_cast<uint16_t>({{0}})}}}}" for name in ("bfloat16", "float16")},
    **{
        f"of_bits to {name}": f"static_cast<{C_TYPES[name]}>({{0}})"
        for name in ("int16", "int8", "uint8", "float8_e4m3fn")
    },
    "shift_left": "int32_t(uint32_t({0}) << {1})",
    "remainder": "remainder_of({0}, {1})",
    **{name: f"{name}({{0}}, {{1}})" for name in ("maximum", "minimum")},
    "neg": "(-{0})",
    "abs": "std::fabs({0})",
    "rsqrt": "(1 / std::sqrt({0}))",
    "lgamma": "log_gamma({0})",
    "sign": "sign_of({0})",
    "round": "std::nearbyint({0})",
    "number": "number({0})",
    "where": "select({0}, {1}, {2})",
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
    "whole": "static_cast<int32_t>({0})",
    "real": "static_cast<float>({0})",
    "nibble": "int32_t({0})",
    **{name: "std::sqrt({0})" for name in ("root", "rough_root")},
    "rough_ceiling": "std::ceil({0} / {1})",
    "fused": "fused({0}, {1}, {2})",
    **{name: "{0}" for name in ("float8_number", "float8_element")},
    "within": "select(({0} < {1}), {0}, {1})",
}


class CppWriter(Writer):
    """Writes C++ statements."""

    def __init__(self, kind: str, names: Names) -> None:
        super().__init__(kind, names, {**SPELLING, "number": f"{kind}({{0}})"})

    def declare(self, name: str, expression: str, value: Value) -> str:
        from_row = expression.startswith("row[")
        kind = C_TYPES[value.dtype] if value.dtype else "bool" if value.is_bool and not from_row else self.kind
        return f"const {kind} {name} = {expression};"

    def constant(self, number: float | bool) -> str:
        if isinstance(number, bool):
            return "true" if number else "false"
        if isinstance(number, int):
            return f"int32_t({number})"
        if math.isnan(number):
            return f"{self.kind}(NAN)"
        if math.isinf(number):
            return f"{self.kind}({'-' if number < 0 else ''}INFINITY)"
        return f"{self.kind}({number!r})"


NEUTRALS = {"reduce_sum": "0", "reduce_amax": "-INFINITY", "reduce_amin": "INFINITY"}
"""The values of reductions of nothing."""

_COMBINERS = {"reduce_sum": "+", "reduce_amax": "maximum_of_all", "reduce_amin": "minimum_of_all"}
"""OpenMP's names for reductions; its own max and min lose a NaN."""

OPERATIONS = {"reduce_sum": "Add", "reduce_amax": "Larger", "reduce_amin": "Smaller"}
"""The structures that combine float64 totals."""


def accumulate(reduction: Value, total: str, expression: str) -> str:
    """The statement that accumulates an element into a reduction, in the compute type."""
    if reduction.operation == "reduce_sum":
        return f"{total} += {expression};"
    return f"{total} = {'maximum' if reduction.operation == 'reduce_amax' else 'minimum'}({total}, {expression});"


@dataclass(frozen=True)
class Reduced:
    """A reduction over the elements of tensors: a run in the compute type, a tile and a tensor in float64."""

    reduction: Value
    slot: int  # its column in the tables of partial results and totals
    width: int  # of these tables
    prefix: str = ""  # of their names

    @property
    def chunk(self) -> str:
        """The variable of a run."""
        return f"{self.prefix}chunk_{self.slot}"

    @property
    def part(self) -> str:
        """The variable of a tile."""
        return f"{self.prefix}part_{self.slot}"

    @property
    def combined(self) -> str:
        """The statement that adds a run to a tile."""
        chunk = self.chunk if self.reduction.operation == "reduce_sum" else f"double({self.chunk})"
        return accumulate(self.reduction, self.part, chunk)

    @property
    def partial(self) -> str:
        """The statement that writes a tile's result."""
        return f"launch->{self.prefix}partials[tile * {self.width} + {self.slot}] = {self.part};"

    @property
    def total(self) -> str:
        """The statement that combines the results of a tensor's tiles."""
        tiles = f"launch->{self.prefix}partials + {self.slot}, {self.width}, first, stop"
        total = f"total_of<{OPERATIONS[self.reduction.operation]}>({tiles})"
        return f"launch->{self.prefix}sums[t * {self.width} + {self.slot}] = {total};"


def clause_of(reductions: Mapping[str, Value]) -> str:
    """The reductions of a run's loop by their variables, for OpenMP."""
    return "".join(f" reduction({_COMBINERS[one.operation]} : {name})" for name, one in reductions.items())


def layout_line(spec: KernelSpec, gaps: bool) -> str:
    """The statement that reads the layout of a tensor with gaps, if there are such tensors."""
    width = f"(1 + MAX_DIMS * {2 + len(spec.arrays) + bool(spec.draws)})"
    row = f"launch->layout_index[t] < 0 ? nullptr : launch->layouts + launch->layout_index[t] * {width}"
    return f"const int64_t* layout = {row if gaps else 'nullptr'};"


def scalars_of(spec: KernelSpec, tile: TilePass) -> Writer:
    """A writer with the numbers of scalar passes that a tile pass uses, each in a variable."""
    suffixes = ("array", "spare", "run", "values", "codes", "entry", "kept", "size", "largest")
    buffers = dict.fromkeys([*(array.name for array in [spec.grad, *spec.arrays]), *spec.storages])
    names = CppNames(f"{buffer}_{suffix}" for buffer in buffers for suffix in suffixes)
    scalars = CppWriter(C_TYPES[spec.compute], names)
    for value in tile.values():
        if tile.leaves(value) and value.operation != "constant" and id(value) in spec.program.columns:
            name = scalars.name(value, f"row[{spec.program.columns[id(value)]}]", value.name or describe(value))
            if value.is_bool:
                scalars.bind(value, f"({name} != 0)")
    return scalars


def first_lines(spec: KernelSpec, tile: TilePass, scalars: Writer) -> list[str]:
    """The first statements on a tile: numbers of its tensor, those that take the loss scale off gradients, pointers to
    its arrays, keys of its random bits at this step, and the index of its first element in the full tensor."""
    written = {array.name for name in tile.stores for array in spec.storages[name].arrays(name)}
    lines = list(scalars.lines)
    if spec.program.unscales(tile):
        written.add(spec.grad.name)
        lines.append("const bool unscale = launch->control[UNSCALE] != 0;")
        lines.append(f"const {C_TYPES[spec.compute]} inverse_scale = launch->control[INVERSE_SCALE];")
    for place, array in spec.touched(tile):
        kind = ("" if array.name in written else "const ") + C_TYPES[array.dtype]
        address = f"addresses[{place - 1} * launch->tensors + t]" if place else "grads[t]"
        lines.append(f"{kind}* __restrict {array.name}_array = reinterpret_cast<{kind}*>(launch->{address});")
    if not spec.draws_in(tile):
        return lines
    halves = "int32_t(stream), int32_t(stream >> 32), steps_taken"
    return [
        *lines,
        "const int64_t stream = launch->streams[t * 2], origin = launch->streams[t * 2 + 1];",
        f"const int32_t steps_taken = static_cast<int32_t>(launch->step[t]) + {spec.steps_later(tile)};",
        *(f"const int32_t key_{place} = stream_key_{place}({halves});" for place in (0, 1)),
    ]


def over_tensors(statements: Iterable[str]) -> list[str]:
    """A loop over tensors that have gradients."""
    return code(f"""
        #pragma omp parallel for schedule(static) num_threads(launch->threads)
        for (int64_t t = 0; t < launch->tensors; ++t) {{
          if (launch->grads[t] == 0) continue;
          {nested(statements)}
        }}
    """)


def format_functions(storages: Iterable[Storage]) -> list[list[str]]:
    """The functions of all formats that are more than one array of one dtype, `join_<title>` and `split_<title>`; with
    blocks also `measure_<title>` and `keep_<title>`."""
    chosen = {storage.title: codec_of(storage) for storage in storages if not codec_of(storage).is_plain}
    return [text for title, codec in chosen.items() for text in _functions(title, codec)]


def _functions(title: str, codec: Codec) -> Iterator[list[str]]:
    if not codec.is_element:
        read = _parameters([codec.arrays[place] for place in codec.reads], "const ")
        yield _function(f"float join_{title}({read})", [codec.loaded])
    random = ", int32_t random" if codec.is_random else ""
    if codec.largest is None:
        head = f"void split_{title}({_parameters(codec.arrays)}, float number{random})"
        yield _function(head, codec.stored, codec.arrays)
        return
    yield _function(f"uint32_t measure_{title}(float number)", codec.largest.args)
    of_block = {array: value for array, value in zip(codec.arrays, codec.stored) if array.elements == BLOCK}
    head = f"void keep_{title}({_parameters(of_block)}, int32_t largest)"
    yield _function(head, list(of_block.values()), list(of_block), {id(codec.largest): "largest"})
    (value,) = [value for array, value in zip(codec.arrays, codec.stored) if array not in of_block]
    value = value.args[0] if value.operation == "pack" else value
    head = f"{C_TYPES[value.dtype]} split_{title}({_parameters(of_block, 'const ')}, float number{random})"
    yield _function(head, [value], bound={id(value): array.name for array, value in of_block.items()})


def _parameters(arrays: Iterable[Array], qualifier: str = "") -> str:
    return ", ".join(f"{qualifier}{C_TYPES[array.dtype]}& {array.name}" for array in arrays)


def number_function(name: str, function: Callable[..., Any]) -> list[str]:
    """A function of floats, as a function of float64 numbers."""
    parameters, result = graph_of(function)
    listed = ", ".join(f"double {parameter}" for parameter in parameters)
    return _function(f"double {name}({listed})", [result], kind="double")


def random_functions(slots: Iterable[int]) -> list[list[str]]:
    """Functions for random bits: the keys of a tensor at a step, and the bits of an element for each of these slots."""
    keys = {
        f"stream_key_{place}(int32_t low, int32_t high, int32_t count)": key for place, key in enumerate(keys_graph())
    }
    parameters = "int32_t key_0, int32_t key_1, int32_t low, int32_t high"
    bits = {f"random_{slot}({parameters})": bits_graph(slot) for slot in slots}
    return [_function(f"int32_t {head}", [root]) for head, root in {**keys, **bits}.items()]


def _function(
    head: str,
    roots: Sequence[Value],
    targets: Sequence[Array] = (),
    bound: Mapping[int, str] | None = None,
    kind: str = "float",
) -> list[str]:
    """A function that assigns values to its parameters `targets`, or returns the only one; values by identity that are
    parameters are `bound`."""
    writer = CppWriter(kind, CppNames(["number", "largest", "stored_scale"]))
    results = writer.write_graph(roots, bound)
    last = list(map(_assignment, targets, results)) or [f"return {results[0]};"]
    return code(f"""
        inline {head} {{
          {nested([*writer.lines, *last])}
        }}
    """)


def _assignment(array: Array, element: str) -> str:
    # Of a structure only its bits: GCC does not vectorize the copy of a structure.
    bits = ".bits" if array.dtype.is_floating_point and array.dtype.itemsize == 2 else ""
    return f"{array.name}{bits} = {element}{bits};"
