"""A Triton kernel for products that are symmetric: half the tiles are computed, each is written twice."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

POINTERS = ["left", "right", "base", "scale", "out", "shifted", "sizes"]


@triton.jit
def aligned(pointer):
    """The pointer with the promise that it lies at a multiple of 16 bytes.

    Triton keeps no promise about an argument, and from 3.8 on none about one that casts alone have left as it was.
    """
    return tl.multiple_of((pointer.to(tl.int64, bitcast=True) & -16).to(pointer.dtype, bitcast=True), 16)


@triton.jit
def write_tile(value, out, at, mirrored, inside, mirror_inside, WHOLE: tl.constexpr):
    """Write a tile and its mirror image; without masks, which would take the stores apart, where none are needed."""
    value = value.to(out.dtype.element_ty)
    if WHOLE:
        tl.store(out + at, value)
        tl.store(out + mirrored, tl.trans(value))
    else:
        tl.store(out + at, value, mask=inside)
        tl.store(out + mirrored, tl.trans(value), mask=mirror_inside)


@triton.jit(do_not_specialize_on_alignment=["left", "right", "base", "scale", "out", "shifted", "sizes"])
def symmetric_tiles(
    left,
    right,
    base,
    scale,
    out,
    shifted,
    sizes,
    alpha: tl.float32,
    beta: tl.float32,
    shift: tl.float32,
    TALL: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_SHIFTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """`out = scale * (alpha * left @ right.mT + beta * base)`, and `shifted = out + shift * identity`.

    `sizes`: rows of the result, inner size, tiles of a matrix. Operands are [matrices, rows, inner], or
    [matrices, inner, rows] where TALL. Inner sizes are multiples of BLOCK_K, rows of 16, and of BLOCK_M where EVEN.
    """
    # A matrix has less than 2^31 elements, so offsets inside one take 32 bits.
    rows = tl.multiple_of(tl.load(sizes).to(tl.int32), 16)
    inner = tl.multiple_of(tl.load(sizes + 1).to(tl.int32), 16)
    count = tl.load(sizes + 2).to(tl.int32)
    program = tl.program_id(0)
    matrix = (program // count).to(tl.int64)
    tile = program % count
    # Tiles run along the rows of the lower triangle: row i has RATIO * (i + 1), the last perhaps fewer.
    RATIO: tl.constexpr = BLOCK_M // BLOCK_N
    i = ((tl.sqrt(8.0 * (tile // RATIO).to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(RATIO * i * (i + 1) // 2 > tile, i - 1, i)
    i = tl.where(RATIO * (i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    j = tile - RATIO * i * (i + 1) // 2
    row = i * BLOCK_M + tl.arange(0, BLOCK_M)
    column = j * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    if EVEN:
        m = row
        n = column
    else:
        # Rows past the end read the first ones; they are not written.
        m = tl.max_contiguous(tl.multiple_of(row % rows, 16), 16)
        n = tl.max_contiguous(tl.multiple_of(column % rows, 16), 16)
    first = tl.multiple_of(matrix * rows * inner, 16)
    left = aligned(left) + first
    right = aligned(right) + first
    if TALL:
        left_at = left + (lane[None, :] * rows + m[:, None])
        right_at = right + (lane[:, None] * rows + n[None, :])
        stride = rows * BLOCK_K
    else:
        left_at = left + (m[:, None] * inner + lane[None, :])
        right_at = right + (n[None, :] * inner + lane[:, None])
        stride = inner * 0 + BLOCK_K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, inner, BLOCK_K):
        total = tl.dot(tl.load(left_at), tl.load(right_at), total)
        left_at += stride
        right_at += stride
    total *= alpha
    square = tl.multiple_of(matrix * rows * rows, 16)
    at = square + row[:, None] * rows + column[None, :]
    mirrored = square + column[:, None] * rows + row[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < rows)
    mirror_inside = (column[:, None] < rows) & (row[None, :] < rows)
    base, out, shifted = aligned(base), aligned(out), aligned(shifted)
    if HAS_BASE:
        if EVEN:
            total += beta * tl.load(base + at).to(tl.float32)
        else:
            total += beta * tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
    total *= tl.load(scale + matrix)
    if (j + 1) * BLOCK_N <= i * BLOCK_M:
        write_tile(total, out, at, mirrored, inside, mirror_inside, EVEN)
        if HAS_SHIFTED:
            write_tile(total, shifted, at, mirrored, inside, mirror_inside, EVEN)
    else:
        # On the diagonal each element has one of two roundings; the lower one counts for both.
        inside = inside & (row[:, None] >= column[None, :])
        mirror_inside = mirror_inside & (row[None, :] > column[:, None])
        write_tile(total, out, at, mirrored, inside, mirror_inside, False)
        if HAS_SHIFTED:
            total = tl.where(row[:, None] == column[None, :], total + shift, total)
            write_tile(total, shifted, at, mirrored, inside, mirror_inside, False)
