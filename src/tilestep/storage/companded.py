"""What formats of blocks are made of: a scale a block, and whole numbers that are closer to each other near zero."""

from __future__ import annotations

import torch

from .format import Term, magnitude, maximum, minimum, quotient, rough_quotient, rough_root, where
from .stochastic import chance

_ROUND = 1.5 * 2.0**23
LARGEST_SCALE = 2.0**123  # a block with something larger is kept as infinite: a sum of nine of its elements could be


def scale_of(number: Term, rounds_up: bool = False) -> Term:
    """The largest magnitude in a number's block as a bfloat16; infinity or NaN where one of them is.

    Rounded up no number of the block is beyond it, where the largest would be cut off and be too small on average; but
    for some units of float32's last place, which a number that comes out of blocks may be off. Denormals, of which a
    bfloat16 may be a half off, are always rounded up.
    """
    bits = magnitude(number).block_max()
    bits = _raised(bits) if rounds_up else where(bits < 0x00800000, (bits + 0xFFFF) & -0x10000, bits)
    most = bits.of_bits().named("most")
    return where(most > LARGEST_SCALE, most * 32.0, most).element(torch.bfloat16).named("scale")


def _raised(bits: Term) -> Term:
    """The bits of a number rounded up to those of a bfloat16."""
    return where(bits < 0x7F7F0000, (bits + 0xFFC0) & -0x10000, bits)


def divisor(scale: Term) -> Term:
    """A block's scale as a number to divide by: 1 for a block of zeros."""
    return where(scale.number().same(0.0), 1.0, scale.number()).named("divisor")


def unit_of(divisor: Term, least: int = 0) -> Term:
    """The power of two that a block's numbers are multiplied with, which rounds nothing: their scale is 1 to 2 then."""
    exponent = divisor.bits() & 0x7F800000
    return (0x7F000000 - (maximum(exponent, least << 23) if least else exponent)).of_bits().named("unit")


def nearest_integer(number: Term) -> Term:
    """The integer nearest to a number below 2^22, in the lowest bits of the result."""
    return (number + _ROUND).bits()


def _whole(number: Term) -> Term:
    """The whole number next to a number below 2^22, as a number."""
    return (number + _ROUND) - _ROUND


def compressed(number: Term, scale: Term, levels: int, random: Term | None = None) -> Term:
    """A signed number as an integer from -levels to levels, in the lowest bits.

    With x the number over its block's scale this is 2 x / (1 + |x|) in `levels` steps: they are four times as fine at
    zero as at the scale. NaN gives some integer, as its block's scale has it.

    Source: FlashOptim (arXiv 2602.23349).
    """
    unit = unit_of(divisor(scale))
    scaled, one = (number * unit).named("scaled"), (divisor(scale) * unit).named("one")
    if random is None:
        share = quotient(scaled, one + scaled.function("abs"))
        return nearest_integer((share * (2.0 * levels)).within(levels)).named("code")
    size = scaled.function("abs")
    lower = _whole(rough_quotient(size, one + size) * (2.0 * levels) - 0.5).named("lower")
    # Code k is of k / (2 levels - k). Both sides of the comparison are times that divisor and the next code's.
    behind = (2.0 * levels - lower).named("behind")
    above = ((size * behind) * 4.0 - lower * (one * 4.0)) * (behind - 1.0)
    rises = above > chance(random) * (one * (8.0 * levels))
    code = minimum(lower + where(rises, 1.0, 0.0), float(levels)).named("code")
    return nearest_integer(where(number < 0.0, -code, code))


def expanded(code: Term, scale: Term, levels: int) -> Term:
    """The number that `compressed` has made an integer of."""
    return quotient(code, 2.0 * levels - code.function("abs")) * scale.number()


def counted(number: Term, scale: Term, levels: int, random: Term | None = None) -> Term:
    """The root of a number as an integer from 0, which stands for zero alone, to `levels`, in the lowest bits.

    With x the root over its block's scale and q the integer over `levels`, an odd number, x = q (1 + q) / 2: steps are
    three times as fine at zero as at the scale. q + 1/2 is sqrt(8 x + 1) / 2. Sums have a bound or a power of two
    between them and products, so that no compiler fuses the two.
    """
    unit = unit_of(divisor(scale), 67)
    one = (divisor(scale) * unit).named("one")
    steps = quotient(levels / 2, one.function("root")).named("steps")
    square = number * (unit * 64.0 * unit).named("units")
    if random is None:
        # What is far below the scale has no share in the sum; without it, roots are of numbers far from denormals.
        eight_roots = maximum(square, 2.0**-96).function("root")
        count = ((eight_roots + one).function("root") * steps).within(1.5 * levels) - levels / 2
        return nearest_integer(maximum(count, where(number > 0.0, 1.0, 0.0))).named("code")
    count = rough_root(rough_root(square) + one) * steps - (levels / 2 + 0.5)
    lower = maximum(_whole(count), 1.0).named("lower")
    eighths = (_unit(scale, levels) * unit * 8.0).named("eighths")

    def four_squares(code: Term) -> Term:
        root = code * (code + float(levels)) * eighths
        return root * root * 4.0

    low, high = four_squares(lower).named("low"), four_squares(lower + 1.0)
    rises = (square * 4.0 - low) > chance(random) * (high - low)
    code = minimum(lower + where(rises, 1.0, 0.0), float(levels))
    return nearest_integer(where(number > 0.0, code, 0.0)).named("code")


def squared(code: Term, scale: Term, levels: int) -> Term:
    """The square of the root that `counted` has made an integer of."""
    # code (code + levels), exactly, as all that is squared and subtracted is a multiple of 1/4 below 2^18.
    centred = code + levels / 2
    root = (centred * centred - levels * levels / 4) * _unit(scale, levels)
    return root * root


def _unit(scale: Term, levels: int) -> Term:
    """What roots are multiples of."""
    return (scale.number() * (0.5 / (levels * levels))).named("unit")


def root_scale(number: Term, rounds_up: bool = False) -> Term:
    """`scale_of` a number's root, without the roots of all numbers; NaN where one of them is negative."""
    most = (number + 0.0).bits().block_max().of_bits().named("most").function("sqrt")
    most = _raised(most.bits() & 0x7FFFFFFF).of_bits() if rounds_up else most
    return most.element(torch.bfloat16).named("scale")
