"""Building blocks of block formats: a scale per block, and companded integer codes, which are denser near zero."""

from __future__ import annotations

import math

import torch

from ..graph.terms import quotient
from .format import (
    Term,
    fused,
    magnitude,
    maximum,
    minimum,
    where,
    with_sign_of,
)
from .states import Blocks
from .stochastic import whole_at_random

_ROUND = 1.5 * 2.0**23
LARGEST_SCALE = 2.0**123  # larger scales count as infinite: a sum of nine such elements could be


def scale_of(number: Term, rounds_up: bool = False, keeps_infinity: bool = True) -> Term:
    """The largest magnitude in a number's block as a bfloat16; NaN if the block has a NaN, inf if it can be kept.

    With `rounds_up`, no number of the block exceeds the scale by more than a few units in float32's last place;
    otherwise the largest numbers would be clipped, and biased downwards. Denormals, whose bfloat16 may be off by a
    half, are always rounded up.
    """
    bits = magnitude(number).function("block_max")
    bits = _raised(bits) if rounds_up else where(bits < 0x00800000, (bits + 0xFFFF) & -0x10000, bits)
    most = bits.of_bits().named("most")
    infinite = most * 32.0 if keeps_infinity else math.nan
    return where(most > LARGEST_SCALE, infinite, most).element(torch.bfloat16).named("scale")


def _raised(bits: Term) -> Term:
    """Round the bits of a float32 up to the bits of a bfloat16."""
    return where(bits < 0x7F7F0000, (bits + 0xFFC0) & -0x10000, bits)


def divisor(scale: Term) -> Term:
    """A block's scale as a divisor: 1 for a block of zeros."""
    number = scale.number()
    return where(number.same(0.0), 1.0, number).named("divisor")


def unit_of(divisor: Term, least: int = 0) -> Term:
    """The power of two that scales a block to a maximum from 1 to 2; the product is exact."""
    exponent = divisor.bits() & 0x7F800000
    return (0x7F000000 - (maximum(exponent, least << 23) if least else exponent)).of_bits().named("unit")


def nearest_integer(number: Term, plus: int = 0) -> Term:
    """The integer nearest to a number below 2^22, plus an even integer, in the lowest bits of the result."""
    return (number + (_ROUND + plus)).bits()


def compressed(number: Term, scale: Term, levels: int, random: Term | None = None, plus: int = 0) -> Term:
    """A signed number as an integer code from -levels to levels, plus an even integer, in the lowest bits.

    With x the number over its block's scale, the code is 2 x / (1 + |x|) in `levels` steps, which are four times as
    fine at zero as at the scale. The code of NaN is arbitrary: its block's scale is NaN.

    Source: FlashOptim (arXiv 2602.23349).
    """
    unit = unit_of(divisor(scale))
    scaled, one = (number * unit).named("scaled"), (divisor(scale) * unit).named("one")
    if random is None:
        share = quotient(scaled, one + scaled.function("abs"))
        return nearest_integer((share * (2.0 * levels)).function("within", levels), plus).named("code")
    # Code k represents k / (2 levels - k). Random bits select between code k and the next, linearly in the number.
    whole = (one + scaled.function("abs")).named("whole")
    ones = (one * (2.0 * levels)).named("ones")
    behind = ones.function("rough_ceiling", whole).named("behind")
    above = fused(whole, behind, -ones)
    share = quotient(1.0, ones).named("share")
    size = minimum(fused(above, fused(behind, share, -share), 2.0 * levels - behind), float(levels))
    return whole_at_random(with_sign_of(size, number), random, plus).named("code")


def expanded(code: Term, scale: Term, levels: int) -> Term:
    """The inverse of `compressed`."""
    return quotient(code, 2.0 * levels - code.function("abs")) * scale.number()


def counted(number: Term, scale: Term, levels: int, random: Term | None = None) -> Term:
    """The square root of a number as an integer code from 0 to `levels`, in the lowest bits; only zero has code 0.

    With x the root over its block's scale and q the code over `levels`, an odd number, x = q (1 + q) / 2: steps are
    three times as fine at zero as at the scale. q + 1/2 is sqrt(8 x + 1) / 2. In a block with an infinity zero keeps
    code 0, which is read as NaN, and all other numbers are read as infinities.
    """
    unit, least = unit_of(divisor(scale), 67), where(number > 0.0, 1.0, 0.0)
    if random is not None:
        size = _between_squares(number, scale, unit, levels)
        return whole_at_random(minimum(maximum(size, least), float(levels)), random).named("code")
    one = (divisor(scale) * unit).named("one")
    steps = quotient(levels / 2, one.function("root")).named("steps")
    square = number * (unit * 64.0 * unit).named("units")
    # Numbers far below the scale do not change the sum; the bound keeps roots away from denormals.
    eight_roots = maximum(square, 2.0**-96).function("root")
    count = maximum(fused((eight_roots + one).function("root"), steps, -levels / 2), least)
    # A scale is at most a 256th below the largest root: less than half a step if there are few levels.
    return nearest_integer(count if levels < 128 else minimum(count, float(levels))).named("code")


def _between_squares(number: Term, scale: Term, unit: Term, levels: int) -> Term:
    """A number as a fractional code, linear in the number between the squares of neighbouring codes.

    In units of the squares, code k stands for a^2 with a = k (k + levels), and with m = k + (levels + 1) / 2 that is
    m^2 - (levels^2 - 1) / 4 - m; for the next code the sign of the last m differs. Powers of 2^-half keep all terms
    near 1.
    """
    half = 7 if levels > 15 else 3
    inverse = quotient(2.0 ** (-2 * half), divisor(_unit(scale, levels) * unit)).named("inverse")
    square = (number * ((unit * unit) * (inverse * inverse)).named("squares")).named("square")
    root = (square.function("rough_root") + levels * levels / 4 * 4.0**-half).function("rough_root")
    middle = ((root + _ROUND * 2.0**-half) - _ROUND * 2.0**-half).named("middle")
    centre = fused(middle, middle, (1 - levels * levels) / 4 * 4.0**-half).named("centre")
    below = fused(middle, -(2.0**-half), centre).named("below")
    above = quotient(fused(below.function("neg"), below, square), middle * centre)
    return fused(above, 2.0 ** (half - 2), fused(middle, 2.0**half, -(levels + 1) / 2))


def squared(code: Term, scale: Term, levels: int) -> Term:
    """The inverse of `counted`: the square of the root that a code represents."""
    # code (code + levels), exactly: all terms are multiples of 1/4 below 2^18.
    centred = code + levels / 2
    root = (centred * centred - levels * levels / 4) * _unit(scale, levels)
    return root * root


def _unit(scale: Term, levels: int) -> Term:
    return (scale.number() * (0.5 / (levels * levels))).named("unit")


def root_scale(number: Term, rounds_up: bool = False) -> Term:
    """`scale_of` the root of a number, without taking roots of all numbers; NaN if a number is negative."""
    most = (number + 0.0).bits().function("block_max").of_bits().named("most").function("sqrt")
    most = _raised(most.bits() & 0x7FFFFFFF).of_bits() if rounds_up else most
    return most.element(torch.bfloat16).named("scale")


class CodeBlocks(Blocks):
    """Base of formats with codes: of signed numbers, or of the roots of numbers that are never negative."""

    levels = (127, 255)  # of the signed and the unsigned variant

    def number_of(self, code: Term, scale: Term) -> Term:
        """Return the number that a code represents."""
        return expanded(code, scale, self.levels[0]) if self.signed else squared(code, scale, self.levels[1])

    def code_of(self, value: Term, random: Term | None, plus: int = 0) -> tuple[Term, Term]:
        """Return the code of a number in the lowest bits, plus an even integer if it is signed, and the scale."""
        if self.signed:
            scale = scale_of(value, random is not None, keeps_infinity=False)
            return compressed(value, scale, self.levels[0], random, plus), scale
        scale = root_scale(value, random is not None)
        return counted(value, scale, self.levels[1], random), scale
