"""Finding parameters that share memory: two tiles would update it at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..engine import is_dense
from ..errors import GradientError


def check_not_shared(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise if two tensors have an element in common; tensors that only interleave are fine.

    Example:
        >>> whole = torch.zeros(4, 4)
        >>> check_not_shared([("left", whole[:, :2]), ("right", whole[:, 2:])])
        >>> check_not_shared([("left", whole[:, :2]), ("row", whole[0])])
        Traceback (most recent call last):
        tilestep.errors.GradientError: row shares memory with left; a parameter can be in the optimizer once
    """
    filled = [(label, tensor) for label, tensor in tensors if tensor.numel()]
    starts = np.asarray([tensor.data_ptr() for _, tensor in filled], dtype=np.int64)
    extents = [tensor.nbytes if tensor.is_contiguous() else _extent(tensor) for _, tensor in filled]
    ends = starts + np.asarray(extents, dtype=np.int64)
    order = np.argsort(starts, kind="stable")
    if (np.maximum.accumulate(ends[order])[:-1] <= starts[order][1:]).all():
        return
    open_spans: list[int] = []
    for index in order.tolist():
        open_spans = [other for other in open_spans if ends[other] > starts[index]]
        for other in open_spans:
            if _intersect(filled[other][1], filled[index][1]):
                later, earlier = filled[max(index, other)][0], filled[min(index, other)][0]
                raise GradientError(f"{later} shares memory with {earlier}; a parameter can be in the optimizer once")
        open_spans.append(index)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (reach + 1) * tensor.element_size()


def _intersect(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors whose spans overlap have a byte in common."""
    if is_dense(left) and is_dense(right):
        return True
    first = min(left.data_ptr(), right.data_ptr())
    taken = np.zeros(max(tensor.data_ptr() + _extent(tensor) for tensor in (left, right)) - first, dtype=bool)
    _bytes_of(taken, left, first)[...] = True
    return bool(_bytes_of(taken, right, first).any())


def _bytes_of(memory: np.ndarray, tensor: torch.Tensor, first: int) -> np.ndarray:
    """The view of `memory`, one entry for each byte from address `first` on, that covers a tensor's elements."""
    width = tensor.element_size()
    begin = memory[tensor.data_ptr() - first :]
    shape = (*tensor.shape, width)
    strides = (*(stride * width for stride in tensor.stride()), 1)
    return np.lib.stride_tricks.as_strided(begin, shape=shape, strides=strides)
