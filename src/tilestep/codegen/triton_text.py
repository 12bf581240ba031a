"""How Triton says things: operations, numbers, parameters, and the loads and stores of a tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from ..graph import SCALAR_LEVELS, TilePass, Value
from .emit import Names, Writer
from .spec import KernelSpec
from .storage import Array, dtype_name

__all__ = [
    "HELPERS",
    "POINTERS",
    "REDUCTIONS",
    "SPELLING",
    "TileBody",
    "decorator",
    "is_16_bits",
    "pointer_to",
    "writer_of",
]

SPELLING = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "divide({0}, {1})",
    "pow": "power({0}, {1})",
    "remainder": "floored_remainder({0}, {1})",
    "fmod": "truncated_remainder({0}, {1})",
    "atan2": "arc_tangent2({0}, {1})",
    "copysign": "with_sign({0}, {1})",
    "maximum": "maximum({0}, {1})",
    "minimum": "minimum({0}, {1})",
    "neg": "(-{0})",
    "abs": "tl.abs({0})",
    "sqrt": "square_root({0})",
    "rsqrt": "reciprocal_root({0})",
    "exp": "exponential({0})",
    "exp2": "exponential2({0})",
    "expm1": "exponential_minus1({0})",
    "log": "logarithm({0})",
    "log2": "logarithm2({0})",
    "log1p": "logarithm_plus1({0})",
    "sin": "sine({0})",
    "cos": "cosine({0})",
    "tanh": "hyperbolic_tangent({0})",
    "erf": "tl.erf({0})",
    "sign": "sign({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "round": "nearest({0})",
    "trunc": "truncate({0})",
    "number": "{0}.to(tl.float32)",
    "where": "tl.where({0}, {1}, {2})",
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "gt": "({0} > {1})",
    "ge": "({0} >= {1})",
    "eq": "({0} == {1})",
    "ne": "({0} != {1})",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
    "not": "({0} == 0)",
    "isnan": "({0} != {0})",
    "isinf": "is_infinite({0})",
}


HELPERS = [
    "add",
    "arc_tangent2",
    "cosine",
    "divide",
    "exponential",
    "exponential2",
    "exponential_minus1",
    "floored_remainder",
    "gradient_scale_of",
    "hyperbolic_tangent",
    "is_infinite",
    "join_remainder",
    "larger",
    "logarithm",
    "logarithm2",
    "logarithm_plus1",
    "loop_bound",
    "maximum",
    "minimum",
    "nearest",
    "power",
    "reciprocal_root",
    "sign",
    "sine",
    "smaller",
    "split_remainder",
    "square_root",
    "truncate",
    "truncated_remainder",
    "with_sign",
]

POINTERS = {
    "tile": ["grads", "addresses", "tile_tensor", "first_tile", "numel", "rows", "control", "layout_index", "partials"],
    "strided": ["layouts", "tile_list"],
    "finish": ["partials", "sums", "grads", "first_tile", "numel"],
    "scalar": [
        "counts",
        "grads",
        "group",
        "hyper",
        "step",
        "numel",
        "sizes",
        "control",
        "sums",
        "across",
        "totals",
        "rows",
    ],
}
"""Pointer parameters of each kind of kernel, in order; scalar kernels have one more per scalar state."""


def _constant(spec_type: str) -> Callable[[float | bool], str]:
    def spell(number: float | bool) -> str:
        if isinstance(number, bool):
            return f"tl.full((1,), {int(number)}, tl.int1)"
        if math.isnan(number) or math.isinf(number):
            return f"tl.full((1,), float('{number}'), tl.{spec_type})"
        return f"tl.full((1,), {number!r}, tl.{spec_type})" if spec_type == "float64" else repr(number)

    return spell


_QUICK = {"div": "({0} / {1})", "sqrt": "tl.sqrt({0})"}
"""Two units in the last place of float32 off: nothing beside the rounding of 16-bit arrays."""


class _QuickWriter(Writer):
    """Divides by the numbers of a tensor by multiplying with their reciprocal: made once, not for each element."""

    def template(self, value: Value) -> str:
        if value.operation == "div" and value.args[1].level in SCALAR_LEVELS:
            return "({0} * (1.0 / {1}))"
        return super().template(value)


def writer_of(spec_type: str, indent: str, names: Names, quick: bool = False) -> Writer:
    """A writer of Triton statements.

    Args:
        spec_type: the dtype computed in.
        indent: what a statement begins with.
        names: where names come from.
        quick: whether division and root may be two units in the last place of float32 off.
    """

    def declare(name: str, expression: str, value: Value) -> str:
        return f"{indent}{name} = {expression}"

    spelling = {**SPELLING, **(_QUICK if quick else {}), "number": f"{{0}}.to(tl.{spec_type})"}
    return (_QuickWriter if quick else Writer)(spelling, declare, _constant(spec_type), names)


def is_16_bits(spec: KernelSpec, tile: TilePass) -> bool:
    """Whether a pass writes nothing that is kept in more than 16 bits, and reduces only what is kept in no more."""

    def fits(names: Iterable[str]) -> bool:
        return all(spec.storages[name].precision.itemsize <= 2 for name in names if name in spec.storages)

    keeps_more = tile.reductions or tile.parts or tile.kept
    return fits(tile.stores) and (not keeps_more or fits(tile.reads()))


def decorator(pointers: list[str]) -> list[str]:
    """The line before a kernel with these pointer parameters: one build serves all addresses."""
    listed = ", ".join(f'"{name}"' for name in pointers)
    return [f"@triton.jit(do_not_specialize_on_alignment=[{listed}])"]


def pointer_to(array: Array) -> str:
    """The array's address as a pointer to its elements."""
    return f"{array.name}_address.to(tl.pointer_type(tl.{dtype_name(array.dtype)}))"


REDUCTIONS = {
    "reduce_sum": ("0.0", "add"),
    "reduce_amax": ("float('-inf')", "larger"),
    "reduce_amin": ("float('inf')", "smaller"),
}


class TileBody:
    """What a storage sees of a tile: masked or unmasked loads and stores."""

    def __init__(self, compute: str, lines: list[str], indent: str, pointer: Callable[[str], str], mask: str) -> None:
        self.compute, self.lines, self.indent, self.pointer, self.mask = compute, lines, indent, pointer, mask

    def _loaded(self, array: Array) -> str:
        other = "0.0" if array.dtype.is_floating_point else "0"
        masked = f", mask={self.mask}, other={other}" if self.mask else ""
        return f"tl.load({self.pointer(array.name)}{masked})"

    def read(self, array: Array) -> str:
        return f"{self._loaded(array)}.to(tl.{self.compute})"

    def write(self, array: Array, value: str) -> None:
        self._store(array, f"({value}).to(tl.{dtype_name(array.dtype)})")

    def _store(self, array: Array, element: str) -> None:
        masked = f", mask={self.mask}" if self.mask else ""
        self.lines.append(f"{self.indent}tl.store({self.pointer(array.name)}, {element}{masked})")

    def join(self, function: str, arrays: Sequence[Array]) -> str:
        return f"{function}({', '.join(map(self._loaded, arrays))})"

    def split(self, function: str, arrays: Sequence[Array], value: str) -> None:
        elements = [f"{array.name}_element" for array in arrays]
        self.lines.append(f"{self.indent}{', '.join(elements)} = {function}(({value}).to(tl.{self.compute}))")
        for array, element in zip(arrays, elements):
            self._store(array, element)
