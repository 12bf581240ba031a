"""Triton kernels that list the set bits of a table, and the weights of these bits."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from .support import INTERPRETED, libdevice, loop_bound

WORDS = 512  # words per program: 16,384 weights

POINTERS = ["words_table", "blocks", "counts", "indices", "values"]


@triton.jit
def bits_in(words):
    """The number of set bits of each word."""
    if INTERPRETED:
        pairs = words - ((words >> 1) & 0x55555555)
        fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
        eights = (fours + (fours >> 4)) & 0x0F0F0F0F
        return ((eights + (eights >> 8) + (eights >> 16) + (eights >> 24)) & 0x3F).to(tl.int32)
    else:
        return libdevice.popc(words.to(tl.int32, bitcast=True))


@triton.jit
def block_of(words_table, blocks, WORDS: tl.constexpr):
    """The words of this program's block. blocks[n, 4]: first word, one past the last word of the tensor, index of the
    block's first weight in its tensor, address of the tensor's memory."""
    place = tl.load(blocks + tl.program_id(0) * 4) + tl.arange(0, WORDS)
    there = place < tl.load(blocks + tl.program_id(0) * 4 + 1)
    return tl.load(words_table + place, mask=there, other=0).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=["words_table", "blocks", "counts"])
def count_changes(words_table, blocks, counts, WORDS: tl.constexpr):
    """Set bits of each block of words: counts[blocks], int64."""
    words = block_of(words_table, blocks, WORDS)
    tl.store(counts + tl.program_id(0), tl.sum(bits_in(words), 0).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=POINTERS)
def list_changes(words_table, blocks, counts, indices, values, WORDS: tl.constexpr, BYTES: tl.constexpr):
    """Indices and values of the weights whose bits are set, a set bit of each word at a time.

    counts[blocks]: set bits of all blocks up to this one, itself included. indices, values: of all, one after the
    other; values as integers of so many bytes.
    """
    words = block_of(words_table, blocks, WORDS)
    row = blocks + tl.program_id(0) * 4
    own = bits_in(words)
    target = tl.load(counts + tl.program_id(0)) - tl.sum(own, 0) + tl.cumsum(own, 0) - own
    index = tl.load(row + 2) + tl.arange(0, WORDS) * 32
    address = tl.load(row + 3)
    if BYTES == 2:
        weights = address.to(tl.pointer_type(tl.int16))
    elif BYTES == 4:
        weights = address.to(tl.pointer_type(tl.int32))
    else:
        weights = address.to(tl.pointer_type(tl.int64))
    for _ in tl.range(0, loop_bound(tl.max(own, 0))):
        lowest = words & (0 - words)
        is_set = words != 0
        place = index + bits_in(lowest - 1)
        tl.store(indices + target, place.to(indices.dtype.element_ty), mask=is_set)
        tl.store(values + target, tl.load(weights + place, mask=is_set, other=0), mask=is_set)
        words = words ^ lowest
        target += 1
