"""The layout of blocks: 128 neighbours along the last dimension of a tensor; the last block of a row may be short.

If the last dimension is shorter than a block, a row spans several dimensions: for a convolution's weight, all but the
first. So a shard along the first dimension holds whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

BLOCK = 128  # elements of a block


def rows_of(shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the dimensions that index rows of blocks, and the elements of a row."""
    if not shape:
        return (), 1
    dim, columns = len(shape) - 1, int(shape[-1])
    while dim > 1 and columns < BLOCK:
        dim -= 1
        columns *= int(shape[dim])
    return tuple(shape[:dim]), columns


def lie_in_rows(shape: Sequence[int], dim: int) -> bool:
    """Whether no block crosses rows that span all dimensions from `dim` on, wherever rows are cut at block ends."""
    columns, row = rows_of(shape)[1], math.prod(shape[dim:])
    return row == columns or (row % max(columns, 1) == 0 and columns % BLOCK == 0)


def shape_of_entries(shape: Sequence[int], elements: int) -> tuple[int, ...]:
    """The shape of an array with an entry per `elements` neighbours of a row."""
    if elements == 1:
        return tuple(shape)
    lead, columns = rows_of(shape)
    return (*lead, -(-columns // elements))


def entries_before(shape: Sequence[int], element: int, elements: int) -> int:
    """Return the number of entries, in the shape of `shape_of_entries`, before an element that starts a block."""
    if not element or elements == 1:
        return element
    columns = rows_of(shape)[1]
    line, column = divmod(element, columns)
    return line * -(-columns // elements) + -(-column // elements)


def cut(tensor: torch.Tensor, columns: int, elements: int = 1) -> torch.Tensor:
    """Return a tensor's entries, a row per block; short blocks are padded with zeros."""
    blocks = -(-columns // BLOCK)
    rows = tensor.reshape(-1, -(-columns // elements))
    missing = blocks * (BLOCK // elements) - rows.shape[1]
    if missing:
        rows = torch.cat([rows, rows.new_zeros(1).expand(len(rows), missing)], 1)
    return rows.reshape(-1, BLOCK // elements)


def joined(blocks: torch.Tensor, shape: Sequence[int], columns: int, elements: int = 1) -> torch.Tensor:
    """The inverse of `cut`: a tensor of this shape from rows of blocks."""
    per_row = -(-columns // BLOCK) * (BLOCK // elements)
    return blocks.reshape(-1, per_row)[:, : -(-columns // elements)].reshape(tuple(shape))
