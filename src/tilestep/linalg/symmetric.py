"""Symmetric products of batches on a GPU, at half the arithmetic of a full product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..kernels.launch import Launcher
from .operations import Launch


@dataclass(frozen=True)
class Blocks:
    """How a product is cut up."""

    rows: int = 128  # rows of the result that a program computes, a multiple of `columns`
    columns: int = 128
    inner: int = 64  # products it adds up at a time
    warps: int = 8
    stages: int = 4  # loads in flight

    def count(self, rows: int) -> int:
        """Programs for the lower triangle of a square matrix."""
        high, wide, ratio = -(-rows // self.rows), -(-rows // self.columns), self.rows // self.columns
        return ratio * high * (high - 1) // 2 + min(ratio * high, wide)


BLOCKS = Blocks()

SMALLEST = 1024  # below, half the tiles are no gain: benchmarks/symmetric_products.py


def can_multiply(batch: torch.Tensor, blocks: Blocks | None = None) -> bool:
    """Whether `symmetric_product` takes products of this batch and of squares on its short side."""
    blocks = blocks or BLOCKS
    short, long = sorted(batch.shape[-2:])
    fits = short % max(blocks.inner, 16) == 0 and long % max(blocks.inner, 16) == 0
    return batch.is_cuda and batch.is_contiguous() and fits and _triton() is not None and batch.data_ptr() % 16 == 0


def pays(batch: torch.Tensor) -> bool:
    """Whether `symmetric_product` takes products of this batch, and is faster at them than torch's full ones."""
    return batch.is_cuda and batch.dtype.itemsize == 2 and min(batch.shape[-2:]) >= SMALLEST and can_multiply(batch)


def symmetric_launch(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    *,
    base: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    scale: torch.Tensor | None = None,
    shifted: torch.Tensor | None = None,
    shift: float = 0.0,
    blocks: Blocks | None = None,
) -> Launch:
    """The launch of `symmetric_product`, which takes the same."""
    dtypes = (left.dtype, right.dtype, None if base is None else base.dtype, out.dtype)
    shifted_dtype = None if shifted is None else shifted.dtype
    launcher, sizes, ones = _launcher(left.shape, out.size(-1), dtypes, shifted_dtype, blocks, out.device)
    return launcher, (
        left,
        right,
        out if base is None else base,
        ones if scale is None else scale,
        out,
        out if shifted is None else shifted,
        sizes,
        alpha,
        beta,
        shift,
    )


def symmetric_product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, **options: Any) -> torch.Tensor:
    """`scale * (alpha * left @ right.mT + beta * base)` for batches whose product is symmetric, such as X X^T."""
    launcher, arguments = symmetric_launch(left, right, out, **options)
    launcher(*arguments)
    return out


@lru_cache(maxsize=1)
def _triton() -> Any:
    try:
        from . import symmetric_triton
    except ImportError:
        return None
    return symmetric_triton


@lru_cache(maxsize=1024)
def _launcher(
    shape: torch.Size,
    rows: int,
    dtypes: tuple[torch.dtype | None, ...],
    shifted: torch.dtype | None,
    blocks: Blocks | None,
    device: torch.device,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A launcher for operands of these dtypes: what it has compiled for one reads another's bits wrongly."""
    blocks = blocks or BLOCKS
    matrices = shape[0]
    is_tall = shape[2] == rows and shape[1] != rows
    inner = shape[1] if is_tall else shape[2]
    constants = {
        "TALL": is_tall,
        "HAS_BASE": dtypes[2] is not None,
        "HAS_SHIFTED": shifted is not None,
        "BLOCK_M": blocks.rows,
        "BLOCK_N": blocks.columns,
        "BLOCK_K": blocks.inner,
        "EVEN": rows % blocks.rows == 0,
    }
    count = blocks.count(rows)
    launcher = Launcher(
        _triton().symmetric_tiles, matrices * count, device, constants, num_warps=blocks.warps, num_stages=blocks.stages
    )
    sizes = torch.tensor([rows, inner, count], dtype=torch.int64, device=device)
    return launcher, sizes, torch.ones(matrices, dtype=torch.float32, device=device)
