"""How a pass over rows and columns sees its arrays: as matrices, whatever the number of dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .ir import Over


@dataclass(frozen=True)
class View:
    """Arrays as a batch of matrices, whose rows and columns tiles are cut along.

    Example:
        >>> view = View(over=None, dims=4, rows=(2, 3))
        >>> view.extents((8, 3, 5, 7)), view.place((3, 4)), view.place((2, 3)), view.place((2, 4)), view.place((1, 4))
        ((24, 5, 7), 'row', 'column', 'matrix', 'other')

    Args:
        over: the dimensions that the arrays have not, because they hold one number a slice; None for elements.
    """

    over: Over | None
    dims: int  # how many dimensions are left
    rows: Over  # which of those left are rows; those before number the matrices, those after are columns

    def extents(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Matrices, rows and columns of a tensor of this shape."""
        first, stop = self.over or (0, 0)
        left = [*shape[:first], *shape[stop:]]
        begin, end = self.rows
        return math.prod(left[:begin]), math.prod(left[begin:end]), math.prod(left[end:])

    def place(self, over: Over) -> str:
        """What slices without these dimensions are here: one number a "row", "column" or "matrix"; "own" or "other"."""
        if over == self.over:
            return "own"
        block = _left(over, self.over)
        begin, end = self.rows
        places = {(end, self.dims): "row", (begin, end): "column"}
        return places.get(block, "matrix" if block == (begin, self.dims) else "other")


def _left(block: Over, over: Over | None) -> Over:
    """A block of dimensions in the numbering of those left without the dimensions inside it."""
    first, stop = over or (0, 0)
    return block[0], block[1] - (stop - first)


def choose_views(
    over: Over | None, dims: int, reduced: Sequence[Over], read: Sequence[Over]
) -> list[tuple[View, list[Over]]]:
    """The views in which a pass can make its reductions, with those made in each; the first suits what it reads too.

    Example:
        >>> [(view, done)] = choose_views(None, 3, [(2, 3), (1, 2)], [])
        >>> view.rows, done
        ((1, 2), [(2, 3), (1, 2)])
    """
    first, stop = over or (0, 0)
    left = dims - (stop - first)
    waiting = list(dict.fromkeys(reduced))
    found: list[tuple[View, list[Over]]] = []
    while waiting or not found:
        view = View(
            over, left, _rows([_left(each, over) for each in waiting], [_left(each, over) for each in read], left)
        )
        done = [each for each in waiting if view.place(each) in ("row", "column")]
        waiting = [each for each in waiting if each not in done]
        found.append((view, done))
    return found


def _rows(reduced: Sequence[Over], read: Sequence[Over], dims: int) -> Over:
    """Which dimensions to see as rows, so that the first reductions and as much as possible of what is read fit."""
    column = next((block for block in reduced if block[1] < dims), None)
    if column is not None:
        return column
    columns = [block for block in read if block[1] < dims]
    ends = sorted({block[0] for block in (*reduced, *read) if block[1] == dims}, reverse=True)
    if reduced:
        end = reduced[0][0]
        beside = [block[0] for block in columns if block[1] == end]
        return next(iter([*beside, *(start for start in ends if start < end)]), 0), end
    if columns:
        return columns[0]
    return (ends[1] if len(ends) > 1 else 0, ends[0]) if ends else (0, 0)


def slice_word(over: Over | None, dims: int) -> str:
    """A word for slices without these dimensions.

    Example:
        >>> slice_word((1, 2), 2), slice_word((0, 1), 2), slice_word((1, 4), 4)
        ('row', 'column', 'slice_1_4')
    """
    if over is None:
        return "tile"
    words = {(dims - 1, dims): "row", (dims - 2, dims - 1): "column", (dims - 2, dims): "matrix"}
    return words.get(over, f"slice_{over[0]}_{over[1]}")
