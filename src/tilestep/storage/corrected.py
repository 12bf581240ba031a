"""A bfloat16 with eight more bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .format import Array, Term, maximum, minimum, near_bits
from .masters import Widened, master_format


@master_format("int8", key="correction_param", dtypes=(torch.bfloat16,))
class Corrected(Widened):
    """A float32 of 24 bits: the bfloat16 nearest to it, and by how many 256ths of its last place it is off that.

    The bits of a bfloat16 are the upper half of a float32's. The difference of the bits, -32768 to 32768, is divided by
    256, rounded to even and kept from -127 to 127, which leaves the bfloat16 the nearest one. So a value comes back as
    near as 16 bits of precision are; one of at most 16 bits, and not within a 256th of a tie, to the bit.

    Source: FlashOptim (arXiv 2602.23349) keeps corrections of eight bits, in 127ths of half a place.
    """

    words = "bfloat16 with int8 correction"
    title = "corrected"
    is_coarse = True

    def arrays(self, name: str) -> tuple[Array, ...]:
        return (Array(name, torch.bfloat16), Array(f"correction_{name}", torch.int8))

    def load(self, elements: Sequence[Term]) -> Term:
        high, low = elements
        return near_bits(high, low.bits() << 8)

    def store(self, value: Term) -> tuple[Term, ...]:
        high = value.element(torch.bfloat16).named("high")
        rest = value.bits() - high.number().bits()
        # A float32 of 2^31 ends at 256: the sum, whose bits count them, is the difference rounded to even.
        counted = (rest + 0x4B400000).of_bits() + (1.5 * 2.0**31 - 1.5 * 2.0**23)
        low = maximum(minimum(counted, 1.5 * 2.0**31 + 127 * 256), 1.5 * 2.0**31 - 127 * 256)
        # Beside NaN the correction says nothing: none makes a number of it.
        return high, low.bits().of_bits(torch.int8).named("low")
