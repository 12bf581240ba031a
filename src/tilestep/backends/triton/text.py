"""Triton text: free names, operations, constants, loads and stores of a tile, storage formats."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...graph import SCALAR_LEVELS, TilePass, Value
from ...kernels.spec import KernelSpec
from ...storage import BLOCK, Array, Storage, bits_graph, codec_of, dtype_name, is_coarse, keys_graph, read_arrays
from ..decision import graph_of
from ..emit import SIGNS, Names, Writer, code, nested

_OF_THE_DEVICE = """
rsqrt exp exp2 expm1 log log2 log1p log10 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erfc lgamma trunc
"""

_OF_TWO = "maximum minimum quotient rough_ceiling float8_number float8_element"

SPELLING = {
    **{name: f"libdevice.{name}({{0}})" for name in _OF_THE_DEVICE.split()},
    **{name: f"({{0}} {sign} {{1}})" for name, sign in SIGNS.items()},
    **{name: f"{name}({{0}})" for name in ("sign", "block_max", "root")},
    **{name: f"{name}({{0}}, {{1}})" for name in _OF_TWO.split()},
    **{f"of_bits to {name}": f"{{0}}.to(tl.int16).to(tl.{name}, bitcast=True)" for name in ("bfloat16", "float16")},
    "div": "divide({0}, {1})",
    "pow": "power({0}, {1})",
    "remainder": "floored_remainder({0}, {1})",
    "fmod": "truncated_remainder({0}, {1})",
    "atan2": "arc_tangent2({0}, {1})",
    "copysign": "with_sign({0}, {1})",
    "neg": "(-{0})",
    "abs": "tl.abs({0})",
    "sqrt": "square_root({0})",
    "erf": "tl.erf({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "round": "libdevice.nearbyint({0})",
    "where": "tl.where({0}, {1}, {2})",
    "and": "both({0}, {1})",
    "or": "either({0}, {1})",
    "not": "({0} == 0)",
    "isnan": "({0} != {0})",
    "isinf": "is_infinite({0})",
    "widen": "to_float32({0})",
    "narrow to float32": "{0}",
    "narrow to bfloat16": "to_bfloat16({0})",
    "narrow to float16": "{0}.to(tl.float16)",
    "bits": "bits_of({0})",
    "of_bits to ": "{0}.to(tl.float32, bitcast=True)",
    "of_bits to int16": "{0}.to(tl.int16)",
    "of_bits to int8": "byte_of({0}, tl.int8)",
    "of_bits to uint8": "byte_of({0}, tl.uint8)",
    "of_bits to float8_e4m3fn": "byte_of({0}, tl.uint8)",
    "whole": "{0}.to(tl.int32)",
    "real": "{0}.to(tl.float32)",
    "nibble": "nibbles({0})",
    "pack": "packed_pairs({0})",
    "within": "at_most({0}, {1})",
    "fused": "fused({0}, {1}, {2})",
    "rough_root": "tl.sqrt({0})",
}


POINTERS = {
    "tile": "grads addresses tile_tensor first_tile numel rows control layout_index partials",
    "strided": "layouts tile_list",
    "blocks": "columns",
    "random": "streams step",
    "reports": "report_partials",
    "marks": "words first_word",
    "finish": "partials sums grads first_tile numel",
    "scalar": "counts grads group hyper step numel sizes control sums global_parts totals rows",
    "slices": "grads addresses tile_base tile_tensor first_tile extents part_starts starts spans rows control"
    " layout_index partials",
    "finish slices": "partials sums grads first_tile tile_count",
}
"""Pointer parameters of each kind of kernel, in order; scalar kernels have one more per scalar state."""


_QUICK = {
    "div": "({0} / {1})",
    "sqrt": "tl.sqrt({0})",
    "quotient": "quick_quotient({0}, {1})",
    "root": "tl.sqrt({0})",
    "within": "{0}",
    "float8_element": "quick_float8_element({0}, {1})",
}
"""Two units in the last place of float32 off: nothing beside the rounding of 16-bit arrays."""


_BYTES = {"int8": "int8", "uint8": "uint8", "float8_e4m3fn": "uint8"}
"""Dtypes of one byte, and what Triton has them as."""


class TritonWriter(Writer):
    """Writes Triton statements in a compute type.

    quick: numbers may be two units in the last place off. fuses: products that are only added to something are fused
    with that, in every kernel of a rule alike.
    """

    def __init__(self, kind: str, names: Names, quick: bool = False, fuses: bool = False) -> None:
        spelling = {**SPELLING, **(_QUICK if quick else {}), "number": f"{{0}}.to(tl.{kind})"}
        super().__init__(kind, names, spelling)
        self._quick, self._fuses = quick, quick and fuses

    def declare(self, name: str, expression: str, value: Value) -> str:
        return f"{name} = {expression}"

    def constant(self, number: float | bool) -> str:
        if isinstance(number, bool):
            return f"tl.full((1,), {int(number)}, tl.int1)"
        if isinstance(number, int):
            return repr(number)
        if math.isnan(number) or math.isinf(number):
            return f"tl.full((1,), float('{number}'), tl.{self.kind})"
        return f"tl.full((1,), {number!r}, tl.{self.kind})" if self.kind == "float64" else repr(number)

    def spelled(self, value: Value) -> str:
        chosen = self._fused(value) if self._fuses else ""
        if not chosen and self._quick and value.operation == "div" and value.args[1].level in SCALAR_LEVELS:
            # Compute the reciprocal of a per-tensor number once, not per element.
            chosen = f"({self[value.args[0]]} * (1.0 / {self[value.args[1]]}))"
        return chosen or self._of_bytes(value) or super().spelled(value)

    def _of_bytes(self, value: Value) -> str:
        """Numbers of bytes and of their halves, which are made with the constant added to them."""
        if value.operation == "of_bits" and value.dtype in _BYTES and value.args[0].operation == "shift_right":
            bits, places = value.args[0].args
            if places.attribute in (8, 16, 24):
                return f"byte_of({self[bits]}, tl.{_BYTES[value.dtype]}, {places.attribute // 8})"
        number, plus = value, "0.0"
        if value.operation in ("add", "sub") and value.args[1].operation == "constant" and not value.dtype:
            number, constant = value.args
            plus = f"{'-' if value.operation == 'sub' else ''}{constant.attribute!r}"
            if number.operation == "widen" and number.args[0].dtype == "uint8" and value.operation == "add":
                return f"bytes_plus({self[number.args[0]]}, {self[constant]})"
        if number.operation == "real" and number.args[0].operation == "nibble":
            return f"nibbles_plus({self[number.args[0].args[0]]}, {plus})"
        return ""

    def _fused(self, value: Value) -> str:
        """Spell a sum with a product, a quotient by a square root, or a fast root as one operation."""
        if value.operation in ("add", "sub") and not value.dtype and value.level not in SCALAR_LEVELS:
            place = next((place for place in (1, 0) if self._is_product(value.args[place])), None)
            return "" if place is None else self._fused_sum(value, place)
        if value.operation == "div" and _has_root(value.args[1]):
            return f"quick_quotient({self[value.args[0]]}, {self[value.args[1]]})"
        if value.operation == "root" and _is_larger(value.args[0]):
            _, number, least = value.args[0].args
            if least.operation == "constant" and least.attribute <= _NOTHING:  # one instruction takes all roots
                return f"tl.sqrt({self[number]})"
        return ""

    def _is_product(self, value: Value) -> bool:
        is_alone = not value.name and self.uses[id(value)] == 1
        if value.operation == "within":
            return is_alone and self._is_product(value.args[0])
        by_scalar = value.operation == "div" and value.args[1].level in SCALAR_LEVELS
        return is_alone and id(value) in self.new and (value.operation == "mul" or by_scalar)

    def _fused_sum(self, total: Value, place: int) -> str:
        product, plus = total.args[place], self[total.args[1 - place]]
        product = product.args[0] if product.operation == "within" else product
        # The number of a tensor, if there is one, takes the sign: the others' would be an operation for each element.
        right, left = sorted(product.args, key=lambda arg: arg.level in SCALAR_LEVELS)
        if product.operation == "div":
            right, left = product.args
        factors = [self[left], self[right]]
        if product.operation == "div":
            factors[0] = f"(1.0 / {factors[0]})"
        if total.operation == "sub" and place:
            factors[0] = f"-{factors[0]}"
        elif total.operation == "sub":
            plus = f"-{plus}"
        return f"tl.fma({factors[0]}, {factors[1]}, {plus})"


def _is_larger(value: Value) -> bool:
    """Whether a value is the larger of two, with the second for NaN."""
    return value.operation == "where" and value.args[0].operation == "gt" and value.args[0].args == value.args[1:]


_NOTHING = 2.0**-90


def _has_root(value: Value) -> bool:
    """Whether a value is a square root, but for numbers of a tensor: zero, or far from the ends of float32."""
    if value.operation not in ("add", "mul", "div"):
        return value.operation == "sqrt"
    left, right = value.args
    if right.level in SCALAR_LEVELS:
        return _has_root(left)
    return value.operation != "div" and left.level in SCALAR_LEVELS and _has_root(right)


def is_16_bits(spec: KernelSpec, tile: TilePass) -> bool:
    """Whether a pass writes nothing that is kept in far more than 16 bits, and reduces nothing that is.

    But for the parameter where all states are in formats as coarse and some in blocks.
    """
    states = [storage for name, storage in spec.storages.items() if name != "param"]
    # An update that is made of numbers in blocks is no closer than these.
    of_blocks = spec.has_blocks and all(map(is_coarse, states))

    def fits(names: Iterable[str]) -> bool:
        kept = [name for name in names if name in spec.storages and not (of_blocks and name == "param")]
        return all(is_coarse(spec.storages[name]) for name in kept)

    keeps_more = tile.reductions or tile.parts or tile.kept
    return fits(tile.stores) and (not keeps_more or fits(tile.reads()))


def head(name: str, pointers: Sequence[str], constants: str) -> str:
    """The first lines of a kernel with these pointer parameters, which are not specialized by alignment."""
    listed = ", ".join(f'"{pointer}"' for pointer in pointers)
    parameters = ", ".join([*pointers, *(f"{constant}: tl.constexpr" for constant in constants.split())])
    return nested([f"@triton.jit(do_not_specialize_on_alignment=[{listed}])", f"def {name}({parameters}):"])


def pointers_of(*kinds: str) -> list[str]:
    """Pointer parameters of these kinds, in order."""
    return [name for kind in kinds for name in POINTERS[kind].split()]


def pointer_to(array: Array) -> str:
    """An array's address as a pointer to its elements."""
    # By its bits, which every GPU has.
    kind = "uint8" if array.dtype is torch.float8_e4m3fn else dtype_name(array.dtype)
    return f"{array.name}_address.to(tl.pointer_type(tl.{kind}))"


def narrowed(value: str, array: Array, compute: str, *, in_pairs: bool) -> str:
    """The expression of a value as an element of an array; in pairs where more than the array needs it."""
    if in_pairs and array.dtype is torch.bfloat16 and compute == "float32":
        return f"to_bfloat16_pairs({value})"
    return f"({value}).to(tl.{dtype_name(array.dtype)})"


REDUCTIONS = {
    "reduce_sum": ("0.0", "add"),
    "reduce_amax": ("float('-inf')", "larger"),
    "reduce_amin": ("float('inf')", "smaller"),
}


@dataclass(frozen=True)
class TileBody:
    """Loads and stores of a tile's buffers through pointers named `<array>_array`."""

    spec: KernelSpec
    mask: str  # of its elements, or empty
    shapes: tuple[str, str] | None = None  # of it, and of its numbers in rows of blocks, where a tile is none of these
    keeps: str = ""  # the condition that a step is not skipped, if the kernel also reports in skipped steps
    in_pairs: bool = False

    def _mask(self, array: Array) -> str:
        if self.mask and self.shapes is not None and array.elements == 1:
            in_blocks = (s.arrays(name) for name, s in self.spec.storages.items() if codec_of(s).has_blocks)
            return "code_mask" if any(array in arrays for arrays in in_blocks) else self.mask
        return _MASKS[array.elements] if self.mask and self.spec.has_blocks else self.mask

    def loaded(self, array: Array) -> str:
        """The expression of an array's elements as stored."""
        other = "0.0" if array.dtype.is_floating_point and array.dtype.itemsize > 1 else "0"
        mask = self._mask(array)
        masked = f", mask={mask}, other={other}" if mask else ""
        return f"tl.load({array.name}_array{masked})"

    def _stored(self, array: Array, element: str) -> str:
        mask = " & ".join(filter(None, (self.keeps, self._mask(array))))
        pointer = f"{array.name}_array"
        if array.elements == BLOCK and not self.mask and self.shapes is None:
            # By the first lane of each row, with pointers that look like those of elements: the layout of a column is
            # another, and its numbers would be moved between threads with two barriers.
            pointer = f"tl.multiple_of({pointer} + lane, {along_rows(32 // self.spec.widest)})"
            element = f"tl.broadcast_to({element}, {BLOCKS_SHAPE})"
            mask = "(lane == 0) & (block_lane >= 0)"
        masked = f", mask={mask}" if mask else ""
        return f"tl.store({pointer}, {element}{masked})"

    def load(self, name: str) -> str:
        """The expression of a buffer's values."""
        storage = self.spec.storages[name]
        codec = codec_of(storage)
        elements = ", ".join(map(self.loaded, read_arrays(storage, name)))
        joined = elements if codec.is_element else f"join_{storage.title}({elements})"
        if codec.is_element and self.spec.has_blocks and storage.arrays(name)[0].dtype is torch.bfloat16:
            joined = f"to_float32({elements})"
        if codec.has_blocks and self.shapes is not None:
            joined = f"tl.reshape({joined}, {self.shapes[0]})"
        return f"{joined}.to(tl.{dtype_name(self.spec.compute)})"

    def store(self, name: str, value: str) -> list[str]:
        """The statements that store a buffer's new values."""
        storage = self.spec.storages[name]
        arrays, codec = storage.arrays(name), codec_of(storage)
        if codec.is_plain:
            compute = dtype_name(self.spec.compute)
            return [self._stored(arrays[0], narrowed(value, arrays[0], compute, in_pairs=self.in_pairs))]
        elements = [f"{array.name}_element" for array in arrays]
        number, index = f"({value}).to(tl.float32)", "element"
        if codec.has_blocks and self.mask:
            # Elements past a short block are not part of it.
            number = f"tl.where({self.mask}, {number}, 0.0)"
        if codec.has_blocks and self.shapes is not None:
            number = f"tl.reshape(tl.broadcast_to({number}, {self.shapes[0]}), {self.shapes[1]})"
            index = "code"
        random = self.spec.draws.get(name)
        arguments = number if random is None else f"{number}, random_{random}(key_0, key_1, {index}_low, {index}_high)"
        split = f"{', '.join(elements)} = split_{storage.title}({arguments})"
        return [split, *map(self._stored, arrays, elements)]


BLOCKS_SHAPE = "(block_lane + lane).shape"
"""Of a tile of blocks: a row for each, in runs of neighbours of which a thread has a part each."""


def along_rows(count: int) -> str:
    """So many neighbours in a tile of blocks, as hints for pointers say it."""
    return f"[1, {count}] if RUNS == 1 else [1, 1, {count}]"


_MASKS = {1: "mask", 2: "pair_mask", BLOCK: "block_mask"}
"""The mask of an array with an entry for so many elements, where tiles are of blocks."""

_AROUND = """
triton tl range float gradient_scale_of
t tile row skip mask inside inverse_scale grad_address layout_row layout back dims dim size coordinate index
lane begin start stop whole aligned first part active next_step base
tile_base extents part_starts starts spans tile_count row_parts column_parts
matrices height width local rest column_tiles row_tiles column_tile row_tile matrix_tile matrix across column line
first_matrix first_column first_line corner even_corner matrices_left rows_left columns_left pitch even_pitch
place even_place odd_place
random stream origin steps_taken stream_keys key_0 key_1 element_index element_low element_high
block block_lane block_mask one_block pair_lane pair_mask columns_of_row per_row line_column first_column packed_columns
block_matrix block_across block_column block_line block_inside code_place code_mask code_index code_low code_high
"""

_SUPPORT = Path(__file__).with_name("support.py").read_text(encoding="utf-8")

HELPERS = sorted(["libdevice", *re.findall(r"^def ([a-z]\w*)", _SUPPORT, re.MULTILINE)])
"""What generated modules import of backends/triton/support.py, where they use it."""

TritonNames = partial(
    Names,
    reserved=(*_AROUND.split(), *HELPERS, *pointers_of(*POINTERS)),
    slots=r"[A-Z][A-Z0-9_]*|(join|split)_.*|(all_share|all_term|at|inner|kept|part|parts|random|share|slot|span|start|term|total)_[0-9]+|(report|seen)_.*",
)
"""Makes unique identifiers for a Triton function and the kernels that call it.

A name in capitals may be a constant of a kernel; join and split are functions of storage formats; numbered names belong
to its slots, reductions and arrays.
"""


def format_functions(storages: Iterable[Storage], quick: bool) -> list[list[str]]:
    """The functions of all formats that are more than one array of one dtype, `join_<title>` and `split_<title>`."""
    functions: list[list[str]] = []
    for title, codec in {storage.title: codec_of(storage) for storage in storages}.items():
        if codec.is_plain:
            continue
        arrays = [codec.arrays[place].name for place in codec.reads]
        is_quick = quick and not codec.is_random
        if not codec.is_element:
            functions.append(_function(f"join_{title}", arrays, [codec.loaded], quick))
        random = ["random"] if codec.is_random else []
        functions.append(_function(f"split_{title}", ["number", *random], codec.stored, is_quick))
    return functions


def random_functions(slots: Iterable[int]) -> list[list[str]]:
    """Functions for random bits: the keys of a tensor at a step, and the bits of an element for each of these slots."""
    keys = _function("stream_keys", ["low", "high", "count"], keys_graph())
    of_slots = {slot: bits_graph(slot) for slot in slots}
    return [keys, *(_function(f"random_{slot}", _BITS_OF, [root]) for slot, root in of_slots.items())]


_BITS_OF = ("key_0", "key_1", "low", "high")


def number_function(name: str, function: Callable[..., Any]) -> list[str]:
    """A function of floats, as a function of float64 numbers."""
    parameters, result = graph_of(function)
    return _function(name, parameters, [result], kind="float64")


def _function(
    name: str,
    parameters: Iterable[str],
    roots: Iterable[Value],
    quick: bool = False,
    kind: str = "float32",
) -> list[str]:
    writer = TritonWriter(kind, TritonNames(["number"]), quick, quick)
    writer.spelling = {**writer.spelling, "abs": "absolute({0})"}
    returned = ", ".join(writer.write_graph(roots))
    return code(f"""
        @triton.jit
        def {name}({", ".join(parameters)}):
            {nested(writer.lines)}
            return {returned}
    """)
