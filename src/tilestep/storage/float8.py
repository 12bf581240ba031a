"""Eight bits a state as a floating point number, with a scale for each block of 128."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .blocks import BLOCK
from .companded import divisor, scale_of, unit_of
from .format import Array, Term, minimum, quotient, where
from .states import Blocks, blocks_format
from .stochastic import code_at_random

_LARGEST = 448.0
_LARGEST_CODE = 0x7E


def _share_of(code: Term) -> Term:
    """A code's number without a sign, of its block's scale."""
    return (code << 20).of_bits() * 2.0**120 / _LARGEST


@blocks_format("float8_e4m3")
class Float8Blocks(Blocks):
    """Numbers of three bits of precision over the largest of their block, which is kept as 448.

    Of numbers that are never negative only zero is kept as zero, so that what is divided by them stays finite.

    Source: COAT (arXiv 2410.19313) keeps blocks of 128 so.
    """

    titles = ("float8_blocks", "float8_positive_blocks")
    words = ("float8_e4m3 blocks", "float8_e4m3 blocks without a sign")

    def arrays(self, name: str) -> tuple[Array, ...]:
        return (Array(name, torch.float8_e4m3fn), Array(f"{name}_scales", torch.bfloat16, BLOCK))

    def load(self, elements: Sequence[Term]) -> Term:
        element, scale = elements
        bits = element.bits()
        # The exponent counts from -7, that of a float32 from -127: a product with 2^120, which is right for denormals.
        shifted = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20) if self.signed else bits << 20
        number = shifted.of_bits() * 2.0**120
        return number * (scale.number() * (1 / _LARGEST)).named("unit")

    def store(self, value: Term, random: Term | None = None) -> tuple[Term, ...]:
        scale = scale_of(value, random is not None)
        unit = unit_of(divisor(scale))
        share = quotient(value * unit, divisor(scale) * unit)
        # With float8's bias, which makes its denormals those of a float32.
        size = (minimum(share.function("abs"), 1.0) * (_LARGEST * 2.0**-120)).bits()
        code = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20).named("code")
        if random is not None:
            is_exact = self.load((code.of_bits(torch.float8_e4m3fn), scale)).same(value.function("abs"))
            of_scale = value.function("abs") / divisor(scale)
            code = code_at_random(code, is_exact, of_scale, _share_of, random, (0, _LARGEST_CODE))
        positive = where((value > 0.0) & (code < 1), 1, code)
        code = where(value < 0.0, code | 0x80, code) if self.signed else positive
        return code.of_bits(torch.float8_e4m3fn), scale
