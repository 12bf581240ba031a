"""A read of one flat buffer on a GPU: the limit of a norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 8192


@triton.jit
def _sum_tiles(source, partial, length, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = tl.program_id(0).to(tl.int64)
    offsets = tile * TILE + tl.arange(0, TILE)
    values = tl.load(source + offsets, mask=offsets < length, other=0.0)
    tl.store(partial + tile, tl.sum(values))


def flat_read(flat: torch.Tensor) -> torch.Tensor:
    """Sum every tile of 8,192 elements of a flat fp32 tensor on a GPU; returns one sum per tile."""
    partial = torch.empty(triton.cdiv(flat.numel(), TILE), device=flat.device)
    _sum_tiles[(partial.numel(),)](flat, partial, flat.numel(), TILE=TILE, num_warps=8)
    return partial
