"""A float32 as a bfloat16 and what that lacks, in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .format import Array, Term, minimum, near_bits, where
from .masters import Widened, master_format


@master_format("remainder", key="remainder_param", dtypes=(torch.bfloat16,))
class Remainder(Widened):
    """A float32 as the bfloat16 nearest to it, and by how many units in float32's last place it is off that.

    The bits of a bfloat16 are the upper half of a float32's, so the difference of the bits is what rounding has taken
    away, from -32768 to 32768 units. Of these only 32768 does not fit 16 bits: a tie that was rounded down to even. It
    is kept as 32767, which leaves the bfloat16 what rounding makes of the value, and the value one unit off. NaN stays
    NaN, without its payload; everything else comes back as it was, by an addition of integers.

    Where other code has written to the bfloat16, a remainder that leads across zero or beyond infinity is left out. Any
    other stays: half a unit in the last place of what was written at most.

    Source: apex's DistributedFusedAdam has the same idea as `store_param_remainders`.
    """

    words = "bfloat16 with int16 remainder"
    title = "remainder"

    def arrays(self, name: str) -> tuple[Array, ...]:
        return (Array(name, torch.bfloat16), Array(f"remainder_{name}", torch.int16))

    def load(self, elements: Sequence[Term]) -> Term:
        high, low = elements
        return near_bits(high, low.bits())

    def store(self, value: Term) -> tuple[Term, ...]:
        high = value.element(torch.bfloat16).named("high")
        rest = (value.bits() - (high.bits() << 16)).named("rest")
        return high, where(value.function("isnan"), 0, minimum(rest, 32767)).of_bits(torch.int16).named("low")
