"""Values of a graph with the operators that formats, lowerings and outputs are written with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .ir import Builder, Value


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


_RESULTS = dict.fromkeys(("bits", "whole", "block_max", "nibble"), "int32") | dict.fromkeys(
    ("real", "widen", "eq", "lt", "gt"), ""
)
"""Dtypes of results that differ from the first operand's; empty for the dtype that a kernel computes in."""


def _operator(operation: str, of_truths: str = "") -> Callable[[Term, Any], Term]:
    def apply(self: Term, other: Any) -> Term:
        return self.function(of_truths if of_truths and self.value.is_bool else operation, other)

    return apply


class Term:
    """A value of a graph, with operators.

    A term is a number (in the compute dtype), a truth value, a 32-bit integer that wraps around, or a stored element,
    which supports only `bits` and `number`.
    """

    def __init__(self, build: Builder, value: Value) -> None:
        self.build, self.value = build, value

    def function(self, operation: str, *others: Any, dtype: str | None = None) -> Term:
        """Apply an operation of the graph, such as `sqrt`, to this term and others.

        Operations for formats: `whole`, a number as an integer, rounded towards zero; `block_max`, the unsigned maximum
        of an integer over its block (negative values are above all others); `nibble`, the four bits of an element that
        shares its byte with a neighbour, 0 to 15; `within`, a number clipped at a bound that it exceeds only by
        rounding errors (fast code may omit the clip); `rough_root`, a square root whose last bits change no stored
        element; `rough_ceiling`, the integer at or above the quotient of two positive numbers, or the next integer if
        rounding decides; `float8_number` and `float8_element`, this term, which a backend may compute from the operand
        with an instruction that gives the same bits.

        Args:
            operation: its name in the graph.
            others: more operands.
            dtype: the result's dtype; by default the operation's, or else this term's.
        """
        args = [self.value, *(self._like(other).value for other in others)]
        kind = _RESULTS.get(operation, self.value.dtype) if dtype is None else dtype
        return Term(self.build, self.build.apply(operation, *args, dtype=kind))

    def _like(self, other: Any) -> Term:
        if isinstance(other, Term):
            return other
        is_integer = self.value.dtype == "int32"
        return Term(self.build, self.build.integer(int(other)) if is_integer else self.build.constant(other))

    def named(self, name: str) -> Term:
        """Return the term itself, named in generated code."""
        self.value.name = self.value.name or name
        return self

    def number(self) -> Term:
        """Return an element's number, or an integer as a number."""
        if self.value.dtype == "int32":
            return self.function("real")
        return self.function("widen") if self.value.dtype else self

    def element(self, dtype: torch.dtype) -> Term:
        """Return a number rounded to the nearest of a floating dtype."""
        return self.function("narrow", dtype=dtype_name(dtype))

    def bits(self) -> Term:
        """Return the bits of a number or element as an integer; bits of narrow dtypes are sign-extended."""
        return self.function("bits")

    def of_bits(self, dtype: torch.dtype | None = None) -> Term:
        """Return the (lowest) bits of an integer as an element of a dtype, or as a float32 number."""
        return self.function("of_bits", dtype="" if dtype is None else dtype_name(dtype))

    def packed(self, dtype: torch.dtype) -> Term:
        """Return a 4-bit integer and its neighbour's in an element of eight bits."""
        return self.function("pack", dtype=dtype_name(dtype))

    __add__ = __radd__ = _operator("add")
    __sub__ = _operator("sub")
    __mul__ = __rmul__ = _operator("mul")
    __truediv__ = _operator("div")
    __lshift__ = _operator("shift_left")
    __rshift__ = _operator("shift_right")
    __and__ = _operator("bit_and", "and")
    __or__ = _operator("bit_or", "or")
    __xor__ = _operator("bit_xor")
    __lt__ = _operator("lt")
    __gt__ = _operator("gt")
    same = _operator("eq")
    """Whether both are equal."""

    def __neg__(self) -> Term:
        return 0 - self

    def __rsub__(self, other: float) -> Term:
        return self._like(other) - self

    def __rtruediv__(self, other: float) -> Term:
        return self._like(other) / self


def where(condition: Term, if_true: Term | float, if_false: Term | float) -> Term:
    """Select between two terms of the same kind by a condition."""
    kind = next((choice for choice in (if_true, if_false) if isinstance(choice, Term)), condition)
    chosen = (kind._like(if_true).value, kind._like(if_false).value)
    return Term(kind.build, kind.build.apply("where", condition.value, *chosen, dtype=kind.value.dtype))


def quotient(left: Term | float, right: Term) -> Term:
    """A quotient by a number from 2^-90 to 2^90; the dividend is in this range too, or negligibly small."""
    return right._like(left).function("quotient", right)
