"""Tables on devices, cached across calls for lists of tensors with the same metadata."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np
import torch

from ..backends.decision import clip_coefficient
from ..compat import PLAIN
from ..devices import has_streams, upload
from ..errors import GradientError
from ..native import build
from ..native.table import CHANGED, Table, addresses_of
from .table import norm_table
from .tiles import DTYPES, combine

Positions = Callable[[], Sequence[int]]  # the places of tensors in messages

KEPT = 8  # cached recipes, most recently used first; 20 bytes of device memory per tile


class Recipe:
    """Tables for a list of tensors on one stream per device; keeps no tensor of the caller alive."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.lock = threading.Lock()
        self._table = Table()
        self._table.remember(tensors)
        self._loose = [index for index, tensor in enumerate(tensors) if not _is_dense(tensor)]
        self._bytes = np.array([tensor.numel() * tensor.element_size() for tensor in tensors], dtype=np.int64)
        self._uploaded = -1  # the generation of the table whose addresses the devices have
        self._addresses = self._table.host
        self._fitted: tuple[int, int] | None = None
        self._overlap: bool | None = None  # None if unknown since the addresses changed
        self._first_device = tensors[0].device
        wide = any(tensor.dtype == torch.float64 for tensor in tensors)
        self._dtype = torch.float64 if wide else torch.float32
        places: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            places.setdefault(tensor.device, []).append(index)
        self._parts = [_Part(device, tensors, indices) for device, indices in places.items()]
        self._streams = _streams(places)
        # torch's check refuses a list that holds the same tensor twice, and so would refuse it at every call.
        self.reusable = self._table.refresh(tensors) != CHANGED

    def fits(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these tensors have the metadata this was made for, and the current streams are the same."""
        with self.lock:
            seen = self._table.refresh(tensors)
            self._fitted = (id(tensors), self._table.generation) if seen != CHANGED else None
        return seen != CHANGED and _streams(part.device for part in self._parts) == self._streams

    def norm(self, tensors: list[torch.Tensor], norm_type: float, *, root: bool = True) -> torch.Tensor:
        """The norm as a scalar on the first tensor's device, before its root in float64; the caller holds the lock."""
        dense = self._dense(tensors)  # copies must live until the launch
        self._follow(dense)
        dtype, alone = self._dtype if root else torch.float64, len(self._parts) == 1
        results = []
        for part in self._parts:
            out = torch.empty((), dtype=dtype if alone else torch.float64, device=part.device)
            part.table.launch(part.addresses, out, norm_type, root=root and alone)
            results.append(out.to(self._first_device))
        return results[0] if alone else combine(torch.stack(results), norm_type, root=root).to(dtype)

    def scale(self, tensors: list[torch.Tensor], norm: torch.Tensor, max_norm: torch.Tensor | float) -> None:
        """Multiply by min(1, max_norm / (norm + 1e-6)), by torch where tensors overlap; the caller holds the lock."""
        dense = self._dense(tensors)
        self._follow(dense)
        if self._overlap is None:
            self._overlap = _overlapping(self._addresses, self._bytes)
        if self._overlap or self._loose:
            by_torch = range(len(tensors)) if self._overlap else self._loose
            coefficient = clip_coefficient(norm, max_norm).reshape(())
            for index in by_torch:
                tensors[index].mul_(coefficient.to(tensors[index].device))
            if self._overlap:
                return
        for part in self._parts:
            limit = max_norm.to(part.device) if isinstance(max_norm, torch.Tensor) else max_norm
            part.table.scale(part.addresses, norm.to(part.device), limit)
        build.bump(tensors)

    def _dense(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not self._loose:
            return tensors
        loose = set(self._loose)
        return [tensor.contiguous() if index in loose else tensor for index, tensor in enumerate(tensors)]

    def _follow(self, dense: list[torch.Tensor]) -> None:
        """Update the addresses on the devices, if any tensor has moved."""
        # The result of `fits` holds once: another thread may have written other addresses since.
        fitted, self._fitted, table = self._fitted, None, self._table
        if self._loose or (fitted != (id(dense), table.generation) and table.refresh(dense) == CHANGED):
            self._uploaded, self._addresses = -1, addresses_of(dense)
        elif self._uploaded == table.generation:
            return
        else:
            self._uploaded, self._addresses = -1, table.host
        for part in self._parts:
            own = self._addresses if part.indices is None else self._addresses[part.indices]
            part.addresses = upload(own, part.device)
        self._overlap = None
        if self._addresses is table.host:
            self._uploaded = table.generation


class _Part:
    def __init__(self, device: torch.device, tensors: Sequence[torch.Tensor], indices: list[int]) -> None:
        self.device = device
        self.indices = None if len(indices) == len(tensors) else np.array(indices)
        numels = [tensors[index].numel() for index in indices]
        self.table = norm_table(device, numels, [tensors[index].dtype for index in indices])
        self.addresses: torch.Tensor


def _streams(devices: Iterable[torch.device]) -> list[int]:
    """The current streams: work on another stream must not share partial results."""
    return [torch.cuda.current_stream(device).cuda_stream for device in devices if has_streams(device)]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a range of memory without gaps and overlaps, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _overlapping(addresses: np.ndarray, lengths: np.ndarray) -> bool:
    present = lengths > 0
    begin, size = addresses[present], lengths[present]
    order = np.argsort(begin)
    begin, size = begin[order], size[order]
    return bool(np.any(begin[:-1] + size[:-1] > begin[1:]))


_recipes: list[tuple[Hashable, Recipe]] = []
lock = threading.Lock()
"""Of the recipes, and of what `sharded` keeps."""


def find_recipe(tensors: list[torch.Tensor], positions: Positions | None = None) -> Recipe | None:
    """The recipe for a list of tensors, made on a miss; None if kernels cannot read their memory."""
    first, last = tensors[0], tensors[-1]
    key = (len(tensors), first.shape, last.shape, first.device)
    # Tables uploaded in a capture exist once its graph is replayed: no other call can use them. The capture cannot use
    # tables of other calls either, which may change. Its tables are memory of the graph.
    captures = first.is_cuda and torch.cuda.is_current_stream_capturing()
    with lock:
        for place, (own_key, recipe) in enumerate(() if captures else _recipes):
            if own_key == key and recipe.fits(tensors):
                if place:
                    _recipes.insert(0, _recipes.pop(place))
                return recipe
        if not _plain(tensors):
            return None
        _require_supported(tensors, positions)
        recipe = Recipe(tensors)
        if recipe.reusable and not captures:
            _recipes.insert(0, (key, recipe))
            del _recipes[KEPT:]
        return recipe


def _plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether kernels can read the memory of all tensors."""
    return all(type(tensor) in PLAIN and tensor.device.type in ("cpu", "cuda") for tensor in tensors)


def name_of(place: int, positions: Positions | None) -> str:
    """The name of a tensor in messages."""
    return f"tensor {place}" if positions is None else f"the gradient of parameter {positions()[place]}"


def _require_supported(tensors: Sequence[torch.Tensor], positions: Positions | None) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.layout == torch.strided and tensor.dtype in DTYPES:
            continue
        name = name_of(index, positions)
        if tensor.layout != torch.strided:
            raise GradientError(f"{name} is sparse ({tensor.layout}): call .to_dense() on it first")
        raise GradientError(f"{name} has dtype {tensor.dtype}; a norm supports bfloat16, float16, float32, float64")


def _after_fork() -> None:
    """Drop the lock and the tables, which another thread of the parent may have used."""
    global lock
    lock = threading.Lock()
    _recipes.clear()


os.register_at_fork(after_in_child=_after_fork)
