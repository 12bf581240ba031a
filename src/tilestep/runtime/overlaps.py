"""Which tensors have memory in common: gradients must not lie in what a step writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .outputs import extent_of
from .segment import Entry, is_dense


def nbytes_spanned(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the last, gaps included."""
    return tensor.nbytes if tensor.is_contiguous() else extent_of(tensor) * tensor.element_size()


def intersect(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors whose spans overlap have a byte in common."""
    if is_dense(left) and is_dense(right):
        return True
    first = min(left.data_ptr(), right.data_ptr())
    taken = np.zeros(max(tensor.data_ptr() + nbytes_spanned(tensor) for tensor in (left, right)) - first, dtype=bool)
    _bytes_of(taken, left, first)[...] = True
    return bool(_bytes_of(taken, right, first).any())


def _bytes_of(memory: np.ndarray, tensor: torch.Tensor, first: int) -> np.ndarray:
    """The view of `memory`, one entry for each byte from address `first` on, that covers a tensor's elements."""
    width = tensor.element_size()
    begin = memory[tensor.data_ptr() - first :]
    shape = (*tensor.shape, width)
    strides = (*(stride * width for stride in tensor.stride()), 1)
    return np.lib.stride_tricks.as_strided(begin, shape=shape, strides=strides)


class WrittenMemory:
    """The parameters and states of some entries, which steps write, in the order of their addresses."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        arrays = [
            (place, name, array)
            for place, entry in enumerate(entries)
            for name, array in entry.written
            if array.numel()
        ]
        starts = np.asarray([array.data_ptr() for _, _, array in arrays], dtype=np.int64)
        ends = starts + np.asarray([nbytes_spanned(array) for _, _, array in arrays], dtype=np.int64)
        order = np.argsort(starts, kind="stable")
        self._arrays = [arrays[index] for index in order]
        self._starts, self._ends = starts[order], np.maximum.accumulate(ends[order])
        self.arguments = self._starts.ctypes.data, self._ends.ctypes.data, len(arrays)
        """What C++ copies."""

    @property
    def overlaps_itself(self) -> bool:
        """Whether two of the arrays may share memory: their spans overlap."""
        return bool((self._ends[:-1] > self._starts[1:]).any())

    def overlapped(self, addresses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """For each of some spans of memory, in bytes, whether it overlaps one of these."""
        before = np.searchsorted(self._starts, addresses + sizes)
        return (before > 0) & (self._ends[before - 1] > addresses) & (sizes > 0) if len(self._ends) else sizes < 0

    def sharing(self, tensor: torch.Tensor) -> list[tuple[int, str]]:
        """The arrays that share memory with a tensor: the place of the entry, and the name."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + nbytes_spanned(tensor)
        near = [one for one, at in zip(self._arrays, self._starts) if at < stop]
        return [
            (place, name)
            for place, name, array in near
            if array.data_ptr() + nbytes_spanned(array) > start and intersect(array, tensor)
        ]
