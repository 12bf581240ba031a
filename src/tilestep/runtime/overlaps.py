"""Tensors that share memory: gradients must not overlap the memory that a step writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..native.table import address_of
from .outputs import extent_of
from .segment import Entry, is_dense


def spans_of(tensors: Sequence[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return the addresses of the tensors' first bytes, and past their last bytes, int64[tensors] each."""
    starts = np.asarray([address_of(tensor) for tensor in tensors], dtype=np.int64)
    extents = [one.nbytes if one.is_contiguous() else extent_of(one) * one.element_size() for one in tensors]
    return starts, starts + np.asarray(extents, dtype=np.int64)


def intersect(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors with overlapping spans share a byte."""
    if is_dense(left) and is_dense(right):
        return True
    starts, ends = spans_of((left, right))
    taken = np.zeros(ends.max() - starts.min(), dtype=bool)
    mine, theirs = (
        _bytes_of(taken[start - starts.min() :], tensor) for start, tensor in zip(starts.tolist(), (left, right))
    )
    mine[...] = True
    return bool(theirs.any())


def _bytes_of(memory: np.ndarray, tensor: torch.Tensor) -> np.ndarray:
    """Return the view of `memory`, a byte map from the tensor's first byte on, that covers its elements."""
    width = tensor.element_size()
    strides = (*(stride * width for stride in tensor.stride()), 1)
    return np.lib.stride_tricks.as_strided(memory, shape=(*tensor.shape, width), strides=strides)


class WrittenMemory:
    """The parameters and states of entries, which steps write, in order of address."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        arrays = [
            (place, name, array)
            for place, entry in enumerate(entries)
            for name, array in entry.written
            if array.numel()
        ]
        self._arrays, (starts, ends) = arrays, spans_of([array for _, _, array in arrays])
        self._spans = starts, ends
        order = np.argsort(starts, kind="stable")
        self._starts, self._ends = starts[order], np.maximum.accumulate(ends[order])
        self.arguments = self._starts.ctypes.data, self._ends.ctypes.data, len(arrays)
        """Arguments that C++ copies."""

    @property
    def overlaps_itself(self) -> bool:
        """Whether two of the arrays may share memory: their spans overlap."""
        return bool((self._ends[:-1] > self._starts[1:]).any())

    def overlapped(self, addresses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Whether each span of memory, in bytes, overlaps any of these arrays' spans."""
        before = np.searchsorted(self._starts, addresses + sizes)
        return (before > 0) & (self._ends[before - 1] > addresses) & (sizes > 0) if len(self._ends) else sizes < 0

    def sharing(self, tensor: torch.Tensor) -> list[tuple[int, str]]:
        """Return the arrays that share memory with a tensor: entry index and name."""
        (starts, ends), ((start,), (stop,)) = self._spans, spans_of([tensor])
        near = [self._arrays[place] for place in np.nonzero((starts < stop) & (ends > start))[0].tolist()]
        return [(place, name) for place, name, array in near if intersect(array, tensor)]
