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
    """The block sizes and launch options of a product."""

    side: int = 128  # the side of the block that a program computes
    inner: int = 64  # the length of a step along the inner side
    warps: int = 4
    stages: int = 3  # loads in flight; with these defaults two programs share a multiprocessor

    def count(self, rows: int) -> int:
        """Programs for the lower triangle of a square matrix."""
        high = -(-rows // self.side)
        return high * (high + 1) // 2


BLOCKS = Blocks()

_COPY_ENGINE = (9, 0)  # the first compute capability with a tensor memory accelerator: Hopper's

SMALLEST = 768  # the least side: below, few tiles are saved, and launches take longer than torch's


def uses_symmetric_kernel(batch: torch.Tensor) -> bool:
    """Whether `symmetric_product` supports products of this batch, and is faster than torch's full products."""
    large = batch.is_cuda and batch.dtype.itemsize == 2 and min(batch.shape[-2:]) >= SMALLEST
    fits = large and batch.is_contiguous() and all(side % 16 == 0 for side in batch.shape[-2:])
    return fits and _copies_blocks(batch.device) and _triton() is not None and batch.data_ptr() % 16 == 0


@lru_cache(maxsize=64)
def _copies_blocks(device: torch.device) -> bool:
    """Whether a GPU has a tensor memory accelerator; without it the kernel waits for each load."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _COPY_ENGINE


def symmetric_launch(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    *,
    base: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    shift: float = 0.0,
    scale: torch.Tensor | None = None,
    blocks: Blocks | None = None,
) -> Launch:
    """The launch of `symmetric_product`, with the same arguments."""
    blocks = blocks or BLOCKS
    is_tall = left.size(-1) == out.size(-1) and left.size(-2) != out.size(-1)
    dtypes = left.dtype, right.dtype, None if base is None else base.dtype, out.dtype
    inner = left.size(-2 if is_tall else -1)
    launcher, sizes, ones = _launcher(left.size(0), out.size(-1), inner, is_tall, dtypes, blocks, out.device)

    def described(batch: torch.Tensor, rows: int, columns: int) -> Any:
        return _triton().TensorDescriptor.from_tensor(batch, [1, rows, columns])

    operand = (blocks.inner, blocks.side) if is_tall else (blocks.side, blocks.inner)
    square = described(out, blocks.side, blocks.side)
    return launcher, (
        described(left, *operand),
        described(right, *operand),
        square if base is None else described(base, blocks.side, blocks.side),
        ones if scale is None else scale,
        square,
        sizes,
        alpha,
        beta,
        shift,
    )


def symmetric_product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, **options: Any) -> torch.Tensor:
    """`scale * (alpha * left @ right.mT + beta * base + shift * identity)` for batches whose product is symmetric."""
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
    matrices: int,
    rows: int,
    inner: int,
    is_tall: bool,
    dtypes: tuple[torch.dtype | None, ...],
    blocks: Blocks,
    device: torch.device,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A launcher for operands of these dtypes: a compiled kernel would misread another dtype's bits."""
    constants = {
        "TALL": is_tall,
        "HAS_BASE": dtypes[2] is not None,
        "BLOCK": blocks.side,
        "BLOCK_K": blocks.inner,
    }
    count = blocks.count(rows)
    launcher = Launcher(
        _triton().symmetric_tiles, matrices * count, device, constants, num_warps=blocks.warps, num_stages=blocks.stages
    )
    sizes = torch.tensor([inner, count], dtype=torch.int64, device=device)
    return launcher, sizes, torch.ones(matrices, dtype=torch.float32, device=device)
