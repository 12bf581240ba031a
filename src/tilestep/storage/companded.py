"""What formats of blocks are made of: a scale a block, and whole numbers that are closer to each other near zero."""

from __future__ import annotations

import torch

from .stochastic import code_at_random
from .terms import Term, magnitude, maximum, minimum, where

_LARGEST = 2.0**123
"""A block with something larger is kept as infinite: a sum of nine of its elements could be."""


def scale_of(number: Term, rounds_up: bool = False) -> Term:
    """The largest magnitude in a number's block as a bfloat16; infinity or NaN where one of them is.

    Rounded up no number of the block is beyond it, where the largest would be cut off and be too small on average; but
    for some units of float32's last place, which a number that comes out of blocks may be off.
    """
    bits = magnitude(number).block_max()
    bits = where(bits < 0x7F7F0000, (bits + 0xFFC0) & -0x10000, bits) if rounds_up else bits
    most = bits.of_bits().named("most")
    return where(most > _LARGEST, most * 32.0, most).element(torch.bfloat16).named("scale")


def divisor(scale: Term) -> Term:
    """A block's scale as a number to divide by: 1 for a block of zeros."""
    return where(scale.number().same(0.0), 1.0, scale.number()).named("divisor")


def compressed(number: Term, scale: Term, levels: int, random: Term | None = None) -> Term:
    """A signed number as an integer from -levels to levels.

    With x the number over its block's scale this is 2 x / (1 + |x|) in `levels` steps: they are four times as fine at
    zero as at the scale. NaN gives some integer, as its block's scale has it.

    Source: FlashOptim (arXiv 2602.23349).
    """
    share = number / (divisor(scale) + number.function("abs"))
    code = minimum((share * (2.0 * levels)).function("round"), float(levels)).whole().named("code")
    if random is None:
        return code

    def number_of(code: Term) -> Term:
        return code.number() / (2 * levels - magnitude(code)).number()

    is_exact = expanded(code, scale, levels).same(number)
    return code_at_random(code, is_exact, number / divisor(scale), number_of, random, (-levels, levels))


def expanded(code: Term, scale: Term, levels: int) -> Term:
    """The number that `compressed` has made an integer of."""
    share = code.number() / (2 * levels - magnitude(code)).number()
    return share * scale.number()


def counted(root: Term, scale: Term, levels: int, square: Term | None = None, random: Term | None = None) -> Term:
    """A root as an integer from 0, which stands for zero alone, to `levels`: what is divided by it stays finite.

    With x the root over its block's scale and q the integer over `levels`, an odd number, x = q (1 + q) / 2: steps are
    three times as fine at zero as at the scale. q + 1/2 is sqrt(8 x + 1) / 2; no product that is rounded is added to
    anything, so that no compiler fuses the two.
    """
    raised = (root * 8.0 + scale.number()).function("sqrt").named("raised")
    steps = (float(levels) / 2 / divisor(scale).function("sqrt")).named("steps")
    count = minimum(raised * steps, 1.5 * levels).whole() - levels // 2
    code = where(root > 0.0, maximum(count, 1), 0).named("code")
    if random is None or square is None:
        return code
    chosen = code_at_random(
        code,
        squared(code, scale, levels).same(square),
        root / _unit(scale, levels),
        lambda code: (code * (code + levels)).number(),
        random,
        (1, levels),
        lambda upper, lower: (upper - lower) * (upper + lower),
    )
    return where(root > 0.0, chosen, 0)


def squared(code: Term, scale: Term, levels: int) -> Term:
    """The square of the root that `counted` has made an integer of."""
    root = (code * (code + levels)).number() * _unit(scale, levels)
    return root * root


def _unit(scale: Term, levels: int) -> Term:
    """What roots are multiples of."""
    return (scale.number() / (2.0 * levels * levels)).named("unit")
