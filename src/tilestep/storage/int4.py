"""States in four bits, with a scale per block of 128."""

from __future__ import annotations

from collections.abc import Sequence

from .companded import CodeBlocks
from .format import Term
from .states import blocks_format


@blocks_format("int4")
class Int4Blocks(CodeBlocks):
    """Companded blocks as `Int8Blocks`, two neighbours in a byte: the first in its lower half.

    A signed number is stored as -7 to 7 plus 8, the root of a number that is never negative as 0 to 15, 0 for zero
    only.
    """

    titles = ("int4_blocks", "uint4_root_blocks")
    words = ("int4 blocks", "uint4 blocks of the root")
    scales, together = "scales4", 2
    levels = (7, 15)

    def load(self, elements: Sequence[Term]) -> Term:
        code = elements[0].function("nibble").number()
        return self.number_of(code - 8.0 if self.signed else code, elements[1])

    def store(self, value: Term, random: Term | None = None) -> tuple[Term, ...]:
        code, scale = self.code_of(value, random, plus=8)
        return code.packed(self.codes[not self.signed]), scale
