"""A bfloat16 with eight more bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .format import Term, maximum, minimum, near_bits
from .masters import MasterFormat, master_format


@master_format("int8")
class Corrected(MasterFormat):
    """A float32 in 24 bits: the nearest bfloat16, and the distance in 256ths of its last place.

    The bits of a bfloat16 are the upper half of a float32's. The difference of the bits, -32768 to 32768, is divided by
    256, rounded to even and clamped to -127 to 127, so that the bfloat16 stays the nearest. A value is restored with
    16 bits of precision; a value of at most 16 bits that is not within a 256th of a tie is restored exactly.

    Source: FlashOptim (arXiv 2602.23349) keeps corrections of eight bits, in 127ths of half a place.
    """

    title = "corrected"
    key = "correction_param"
    buffer_dtype = torch.int8
    is_coarse = True

    def load(self, elements: Sequence[Term]) -> Term:
        high, low = elements
        return near_bits(high, low.bits() << 8)

    def store(self, value: Term) -> tuple[Term, ...]:
        high = value.element(torch.bfloat16).named("high")
        rest = value.bits() - high.number().bits()
        # The last place of a float32 of 2^31 is 256: the sum rounds the difference to even, and its bits count 256ths.
        counted = (rest + 0x4B400000).of_bits() + (1.5 * 2.0**31 - 1.5 * 2.0**23)
        low = maximum(minimum(counted, 1.5 * 2.0**31 + 127 * 256), 1.5 * 2.0**31 - 127 * 256)
        # The correction of NaN is irrelevant: no correction makes it a number.
        return high, low.bits().of_bits(torch.int8).named("low")
