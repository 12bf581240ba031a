"""Which matrices a tensor holds: a stack of them, a convolution's as rows, or blocks of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_WINDOW = 7  # sides up to this are those of a convolution's window


@dataclass(frozen=True)
class Cut:
    """Some rows of a tensor: the same ones of every group of rows."""

    dim: int  # the dimension of rows
    groups: int
    start: int  # the first row in each group, and the one after the last
    stop: int

    def spans(self, rows: int, first: int, last: int) -> list[slice]:
        """Where a part with some of a tensor's rows has these rows: in groups, where there are several, and in each.

        Raises:
            ValueError: for a part of a group, of several groups.
        """
        size = self.stop - self.start
        if self.groups == 1:
            return [slice(*(min(max(row - self.start, 0), size) for row in (first, last)))]
        period = rows // self.groups
        if first % period or last % period:
            raise ValueError(f"rows {first} to {last} are no whole groups of {period} rows")
        return [slice(first // period, last // period), slice(0, size)]

    def within(self, rows: int, first: int, last: int) -> Cut:
        """These rows as rows of such a part."""
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
    """Matrices of one shape inside of a tensor, one behind the other in the order of its indices."""

    rows: int
    columns: int
    cut: Cut | None = None  # the part of the tensor that holds them; None for all of it

    def count(self, numel: int) -> int:
        """How many of them so many elements of the tensor are."""
        return numel // max(self.rows * self.columns, 1)


def leading_dims(matrices: Matrices | None, shape: Sequence[int]) -> int:
    """The first dimensions of a tensor that count matrices; 0 where they are rows, as in a flattened convolution."""
    is_stack = matrices is None or matrices.columns == shape[-1]
    return max(len(shape) - 2, 0) if is_stack else 0


def find_matrices(
    shape: Sequence[int], *, flatten: bool = False, heads: int | None = None, splits: Sequence[int] | None = None
) -> list[Matrices]:
    """The matrices of a tensor with at least two dimensions, those of one shape together.

    Args:
        shape: its shape; dimensions before the last two count matrices.
        flatten: whether all dimensions but the first are columns.
        heads: blocks of rows of one size in each matrix.
        splits: sizes of blocks of rows; if their sum is a part of the rows they repeat, and equal places form one
            matrix.

    Raises:
        ValueError: for rows that cannot be cut so, and for a convolution without `flatten`.

    Example:
        >>> find_matrices((6, 3, 3, 3), flatten=True, heads=2)
        [Matrices(rows=3, columns=27, cut=None)]
        >>> [(one.rows, one.cut) for one in find_matrices((8, 5), splits=(6, 2))]
        [(6, Cut(dim=0, groups=1, start=0, stop=6)), (2, Cut(dim=0, groups=1, start=6, stop=8))]
    """
    if not flatten and len(shape) > 3 and max(shape[-2:]) <= _WINDOW:
        raise ValueError("its last sides are those of a convolution's window; flatten=True takes them as columns")
    dim = 0 if flatten else len(shape) - 2
    rows, columns = shape[dim], math.prod(shape[dim + 1 :])
    if heads is not None and splits is not None:
        raise ValueError("it has heads and splits; give one of them")
    if heads is not None:
        if rows % heads:
            raise ValueError(f"its {rows} rows are not {heads} heads of one size")
        return [Matrices(rows // heads, columns)]
    if splits is None:
        return [Matrices(rows, columns)]
    total = sum(splits)
    if rows % total:
        raise ValueError(f"its {rows} rows are no multiple of the {total} of splits={tuple(splits)}")
    groups = rows // total
    if groups == 0 or (groups == 1 and len(set(splits)) == 1):
        return [Matrices(splits[0] if groups else 0, columns)]
    ends = [sum(splits[: place + 1]) for place in range(len(splits))]
    return [Matrices(groups * size, columns, Cut(dim, groups, end - size, end)) for size, end in zip(splits, ends)]
