"""Tiles of tensors, and kinds of norms: the term of an element, and how tiles combine."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import numpy as np
import torch

from ..kernels.spec import LARGEST_SUM, cut_tiles

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes that have kernels; a dtype's place is its code in the tables."""


class Order(enum.IntEnum):
    """The reduction before the root; the C++ source uses these values."""

    SQUARES = 0
    ABSOLUTE = 1
    POWER = 2
    NONZERO = 3
    LARGEST = 4
    SMALLEST = 5


def order_of(norm_type: float) -> Order:
    """The kind of a p-norm."""
    if norm_type == 2:
        return Order.SQUARES
    if norm_type == 1:
        return Order.ABSOLUTE
    if norm_type == 0:
        return Order.NONZERO
    if math.isinf(norm_type):
        return Order.LARGEST if norm_type > 0 else Order.SMALLEST
    return Order.POWER


def combine(parts: torch.Tensor, norm_type: float, *, root: bool = True) -> torch.Tensor:
    """The total norm from partial results before the root."""
    order = order_of(norm_type)
    if order is Order.SMALLEST:
        return torch.cat((parts, parts.new_full((1,), math.inf))).amin()
    if order is Order.LARGEST:
        return torch.cat((parts, parts.new_zeros(1))).amax()
    total = parts.sum()
    if not root or order not in (Order.SQUARES, Order.POWER):
        return total
    norm = total ** (1 / norm_type)
    return torch.where(total >= LARGEST_SUM, math.inf, norm) if order is Order.SQUARES else norm


def cut(numels: Sequence[int], dtypes: Sequence[torch.dtype], tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut tensors of these lengths into tiles; an empty tensor has none.

    Returns int64[tensors, 3], each tensor's length in elements, its first tile and its dtype's place in `DTYPES`, and
    int32[tiles], the tensor of each tile.
    """
    codes = {dtype: code for code, dtype in enumerate(DTYPES)}
    tiles = cut_tiles(numels, tile)
    rows = np.empty((len(dtypes), 3), dtype=np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2] = tiles.numel, tiles.first_tile, [codes[dtype] for dtype in dtypes]
    return rows, tiles.tile_tensor
