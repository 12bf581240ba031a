"""The matrices inside a tensor: a batch of matrices, a flattened convolution, or blocks of rows (heads, splits)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_WINDOW = 7  # last dimensions up to this size are taken for a convolution's kernel size


@dataclass(frozen=True)
class Cut:
    """Some rows of a tensor: the same range of rows in each of several groups of equal size."""

    dim: int  # the dimension of rows
    groups: int
    start: int  # the half-open range of rows in each group
    stop: int

    def spans(self, rows: int, first: int, last: int) -> list[slice]:
        """The slices of this cut in a part with rows `first` to `last` of a tensor: of groups if several, and of rows.

        Raises:
            ValueError: if the cut has several groups and the part does not consist of whole groups.
        """
        size = self.stop - self.start
        if self.groups == 1:
            return [slice(*(min(max(row - self.start, 0), size) for row in (first, last)))]
        period = rows // self.groups
        if first % period or last % period:
            raise ValueError(f"rows {first} to {last} are not whole groups of {period} rows")
        return [slice(first // period, last // period), slice(0, size)]

    def within(self, rows: int, first: int, last: int) -> Cut:
        """The cut of such a part that selects the same rows."""
        *groups, inside = self.spans(rows, first, last)
        count = groups[0].stop - groups[0].start if groups else 1
        start = self.start + inside.start - (0 if groups else first)
        if inside.stop == inside.start or count == 0:
            return Cut(self.dim, 1, 0, 0)
        return Cut(self.dim, count, start, start + inside.stop - inside.start)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of these rows."""
        if self.groups > 1:
            tensor = tensor.unflatten(self.dim, (self.groups, -1))
        return tensor.narrow(self.dim + (self.groups > 1), self.start, self.stop - self.start)


@dataclass(frozen=True)
class Matrices:
    """Matrices of the same shape in a tensor, in the order of its indices."""

    rows: int
    columns: int
    cut: Cut | None = None  # the part of the tensor that holds them; None for all of it

    def count(self, numel: int) -> int:
        """The number of matrices in `numel` elements of the tensor."""
        return numel // max(self.rows * self.columns, 1)


def leading_dims(matrices: Matrices | None, shape: Sequence[int]) -> int:
    """The number of leading batch dimensions of a tensor; 0 for a flattened convolution."""
    is_stack = matrices is None or matrices.columns == shape[-1]
    return max(len(shape) - 2, 0) if is_stack else 0


def find_matrices(
    shape: Sequence[int], *, flatten: bool = False, heads: int | None = None, splits: Sequence[int] | None = None
) -> list[Matrices]:
    """The matrices of a tensor with at least two dimensions, grouped by shape.

    Args:
        shape: the tensor's shape; dimensions before the last two are batch dimensions.
        flatten: whether all dimensions but the first are columns.
        heads: the number of row blocks of equal size in each matrix.
        splits: the sizes of row blocks. If the rows are a multiple of their sum, the blocks repeat, and blocks with
            the same index form one matrix.

    Raises:
        ValueError: for rows that cannot be cut so, and for a convolution without `flatten`.

    Example:
        >>> find_matrices((6, 3, 3, 3), flatten=True, heads=2)
        [Matrices(rows=3, columns=27, cut=None)]
        >>> [(one.rows, one.cut) for one in find_matrices((8, 5), splits=(6, 2))]
        [(6, Cut(dim=0, groups=1, start=0, stop=6)), (2, Cut(dim=0, groups=1, start=6, stop=8))]
    """
    if not flatten and len(shape) > 3 and max(shape[-2:]) <= _WINDOW:
        raise ValueError("its last dimensions are a convolution's kernel; flatten=True takes them as columns")
    dim = 0 if flatten else len(shape) - 2
    rows, columns = shape[dim], math.prod(shape[dim + 1 :])
    if heads is not None and splits is not None:
        raise ValueError("it has heads and splits; set only one of them")
    if heads is not None:
        if rows % heads:
            raise ValueError(f"its {rows} rows are not divisible by heads={heads}")
        return [Matrices(rows // heads, columns)]
    if splits is None:
        return [Matrices(rows, columns)]
    total = sum(splits)
    if rows % total:
        raise ValueError(f"its {rows} rows are not a multiple of {total}, the sum of splits={tuple(splits)}")
    groups = rows // total
    if groups == 0 or (groups == 1 and len(set(splits)) == 1):
        return [Matrices(splits[0] if groups else 0, columns)]
    ends = [sum(splits[: place + 1]) for place in range(len(splits))]
    return [Matrices(groups * size, columns, Cut(dim, groups, end - size, end)) for size, end in zip(splits, ends)]
