"""States in eight bits, with a scale per block of 128."""

from __future__ import annotations

from collections.abc import Sequence

from .companded import compressed, counted, expanded, root_scale, scale_of, squared
from .format import Term
from .states import Blocks, blocks_format


@blocks_format("int8")
class Int8Blocks(Blocks):
    """Companded blocks of signed numbers, or of the roots of numbers that are never negative.

    A block of signed numbers with an infinity is NaN: codes do not represent signed infinities.

    Source: FlashOptim (arXiv 2602.23349), with blocks of 128 that follow rows, and scales in bfloat16.
    """

    titles = ("int8_blocks", "uint8_root_blocks")
    words = ("int8 blocks", "uint8 blocks of the root")

    levels = (127, 255)

    def load(self, elements: Sequence[Term]) -> Term:
        code, scale = elements
        return self.number_of(code.number(), scale)

    def store(self, value: Term, random: Term | None = None) -> tuple[Term, ...]:
        code, scale = self.code_of(value, random)
        return code.of_bits(self.codes[not self.signed]), scale

    def number_of(self, code: Term, scale: Term) -> Term:
        """The number that a code stands for."""
        return expanded(code, scale, self.levels[0]) if self.signed else squared(code, scale, self.levels[1])

    def code_of(self, value: Term, random: Term | None, plus: int = 0) -> tuple[Term, Term]:
        """The code of a number in the lowest bits, plus an even integer if it is signed, and the scale."""
        if self.signed:
            scale = scale_of(value, random is not None, keeps_infinity=False)
            return compressed(value, scale, self.levels[0], random, plus), scale
        scale = root_scale(value, random is not None)
        return counted(value, scale, self.levels[1], random), scale
