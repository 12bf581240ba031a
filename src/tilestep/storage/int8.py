"""States in eight bits, with a scale per block of 128."""

from __future__ import annotations

from collections.abc import Sequence

from .companded import CodeBlocks
from .format import Term
from .states import blocks_format


@blocks_format("int8")
class Int8Blocks(CodeBlocks):
    """Companded blocks of signed numbers, or of the roots of numbers that are never negative.

    A block of signed numbers with an infinity is NaN: codes do not represent signed infinities.

    Source: FlashOptim (arXiv 2602.23349), with blocks of 128 that follow rows, and scales in bfloat16.
    """

    titles = ("int8_blocks", "uint8_root_blocks")
    words = ("int8 blocks", "uint8 blocks of the root")

    def load(self, elements: Sequence[Term]) -> Term:
        code, scale = elements
        return self.number_of(code.number(), scale)

    def store(self, value: Term, random: Term | None = None) -> tuple[Term, ...]:
        code, scale = self.code_of(value, random)
        return code.of_bits(self.codes[not self.signed]), scale
