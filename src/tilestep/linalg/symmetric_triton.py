"""A Triton kernel for products that are symmetric: half the tiles are computed, each is written twice."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["DESCRIPTORS", "TensorDescriptor", "symmetric_tiles"]

DESCRIPTORS = ["left", "right", "base", "out"]
"""Arguments that are descriptors of [matrices, rows, columns]: Hopper's copy engine loads and stores their blocks."""


@triton.jit
def block_place(place):
    """Row and column of a block by its place in the lower triangle, which is numbered row by row."""
    i = ((tl.sqrt(8.0 * place.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > place, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= place, i + 1, i)
    return i, place - i * (i + 1) // 2


@triton.jit(do_not_specialize_on_alignment=["left", "right", "base", "scale", "out", "sizes"])
def symmetric_tiles(
    left,
    right,
    base,
    scale,
    out,
    sizes,
    alpha: tl.float32,
    beta: tl.float32,
    shift: tl.float32,
    TALL: tl.constexpr,
    HAS_BASE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`out = scale * (alpha * left @ right.mT + beta * base + shift * identity)`.

    `sizes`: inner size, blocks of a matrix. Operands are [matrices, rows, inner], or [matrices, inner, rows] where
    TALL. Loads past the end are zero, stores there are dropped. A program computes a block and its mirror image.
    """
    inner = tl.load(sizes).to(tl.int32)
    count = tl.load(sizes + 1).to(tl.int32)
    program = tl.program_id(0)
    matrix = program // count
    i, j = block_place(program % count)
    row = i * BLOCK
    column = j * BLOCK
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, inner, BLOCK_K):
        if TALL:
            rows = tl.trans(left.load([matrix, k, row]).reshape(BLOCK_K, BLOCK))
            columns = right.load([matrix, k, column]).reshape(BLOCK_K, BLOCK)
        else:
            rows = left.load([matrix, row, k]).reshape(BLOCK, BLOCK_K)
            columns = tl.trans(right.load([matrix, column, k]).reshape(BLOCK, BLOCK_K))
        total = tl.dot(rows, columns, total)
    factor = tl.load(scale + matrix)
    total *= alpha * factor
    if HAS_BASE:
        total += (beta * factor) * base.load([matrix, row, column]).reshape(BLOCK, BLOCK).to(tl.float32)
    if row > column:
        value = total.to(out.dtype)
        out.store([matrix, column, row], tl.trans(value).reshape(1, BLOCK, BLOCK))
    else:
        lane = tl.arange(0, BLOCK)
        total += tl.where(lane[:, None] == lane[None, :], factor * shift, 0.0)
        value = total.to(out.dtype)
        # Each element has one of two roundings here; the lower one counts for both.
        value = tl.where(lane[:, None] >= lane[None, :], value, tl.trans(value))
    out.store([matrix, row, column], value.reshape(1, BLOCK, BLOCK))
