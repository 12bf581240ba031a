"""States as float16, with a scale per block of 128."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .companded import LARGEST_SCALE, divisor, scale_of
from .format import Term, where
from .states import Blocks, blocks_format
from .stochastic import element_at_random

_LARGEST = 2.0**15


@blocks_format("scaled_float16")
class Float16Blocks(Blocks):
    """Numbers of eleven bits of precision relative to the largest of their block, which is stored as 2^15.

    Elements below 2e-12 of the largest become zero; if the state is never negative, only zero is stored as zero. An
    infinity is kept; the other numbers of its block then become infinite or, if they are zero, NaN.

    Source: `with_scaled_states` of apex's DistributedFusedAdam, which has one scale for a part of a bucket.
    """

    titles = ("float16_blocks", "float16_positive_blocks")
    words = ("float16 blocks", "float16 blocks without a sign")
    precision = torch.float16
    codes = (torch.float16, torch.float16)
    scales = "scales16"

    def load(self, elements: Sequence[Term]) -> Term:
        element, scale = elements
        return element.number() * (scale.number() / _LARGEST).named("unit")

    def store(self, value: Term, random: Term | None = None) -> tuple[Term, ...]:
        scale = scale_of(value)
        # Infinity divided by itself would be NaN.
        unit = where(scale.number() > LARGEST_SCALE, 1.0, divisor(scale)).named("unit")
        steps = ((value / unit) * _LARGEST).named("steps")
        kept = steps.element(torch.float16) if random is None else element_at_random(steps, torch.float16, random)
        if self.signed:
            return kept, scale
        is_lost = (value > 0.0) & kept.number().same(0.0)
        return where(is_lost, 1, kept.bits()).of_bits(torch.float16), scale
