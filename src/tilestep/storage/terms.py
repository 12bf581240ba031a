"""What a storage format is written in: numbers, 32-bit integers and elements of arrays, as values of the graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..graph import Builder, Value

_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without `torch.`.

    Example:
        >>> import torch
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


class Term:
    """A value of a format's graph, with the operators that formats are written with.

    It is a number (in the type computed in), a truth value, an integer of 32 bits that wraps around, or an element as
    it lies in memory, of which only `bits` and `number` can be asked.
    """

    def __init__(self, build: Builder, value: Value) -> None:
        self.build, self.value = build, value

    def _apply(self, operation: str, *others: Term | float, dtype: str | None = None) -> Term:
        args = [self.value, *(self._like(other).value for other in others)]
        return Term(self.build, self.build.apply(operation, *args, dtype=self.value.dtype if dtype is None else dtype))

    def _like(self, other: Term | float) -> Term:
        if isinstance(other, Term):
            return other
        is_integer = self.value.dtype == "int32"
        return Term(self.build, self.build.integer(int(other)) if is_integer else self.build.constant(other))

    def named(self, name: str) -> Term:
        """The same under this name in generated code."""
        self.value.name = self.value.name or name
        return self

    def number(self) -> Term:
        """An element's number; an integer as a number."""
        if self.value.dtype == "int32":
            return self._apply("real", dtype="")
        return self._apply("widen", dtype="") if self.value.dtype else self

    def element(self, dtype: torch.dtype) -> Term:
        """A number rounded to the nearest of a floating dtype."""
        return Term(self.build, self.build.apply("narrow", self.value, dtype=dtype_name(dtype)))

    def bits(self) -> Term:
        """A number's or element's bits as an integer; narrow ones have their sign extended."""
        return self._apply("bits", dtype="int32")

    def of_bits(self, dtype: torch.dtype | None = None) -> Term:
        """An integer's (lowest) bits as an element of a dtype, or as a float32 number."""
        return self._apply("of_bits", dtype="" if dtype is None else dtype_name(dtype))

    def whole(self) -> Term:
        """A number as an integer, without what is behind the point."""
        return self._apply("whole", dtype="int32")

    def block_max(self) -> Term:
        """The largest of an integer's values in a block of neighbours, without a sign: negative ones are above all."""
        return self._apply("block_max", dtype="int32")

    def nibble(self) -> Term:
        """Of an element that holds two numbers of four bits this one, 0 to 15."""
        return self._apply("nibble", dtype="int32")

    def packed(self, dtype: torch.dtype) -> Term:
        """An integer of four bits with its neighbour's in one element of eight."""
        return self._apply("pack", dtype=dtype_name(dtype))

    def __add__(self, other: Term | float) -> Term:
        return self._apply("add", other)

    def __sub__(self, other: Term | float) -> Term:
        return self._apply("sub", other)

    def __neg__(self) -> Term:
        return 0 - self

    def __rsub__(self, other: Term | float) -> Term:
        return self._like(other) - self

    def __mul__(self, other: Term | float) -> Term:
        return self._apply("mul", other)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Term | float) -> Term:
        return self._apply("div", other)

    def __rtruediv__(self, other: Term | float) -> Term:
        return self._like(other) / self

    def __lshift__(self, places: int) -> Term:
        return self._apply("shift_left", places)

    def __rshift__(self, places: int) -> Term:
        return self._apply("shift_right", places)

    def __and__(self, other: Term | int) -> Term:
        return self._apply("and" if self.value.is_bool else "bit_and", other)

    def __or__(self, other: Term | int) -> Term:
        return self._apply("or" if self.value.is_bool else "bit_or", other)

    def __xor__(self, other: Term | int) -> Term:
        return self._apply("bit_xor", other)

    def __lt__(self, other: Term | float) -> Term:
        return self._apply("lt", other, dtype="")

    def __gt__(self, other: Term | float) -> Term:
        return self._apply("gt", other, dtype="")

    def same(self, other: Term | float) -> Term:
        """Whether both are equal."""
        return self._apply("eq", other, dtype="")

    def function(self, operation: str) -> Term:
        """An operation of the graph on one number, such as `sqrt`."""
        return self._apply(operation)


def where(condition: Term, if_true: Term | float, if_false: Term | float) -> Term:
    """One of two terms of a kind."""
    kind = next((choice for choice in (if_true, if_false) if isinstance(choice, Term)), condition)
    chosen = (kind._like(if_true).value, kind._like(if_false).value)
    return Term(kind.build, kind.build.apply("where", condition.value, *chosen, dtype=kind.value.dtype))


def quotient(left: Term | float, right: Term) -> Term:
    """A number over one from 2^-90 to 2^90: also such a number, or so small that the quotient counts as nothing."""
    return right._like(left)._apply("quotient", right)


def _pairwise(comparison: Callable[[Term, Term | float], Term]) -> Callable[[Term, Term | float], Term]:
    return lambda left, right: where(comparison(left, right), left, right)


minimum = _pairwise(lambda left, right: left < right)
"""The smaller of two terms; the second where one is NaN."""

maximum = _pairwise(lambda left, right: left > right)
"""The larger of two terms; the second where one is NaN."""


def if_rounds_to(high: Term, value: Term) -> Term:
    """A number that is kept as the 16-bit element nearest to it and something more; the element's where it is not.

    Then other code has written to the element, and what more is kept belongs to another number. By bits: NaN is as good
    as any number, and a zero has a sign.
    """
    rounded = value.element(getattr(torch, high.value.dtype)).named("rounded")
    return where(high.bits().same(rounded.bits()), value, high.number()).named("followed")


def near_bits(high: Term, distance: Term) -> Term:
    """The float32 number whose bits are so far from those of a bfloat16; the bfloat16's where there is no such number.

    A distance that leads across zero or beyond infinity belongs to another bfloat16: other code wrote to this one.
    """
    number = (high.number().bits() + distance).of_bits().named("number")
    # Of 16 bits at most, a distance leads across zero only from zero itself, and then to NaN.
    return where(isnan(number), high.number(), number).named("followed")


def magnitude(term: Term) -> Term:
    """An integer without its sign; of a number, the bits without it: the larger the number, and for NaN the largest."""
    if term.value.dtype == "int32":
        return where(term < 0, -term, term)
    return term.bits() & 0x7FFFFFFF


def isnan(number: Term) -> Term:
    """Whether a number is NaN."""
    return number._apply("isnan")
