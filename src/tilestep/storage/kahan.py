"""A bfloat16 with its rounding error in a second bfloat16."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .format import Term, if_rounds_to, where
from .masters import MasterFormat, master_format


@master_format("kahan")
class Kahan(MasterFormat):
    """The bfloat16 nearest to a value, and the bfloat16 nearest to the rounding error: 16 or more bits of precision.

    If the sum of the two would round to another bfloat16, as just below half a unit in the last place, the difference
    is rounded toward zero. Infinity and NaN have no difference.

    Source: Kahan summation, as in optimi and torchao.
    """

    title = "kahan"
    key = "compensation_param"
    is_coarse = True

    def load(self, elements: Sequence[Term]) -> Term:
        high, low = elements
        return if_rounds_to(high, (high.number() + low.number()).named("total"))

    def store(self, value: Term) -> tuple[Term, ...]:
        high = value.element(torch.bfloat16).named("high")
        rest = (value - high.number()).named("rest")
        nearest = rest.element(torch.bfloat16).named("nearest")
        total = (high.number() + nearest.number()).element(torch.bfloat16)
        shorter = rest.bits() >> 16
        chosen = where(total.bits().same(high.bits()), nearest.bits(), shorter)
        is_finite = (rest - rest).same(0.0).named("is_finite")
        return high, where(is_finite, chosen, 0).of_bits(torch.bfloat16).named("low")
