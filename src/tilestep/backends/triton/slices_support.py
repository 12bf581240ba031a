"""The hand-written kernel that combines what tiles have left of rows, columns and other slices."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from .support import larger, smaller

COMBINE_POINTERS = ["parts", "out", "tile_tensor", "first_tile", "places", "grads"]


@triton.jit(do_not_specialize_on_alignment=["parts", "out", "tile_tensor", "first_tile", "places", "grads"])
def combine_parts(
    parts,
    out,
    tile_tensor,
    first_tile,
    places,
    grads,
    OPERATION: tl.constexpr,
    SLICES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Results of a reduction to slices: part k of slice o * inner + x lies at (o * count + k) * inner + x.

    Parts of neighbouring slices lie side by side: those of rows with all rows of the tensor as `inner`.

    places: int64[tensors, 5], slices of a tensor, parts of a slice, inner, where its parts begin, where its slices do.
    """
    t = tl.load(tile_tensor + tl.program_id(0)).to(tl.int64)
    places += t * 5
    slice_count = tl.load(places)
    part_count = tl.load(places + 1)
    inner = tl.load(places + 2)
    which = (tl.program_id(0) - tl.load(first_tile + t)) * SLICES + tl.arange(0, SLICES)[None, :]
    first = tl.load(places + 3) + which // inner * part_count * inner + which % inner
    k = tl.arange(0, PARTS)[:, None]
    if OPERATION == "reduce_sum":
        neutral = 0.0
    elif OPERATION == "reduce_amax":
        neutral = float("-inf")
    else:
        neutral = float("inf")
    total = tl.full((PARTS, SLICES), neutral, tl.float64)
    if tl.load(grads + t) != 0:
        start = 0
        while start < part_count:
            mask = (which < slice_count) & (start + k < part_count)
            part = tl.load(parts + first + (start + k) * inner, mask=mask, other=neutral).to(tl.float64)
            if OPERATION == "reduce_sum":
                total += part
            elif OPERATION == "reduce_amax":
                total = larger(total, part)
            else:
                total = smaller(total, part)
            start += PARTS
        if OPERATION == "reduce_sum":
            combined = tl.sum(total, 0, keep_dims=True)
        elif OPERATION == "reduce_amax":
            combined = tl.reduce(total, 0, larger, keep_dims=True)
        else:
            combined = tl.reduce(total, 0, smaller, keep_dims=True)
        place = out + tl.load(places + 4) + which
        tl.store(place, combined.to(out.dtype.element_ty), mask=which < slice_count)
