"""Eight bits a state as a floating point number, with a scale for each block of 128."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .blocks import BLOCK
from .companded import divisor, scale_of, unit_of
from .format import Array, Term, maximum, minimum, quotient, where, with_sign_of
from .states import Blocks, blocks_format

_LARGEST = 448.0
_LEAST = 2.0**-9
_NAN = 0x7F


def _number_of(element: Term, signed: bool) -> Term:
    """A float8's number; NaN of the code that is none."""
    bits = element.bits()
    size = bits & 0x7F if signed else bits
    # The exponent counts from -7, that of a float32 from -127: a product with 2^120, which is right for denormals.
    shifted = ((bits & 0x80) << 24) | (size << 20) if signed else size << 20
    return where(size.same(_NAN), math.nan, shifted.of_bits() * 2.0**120).function("float8_number", element)


def _element_of(number: Term, signed: bool, random: Term | None) -> Term:
    """The float8 nearest to a number of up to 448, or one of the two around it by 13 random bits.

    Between neighbours a float32's bits count evenly: random bits are added to those that are cut off. They are at least
    2^-14 from none and all of a step, so that from a float8 that is roughly computed the same comes.
    """
    # With float8's bias, which makes its denormals those of a float32.
    bits = (number * 2.0**-120).bits()
    size = bits & 0x7FFFFFFF if signed else bits
    half = 0x7FFFF + ((size >> 20) & 1) if random is None else ((random << 4) & 0xFFF80) | 0x40
    code = (size + half) >> 20
    element = (((bits >> 24) & 0x80) | code if signed else code).of_bits(torch.float8_e4m3fn)
    return element.function("float8_element", number) if random is None else element


@blocks_format("float8_e4m3")
class Float8Blocks(Blocks):
    """Numbers of three bits of precision over the largest of their block, which is kept as 448.

    Of numbers that are never negative only zero is kept as zero, so that what is divided by them stays finite. In a
    block with an infinity all numbers are kept as 448 or -448, and so are infinite.

    Source: COAT (arXiv 2410.19313) keeps blocks of 128 so.
    """

    titles = ("float8_blocks", "float8_positive_blocks")
    words = ("float8_e4m3 blocks", "float8_e4m3 blocks without a sign")

    def arrays(self, name: str) -> tuple[Array, ...]:
        return (Array(f"{name}_codes", torch.float8_e4m3fn), Array(f"{name}_scales", torch.bfloat16, BLOCK))

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
