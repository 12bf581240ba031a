"""How much memory matrix operations may take beside their operands and results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch

from .operations import MATRIX_OPERATIONS

limit: int = 1 << 30
"""The bound of an optimizer that is made now."""

_kept: ContextVar[int | None] = ContextVar("_kept", default=None)
"""The bound of the optimizer whose kernels are being prepared; None for the one of now."""


class Operation(Protocol):
    """A value of a graph, as far as its memory is concerned."""

    @property
    def operation(self) -> str: ...


def limit_workspace(size: int) -> int:
    """Bound the memory that a matrix operation takes while it runs; optimizers made from now on keep to it.

    Matrices of one shape are worked on together as far as the bound allows, at least one at a time. Smaller chunks mean
    more launches.

    Args:
        size: bytes; 1 GiB at first.

    Returns:
        The bound so far.

    Raises:
        ValueError: for a negative number.

    Example:
        >>> before = limit_workspace(4 << 30)
        >>> limit_workspace(before) == 4 << 30
        True
    """
    global limit
    if size < 0:
        raise ValueError(f"a workspace of {size} bytes; it must be at least 0")
    before, limit = limit, size
    return before


@contextmanager
def keeping_to(bound: int | None) -> Iterator[None]:
    """Prepare matrix operations for a bound that may have been set when another was; None takes that of now."""
    token = _kept.set(bound)
    try:
        yield
    finally:
        _kept.reset(token)


def matrices_at_once(work: Sequence[Operation], shape: tuple[int, int], compute: torch.dtype, count: int) -> int:
    """How many of a number of matrices are worked on together."""
    rows, columns = shape
    needs = [1]
    for value in work:
        operation = MATRIX_OPERATIONS.get(value.operation)
        extra = operation.workspace(rows, columns) if operation else 0
        needs.append((rows * columns + extra) * ((operation and operation.dtype) or compute).itemsize)
    kept = _kept.get()
    chunks = -(-count * max(needs) // max(limit if kept is None else kept, 1))
    return max(1, -(-count // min(chunks, count)))
