"""States in four bits, with a scale per block of 128."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .blocks import BLOCK
from .companded import compressed, counted, expanded, root_scale, scale_of, squared
from .format import Array, Term
from .states import Blocks, blocks_format


@blocks_format("int4")
class Int4Blocks(Blocks):
    """Companded blocks as `Int8Blocks`, two neighbours in a byte: the first in its lower half.

    A signed number is stored as -7 to 7 plus 8, the root of a number that is never negative as 0 to 15, 0 for zero
    only.
    """

    titles = ("int4_blocks", "uint4_root_blocks")
    words = ("int4 blocks", "uint4 blocks of the root")

    def arrays(self, name: str) -> tuple[Array, ...]:
        codes = Array(f"{name}_codes", torch.int8 if self.signed else torch.uint8, 2)
        return (codes, Array(f"{name}_scales4", torch.bfloat16, BLOCK))

    def load(self, elements: Sequence[Term]) -> Term:
        pair, scale = elements
        code = pair.function("nibble")
        return expanded(code.number() - 8.0, scale, 7) if self.signed else squared(code.number(), scale, 15)

    def store(self, value: Term, random: Term | None = None) -> tuple[Term, ...]:
        if self.signed:
            scale = scale_of(value, random is not None, keeps_infinity=False)
            return compressed(value, scale, 7, random, plus=8).packed(torch.int8), scale
        scale = root_scale(value, random is not None)
        return counted(value, scale, 15, random).packed(torch.uint8), scale
