"""States in eight bits, with a scale per block of 128."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .blocks import BLOCK
from .companded import compressed, counted, expanded, root_scale, scale_of, squared
from .format import Array, Term
from .states import Blocks, blocks_format


@blocks_format("int8")
class Int8Blocks(Blocks):
    """Companded blocks of signed numbers, or of the roots of numbers that are never negative.

    A block of signed numbers with an infinity is NaN: codes do not represent signed infinities.

    Source: FlashOptim (arXiv 2602.23349), with blocks of 128 that follow rows, and scales in bfloat16.
    """

    titles = ("int8_blocks", "uint8_root_blocks")
    words = ("int8 blocks", "uint8 blocks of the root")

    def arrays(self, name: str) -> tuple[Array, ...]:
        codes = Array(f"{name}_codes", torch.int8 if self.signed else torch.uint8)
        return (codes, Array(f"{name}_scales", torch.bfloat16, BLOCK))

    def load(self, elements: Sequence[Term]) -> Term:
        code, scale = elements
        return expanded(code.number(), scale, 127) if self.signed else squared(code.number(), scale, 255)

    def store(self, value: Term, random: Term | None = None) -> tuple[Term, ...]:
        if self.signed:
            scale = scale_of(value, random is not None, keeps_infinity=False)
            return compressed(value, scale, 127, random).of_bits(torch.int8), scale
        scale = root_scale(value, random is not None)
        return counted(value, scale, 255, random).of_bits(torch.uint8), scale
