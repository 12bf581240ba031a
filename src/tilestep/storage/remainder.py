"""A float32 as a bfloat16 and its rounding error in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .format import Term, minimum, near_bits, where
from .masters import MasterFormat, master_format


@master_format("remainder")
class Remainder(MasterFormat):
    """A float32 as its nearest bfloat16, and the distance in units of float32's last place.

    The bits of a bfloat16 are the upper half of a float32's, so the difference of the bits is the rounding
    error, from -32768 to 32768 units. Only 32768 does not fit 16 bits: a tie that was rounded down to even. It is
    stored as 32767, so that the bfloat16 stays the rounded value, and the value is off by one unit. NaN stays NaN,
    without its payload; all other values are restored exactly, by an addition of integers.

    If other code has written to the bfloat16, a remainder across zero or beyond infinity is ignored. Any other
    remainder changes the written value by at most half a unit in its last place.

    Source: `store_param_remainders` of apex's DistributedFusedAdam.
    """

    title = "remainder"
    key = "remainder_param"
    buffer_dtype = torch.int16

    def load(self, elements: Sequence[Term]) -> Term:
        high, low = elements
        return near_bits(high, low.bits())

    def store(self, value: Term) -> tuple[Term, ...]:
        high = value.element(torch.bfloat16).named("high")
        rest = (value.bits() - (high.bits() << 16)).named("rest")
        return high, where(value.function("isnan"), 0, minimum(rest, 32767)).of_bits(torch.int16).named("low")
