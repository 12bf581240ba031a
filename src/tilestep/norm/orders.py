"""The kinds of norm: what each element gives, how tiles combine, and which root ends it."""

from __future__ import annotations

import enum
import math

import torch

from ..control_numbers import LARGEST_SUM

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes that have kernels; a dtype's place is its code in the tables."""


class Order(enum.IntEnum):
    """What is computed before the root; the values are known to the C++ source."""

    SQUARES = 0
    ABSOLUTE = 1
    POWER = 2
    NONZERO = 3
    LARGEST = 4
    SMALLEST = 5


def order_of(norm_type: float) -> Order:
    """The kind of a p-norm.

    Example:
        >>> order_of(2.0), order_of(float("-inf"))
        (<Order.SQUARES: 0>, <Order.SMALLEST: 5>)
    """
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
    """The norm of the whole from what its parts gave before the root.

    Args:
        parts: float64[number of parts], each sum |x|^p, max |x|, min |x| or a count.

    Example:
        >>> combine(torch.tensor([9.0, 16.0], dtype=torch.float64), 2.0)
        tensor(5., dtype=torch.float64)
    """
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
