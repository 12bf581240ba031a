"""Which tile belongs to which tensor, and how strided tensors lie in memory: computed once, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..codegen.spec import MAX_DIMS
from ..errors import GradientError


@dataclass
class Tiles:
    """The tiles of a list of tensors."""

    size: int  # elements in a tile
    numel: np.ndarray  # int64[tensors], elements of each tensor
    first_tile: np.ndarray  # int64[tensors], each tensor's first tile
    tile_tensor: np.ndarray  # int32[tiles], the tensor each tile belongs to

    @property
    def count(self) -> int:
        """How many tiles there are."""
        return len(self.tile_tensor)


def cut_tiles(numels: Sequence[int], size: int) -> Tiles:
    """Cut tensors of these lengths into tiles; an empty tensor has none.

    Example:
        >>> cut = cut_tiles([5, 0, 4], size=4)
        >>> cut.first_tile.tolist(), cut.tile_tensor.tolist()
        ([0, 2, 2], [0, 0, 2])
    """
    numel = np.asarray(numels, dtype=np.int64)
    counts = -(-numel // size)
    ends = np.cumsum(counts)
    first = np.concatenate([[0], ends[:-1]]) if len(ends) else np.zeros(0, dtype=np.int64)
    owner = np.repeat(np.arange(len(numel), dtype=np.int32), counts)
    return Tiles(size, numel, first.astype(np.int64), owner)


def _dense_order(tensor: torch.Tensor) -> list[int] | None:
    """Dimensions from slowest to fastest if the tensor fills its memory without gaps, else None."""
    dims = [dim for dim in range(tensor.dim()) if tensor.size(dim) != 1]
    dims.sort(key=lambda dim: (tensor.stride(dim), -dim), reverse=True)
    expected = 1
    for dim in reversed(dims):
        if tensor.stride(dim) != expected:
            return None
        expected *= tensor.size(dim)
    return dims


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills its memory without gaps, in any order of its dimensions."""
    return tensor.is_contiguous() or _dense_order(tensor) is not None


def same_walk(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether both tensors are dense and element k in memory order is the same element in both.

    Example:
        >>> import torch
        >>> image = torch.zeros(2, 3, 4, 5)
        >>> same_walk(image, image.clone()), same_walk(image, image.to(memory_format=torch.channels_last))
        (True, False)
    """
    if left.is_contiguous() and right.is_contiguous():
        return True
    order = _dense_order(left)
    return order is not None and order == _dense_order(right)


def check_no_overlap(tensor: torch.Tensor, label: str) -> None:
    """Raise if two elements of the tensor share memory."""
    if overlaps_itself(tensor):
        raise GradientError(
            f"{label} of shape {tuple(tensor.shape)} and strides {tensor.stride()} overlaps itself (expanded?); "
            "make it a tensor of its own with .clone()"
        )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of the tensor share memory.

    Example:
        >>> memory = torch.zeros(9)
        >>> overlaps_itself(memory.as_strided((2, 3), (3, 2))), overlaps_itself(memory.as_strided((2, 3), (2, 2)))
        (False, True)
    """
    if tensor.is_contiguous() or tensor.numel() <= 1:
        return False
    dims = [dim for dim in range(tensor.dim()) if tensor.size(dim) > 1]
    reach, nested = 0, True
    for dim in sorted(dims, key=tensor.stride):
        nested = nested and tensor.stride(dim) > reach
        reach += (tensor.size(dim) - 1) * tensor.stride(dim)
    if nested or reach + 1 < tensor.numel():
        return not nested
    # Dimensions that interleave: the elements are counted in a map of the memory between the first and the last.
    taken = np.zeros(reach + 1, dtype=bool)
    np.lib.stride_tricks.as_strided(taken, tuple(tensor.shape), tensor.stride())[...] = True
    return int(np.count_nonzero(taken)) < tensor.numel()


def layout_record(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """Sizes and strides of tensors of one shape, walked in the order of their indices, as a row of the layout table."""
    shape = tensors[0].shape
    merged: list[tuple[int, list[int]]] = []
    for dim in range(len(shape)):
        if shape[dim] == 1:
            continue
        strides = [tensor.stride(dim) for tensor in tensors]
        if merged and all(before == stride * shape[dim] for before, stride in zip(merged[-1][1], strides)):
            merged[-1] = (merged[-1][0] * shape[dim], strides)
        else:
            merged.append((shape[dim], strides))
    if len(merged) > MAX_DIMS:
        raise GradientError(f"a strided tensor of shape {tuple(shape)} has more than {MAX_DIMS} separate dimensions")
    record = np.zeros(1 + MAX_DIMS * (1 + len(tensors)), dtype=np.int64)
    record[0] = len(merged)
    for dim, (size, strides) in enumerate(merged):
        record[1 + dim] = size
        for position, stride in enumerate(strides):
            record[1 + MAX_DIMS * (1 + position) + dim] = stride
    return record
