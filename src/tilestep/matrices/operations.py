"""The table of operations on whole matrices: what each is called, the shape it makes, how it runs on a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Launch = tuple[Any, Sequence[Any]]
"""What launches one of Triton's kernels, and the arguments."""

Space = tuple[str, str]
"""How many rows and columns a matrix has, in words of its parameter: `("rows", "columns")` is the parameter's shape."""

PARAMETER: Space = ("rows", "columns")
"""The parameter's own shape."""

Run = Callable[[Sequence[torch.Tensor], Sequence[float], "torch.Tensor | None"], torch.Tensor]
"""From batches [B, R, C], numbers and, or None, where the result should go, to the result: `out` itself if given."""


@dataclass(frozen=True)
class MatrixOperation:
    """One operation on whole matrices.

    Args:
        run: computes it for a batch of matrices. Unless it `waits`, it reads nothing back from the device and keeps no
            tensor, so that it can be captured in a CUDA graph.
        launches: what of it Triton builds for matrices of a shape, with these numbers, on a device: kernels with their
            arguments, which are built before the first step in threads. None if it has no kernels of its own.
        workspace: elements that it needs for each matrix beside operands and result, from the matrix's rows and
            columns; roughly.
    """

    name: str  # what graphs and messages call it
    operands: int  # how many matrices it takes; any further arguments are numbers known before the step
    space: Callable[..., Space]  # from the operands' shapes to the result's
    run: Run
    dtype: torch.dtype | None = None  # what it takes and returns; None for the type that the rule computes in
    is_view: bool = False  # whether the result is the operand's own memory, seen otherwise
    workspace: Callable[[int, int], int] = field(default=lambda rows, columns: 0)
    waits: bool = False  # whether the host waits for the device in it, so that no CUDA graph can hold it
    launches: Callable[[tuple[int, int], Sequence[float], torch.device], list[Launch]] | None = None


MATRIX_OPERATIONS: dict[str, MatrixOperation] = {}
"""Every operation by name."""


def register(operation: MatrixOperation) -> MatrixOperation:
    """Add an operation to the table."""
    MATRIX_OPERATIONS[operation.name] = operation
    return operation
