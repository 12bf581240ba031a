"""States as float8, with a scale per block of 128."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..graph.terms import quotient
from .companded import divisor, scale_of, unit_of
from .format import Term, maximum, minimum, where, with_sign_of
from .states import Blocks, blocks_format

_LARGEST = 448.0
_LEAST = 2.0**-9
_NAN = 0x7F


def _number_of(element: Term, signed: bool) -> Term:
    bits = element.bits()
    size = bits & 0x7F if signed else bits
    # The exponent's bias is 7, and 127 in float32: a multiplication by 2^120, which is also correct for denormals.
    shifted = ((bits & 0x80) << 24) | (size << 20) if signed else size << 20
    return where(size.same(_NAN), math.nan, shifted.of_bits() * 2.0**120).function("float8_number", element)


def _element_of(number: Term, signed: bool, random: Term | None) -> Term:
    """The float8 nearest to a number of up to 448, or with `random` one of its two neighbours, by 13 random bits.

    Between neighbours the bits of a float32 grow linearly: random bits are added to the bits that are cut off. They are
    at least 2^-14 away from 0 and from a whole step, so that a float8 with rounding errors stays the same.
    """
    # With float8's bias, float8 denormals are denormals of float32.
    bits = (number * 2.0**-120).bits()
    size = bits & 0x7FFFFFFF if signed else bits
    half = 0x7FFFF + ((size >> 20) & 1) if random is None else ((random << 4) & 0xFFF80) | 0x40
    code = (size + half) >> 20
    element = (((bits >> 24) & 0x80) | code if signed else code).of_bits(torch.float8_e4m3fn)
    return element.function("float8_element", number) if random is None else element


@blocks_format("float8_e4m3")
class Float8Blocks(Blocks):
    """Numbers of three bits of precision relative to the largest of their block, which is stored as 448.

    If the state is never negative, only zero is stored as zero, so that quotients stay finite. In a block with an
    infinity all numbers are stored as 448 or -448, and are read as infinite.

    Source: COAT (arXiv 2410.19313), with blocks of 128.
    """

    titles = ("float8_blocks", "float8_positive_blocks")
    words = ("float8_e4m3 blocks", "float8_e4m3 blocks without a sign")
    codes = (torch.float8_e4m3fn, torch.float8_e4m3fn)

    def load(self, elements: Sequence[Term]) -> Term:
        element, scale = elements
        return _number_of(element, self.signed) * (scale.number() * (1 / _LARGEST)).named("unit")

    def store(self, value: Term, random: Term | None = None) -> tuple[Term, ...]:
        scale = scale_of(value, random is not None)
        unit = unit_of(divisor(scale))
        if self.signed:
            one = (divisor(scale) * unit * (1 / _LARGEST)).named("one")
            size = minimum(quotient(value * unit, one).function("abs"), _LARGEST)
            number = with_sign_of(size, value).named("number")
        else:
            # In units of the smallest float8 above zero.
            one = (divisor(scale) * unit * (_LEAST / _LARGEST)).named("one")
            size = minimum(quotient(value * unit, one), _LARGEST / _LEAST)
            number = (maximum(size, where(value > 0.0, 1.0, 0.0)) * _LEAST).named("number")
        return _element_of(number, self.signed, random), scale
