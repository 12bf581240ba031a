"""Triton kernels that list which bits of a table are set, and the weights that these stand for."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

WORDS = 128
"""Words that a program reads: 4,096 weights."""

POINTERS = ["tap_words", "first_word", "last_word", "begins", "addresses", "counts", "found", "values"]


@triton.jit
def bits_in(words):
    """How many bits of each word are set."""
    pairs = words - ((words >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    return (eights + (eights >> 8) + (eights >> 16) + (eights >> 24)) & 0x3F


@triton.jit(do_not_specialize_on_alignment=["tap_words", "first_word", "last_word", "counts"])
def count_changes(tap_words, first_word, last_word, counts, WORDS: tl.constexpr):
    """Set bits of each block of words: counts[blocks], int64."""
    block = tl.program_id(0)
    place = tl.load(first_word + block) + tl.arange(0, WORDS)
    words = tl.load(tap_words + place, mask=place < tl.load(last_word + block), other=0)
    tl.store(counts + block, tl.sum(bits_in(words.to(tl.uint32)).to(tl.int32), 0).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=POINTERS)
def list_changes(
    tap_words, first_word, last_word, begins, addresses, counts, found, values, WORDS: tl.constexpr, BYTES: tl.constexpr
):
    """Indices and values of the weights whose bits are set.

    begins[blocks]: index of each block's first weight in its tensor. addresses[blocks]: of the tensor's memory.
    counts[blocks]: set bits of all blocks up to this one, itself included. found, values: of all, one after the other;
    values as integers of so many bytes.
    """
    block = tl.program_id(0)
    start = tl.load(first_word + block)
    place = start + tl.arange(0, WORDS)
    words = tl.load(tap_words + place, mask=place < tl.load(last_word + block), other=0).to(tl.uint32)
    own = bits_in(words).to(tl.int32)
    within = tl.cumsum(own, 0) - own
    total = tl.sum(own, 0)
    if total > 0:
        lane = tl.arange(0, 32)
        bits = ((words[:, None] >> lane[None, :].to(tl.uint32)) & 1).to(tl.int32)
        # Bits of the word below this one.
        below = bits_in(words[:, None] & ((1 << lane[None, :].to(tl.uint32)) - 1)).to(tl.int32)
        target = tl.load(counts + block) - total + within[:, None] + below
        index = tl.load(begins + block) + tl.arange(0, WORDS)[:, None] * 32 + lane[None, :]
        is_set = bits != 0
        tl.store(found + target, index.to(found.dtype.element_ty), mask=is_set)
        if BYTES == 2:
            weights = tl.load(addresses + block).to(tl.pointer_type(tl.int16))
        elif BYTES == 4:
            weights = tl.load(addresses + block).to(tl.pointer_type(tl.int32))
        else:
            weights = tl.load(addresses + block).to(tl.pointer_type(tl.int64))
        tl.store(values + target, tl.load(weights + index, mask=is_set, other=0), mask=is_set)
