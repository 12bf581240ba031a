"""The table of operations on whole matrices: names, shapes, functions on batches, and workspace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Batch:
    """Matrices of the same shape whose operations have the same scalar arguments."""

    shape: tuple[int, int]  # rows and columns of each matrix
    members: list[int]  # the indices in the segment of the tensors with these matrices
    counts: list[int]  # the number of consecutive matrices in each of these tensors
    numbers: dict[int, float]  # the operations' scalar arguments, by `id` of the value
    chunk: int  # the number of matrices computed together
    device: torch.device
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)  # each scratch array, [matrices, rows, columns]
    states: dict[str, torch.Tensor] = field(default_factory=dict)  # each matrix state, [members, side, side]
    index: torch.Tensor = field(init=False)  # int64[matrices], the index of each matrix's tensor

    def __post_init__(self) -> None:
        places = [member for member, count in zip(self.members, self.counts) for _ in range(count)]
        self.index = torch.tensor(places, dtype=torch.int64, device=self.device)

    def parts(self, array: torch.Tensor) -> list[torch.Tensor]:
        """Split an array of all matrices by member."""
        return list(array.split(self.counts))


limit: int = 1 << 30  # the bound for new optimizers

_kept: ContextVar[int | None] = ContextVar("_kept", default=None)
"""The bound of the optimizer whose kernels are being prepared; None for `limit`."""


def limit_workspace(size: int) -> int:
    """Limit the workspace of matrix operations, for optimizers made after this call.

    Matrices of the same shape are computed together in chunks that fit the limit, at least one matrix at a time.
    Smaller chunks mean more launches.

    Args:
        size: bytes; the default is 1 GiB.

    Returns:
        The previous limit in bytes.

    Raises:
        ValueError: for a negative number.

    Example:
        >>> before = limit_workspace(4 << 30)
        >>> limit_workspace(before) == 4 << 30
        True
    """
    global limit
    if size < 0:
        raise ValueError(f"Invalid size: {size}; it must be at least 0 bytes")
    before, limit = limit, size
    return before


@contextmanager
def limited_workspace(bound: int | None) -> Iterator[None]:
    """A block that prepares matrix operations for the bound of an earlier optimizer; None for the current one."""
    token = _kept.set(bound)
    try:
        yield
    finally:
        _kept.reset(token)


def matrices_at_once(work: Sequence[str], shape: tuple[int, int], compute: torch.dtype, count: int) -> int:
    """The number of matrices per chunk for operations with these names."""
    rows, columns = shape
    needs = [1]
    for operation in map(MATRIX_OPERATIONS.get, work):
        extra = operation.workspace(rows, columns) if operation else 0
        needs.append((rows * columns + extra) * ((operation and operation.dtype) or compute).itemsize)
    kept = _kept.get()
    chunks = max(1, -(-count * max(needs) // max(limit if kept is None else kept, 1)))
    return max(1, -(-count // min(chunks, max(count, 1))))


Launch = tuple[Any, Sequence[Any]]  # the launcher of a Triton kernel, and its arguments

Space = tuple[str, str]
"""A matrix's numbers of rows and columns as sizes of its parameter: `("rows", "columns")` is the parameter's shape."""

PARAMETER: Space = ("rows", "columns")  # the parameter's shape

Run = Callable[[Sequence[torch.Tensor], Sequence[float], "torch.Tensor | None"], torch.Tensor]
"""Takes batches [B, R, C], scalars, and `out` or None; returns the result, which is `out` if given."""


@dataclass(frozen=True)
class MatrixOperation:
    """An operation on whole matrices."""

    name: str  # the name in graphs and messages
    operands: int  # the number of matrix arguments; further arguments are scalars known before the step
    space: Callable[..., Space]  # maps the operands' shapes to the result's
    run: Run
    dtype: torch.dtype | None = None  # the dtype of operands and result; None for the rule's compute type
    workspace: Callable[[int, int], int] = field(default=lambda rows, columns: 0)
    work: Callable[[int, int, Sequence[float]], float] = field(
        default=lambda rows, columns, numbers: 2.0 * rows * columns * min(rows, columns)
    )
    """Floating-point operations for a matrix, from its rows, columns and scalar arguments."""
    waits: bool = False  # whether the host waits for the device, so that no CUDA graph can hold the operation
    launches: Callable[[tuple[int, int], Sequence[float], torch.device], list[Launch]] | None = None


MATRIX_OPERATIONS: dict[str, MatrixOperation] = {}  # every operation by name


def register(operation: MatrixOperation) -> MatrixOperation:
    """Add an operation to the table."""
    MATRIX_OPERATIONS[operation.name] = operation
    return operation


register(
    MatrixOperation(
        "matmul", 2, lambda left, right: (left[0], right[1]), lambda operands, _, out: torch.bmm(*operands, out=out)
    )
)
"""`left @ right`."""

register(
    MatrixOperation(
        "transpose",
        1,
        lambda space: (space[1], space[0]),
        lambda operands, _, out: operands[0].mT if out is None else out.copy_(operands[0].mT),
    )
)
"""`matrix.mT`."""
