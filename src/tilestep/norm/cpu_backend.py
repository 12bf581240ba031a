"""The norm and the scaling on the CPU: C++ through ctypes, or torch's own operations where nothing can be built."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..codegen.compile_cpp import load_library, warn_of_failure
from ..control_numbers import LARGEST_SUM
from ..errors import BuildError
from ..threads import thread_count
from .cpp_source import SOURCE, TILE
from .orders import DTYPES, Order, combine, order_of
from .tiles import Tiles, cut

PER_THREAD = 32768
"""Elements below which one more thread takes longer to wake than to work."""


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = load_library("norm", SOURCE)
    tables: list[Any] = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    results: list[Any] = [ctypes.c_void_p, ctypes.c_void_p]
    library.tilestep_norm.argtypes = [*tables, ctypes.c_int, ctypes.c_double, ctypes.c_int, *results, ctypes.c_int]
    library.tilestep_scale.argtypes = [*tables, ctypes.c_double, ctypes.c_int]
    library.tilestep_norm.restype = library.tilestep_scale.restype = None
    return library


def cpu_norm(numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> CpuNorm | EagerNorm:
    """The backend that this machine can run."""
    tiles = cut(numels, dtypes, TILE)
    try:
        return CpuNorm(_library(), tiles)
    except BuildError as error:
        warn_of_failure(error)
        return EagerNorm(tiles)


class CpuNorm:
    """The tables in memory and the built library."""

    def __init__(self, library: ctypes.CDLL, tiles: Tiles) -> None:
        self._library = library
        self._tiles = tiles
        self._partials = torch.empty(max(1, tiles.count), dtype=torch.float64, device="cpu")
        self._most_threads = max(1, int(tiles.rows[:, 0].sum()) // PER_THREAD)
        self._tile_tables = tiles.rows.ctypes.data, tiles.tensor_of.ctypes.data, tiles.count
        self._partials_address = self._partials.data_ptr()

    def sum_squares(self, addresses: torch.Tensor, out: torch.Tensor) -> None:
        """`norm` for the 2-norm without its root, float64[1]: written where it lies."""
        threads = 1 if self._most_threads == 1 else min(self._most_threads, thread_count())
        tables, order = self._tile_tables, int(Order.SQUARES)
        self._library.tilestep_norm(
            addresses.data_ptr(), *tables, order, 2.0, False, self._partials_address, out.data_ptr(), threads
        )

    def norm(self, addresses: torch.Tensor, out: torch.Tensor, norm_type: float, root: bool) -> None:
        """One call; the result does not depend on the number of threads."""
        total = ctypes.c_double()
        self._library.tilestep_norm(
            addresses.data_ptr(),
            *self._tile_tables,
            int(order_of(norm_type)),
            norm_type,
            root,
            self._partials.data_ptr(),
            ctypes.addressof(total),
            min(self._most_threads, thread_count()),
        )
        _put(out, total.value)

    @property
    def partials(self) -> torch.Tensor:
        """The tiles' sums."""
        return self._partials

    def places_of(self, tensors: Sequence[int]) -> torch.Tensor:
        """The tiles of some tensors."""
        return torch.from_numpy(self._tiles.places_of(tensors))

    def sum_tiles(self, addresses: torch.Tensor) -> torch.Tensor:
        """Sum the tiles for the 2-norm."""
        self.norm(addresses, torch.empty(1, dtype=torch.float64, device="cpu"), 2.0, False)
        return self._partials[: self._tiles.count]

    def finish(self, out: torch.Tensor) -> None:
        """Add up the sums that are there, one after the other, as the library does."""
        tiles = self._partials[: self._tiles.count].numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            total = float(np.add.accumulate(tiles)[-1]) if len(tiles) else 0.0
        # Finite tiles may not sum up to infinity.
        _put(out, min(total, LARGEST_SUM) if np.isfinite(tiles).all() else total)

    def scale(self, addresses: torch.Tensor, norm: torch.Tensor, limit: torch.Tensor | float) -> None:
        """One call."""
        self._library.tilestep_scale(
            addresses.data_ptr(),
            *self._tile_tables,
            clip_coefficient(norm, limit),
            min(self._most_threads, thread_count()),
        )


def _put(out: torch.Tensor, number: float) -> None:
    """Write a number; beyond float32's range it is infinite there, where `fill_` raises."""
    out.copy_(torch.tensor(number, dtype=torch.float64, device="cpu"))


def clip_coefficient(norm: torch.Tensor, limit: torch.Tensor | float) -> float:
    """min(1, limit / (norm + 1e-6)); NaN stays NaN."""
    coefficient = torch.as_tensor(limit, dtype=torch.float64, device=norm.device) / (norm.double() + 1e-6)
    return coefficient.clamp(max=1.0).item()


class EagerNorm:
    """The same from torch's operations, a tensor at a time."""

    def __init__(self, tiles: Tiles) -> None:
        self._rows = tiles.rows.tolist()

    def sum_squares(self, addresses: torch.Tensor, out: torch.Tensor) -> None:
        """The sum of squares."""
        self.norm(addresses, out, 2.0, False)

    def norm(self, addresses: torch.Tensor, out: torch.Tensor, norm_type: float, root: bool) -> None:
        """Each tensor by itself, then together."""
        parts = [before_root(tensor, norm_type) for tensor in self._tensors(addresses)]
        total = combine(torch.tensor(parts, dtype=torch.float64, device="cpu"), norm_type, root=root)
        if not root and order_of(norm_type) is Order.SQUARES and max(parts, default=0.0) < math.inf:
            total = total.clamp(max=LARGEST_SUM)
        out.copy_(total)

    def scale(self, addresses: torch.Tensor, norm: torch.Tensor, limit: torch.Tensor | float) -> None:
        """A product in place for each tensor."""
        coefficient = clip_coefficient(norm, limit)
        if coefficient != 1:
            for tensor in self._tensors(addresses):
                tensor.mul_(coefficient)

    def _tensors(self, addresses: torch.Tensor) -> Iterator[torch.Tensor]:
        for address, (length, _, code) in zip(addresses.tolist(), self._rows):
            if address and length:
                dtype = DTYPES[code]
                memory = (ctypes.c_char * (length * dtype.itemsize)).from_address(address)
                yield torch.frombuffer(memory, dtype=dtype)


def before_root(tensor: torch.Tensor, norm_type: float) -> float:
    """Sum |x|^p, max |x|, min |x|, or 1 where any element is not zero."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    order = order_of(norm_type)
    if order is Order.NONZERO:
        return float(tensor.count_nonzero() != 0)
    if order is Order.POWER:
        return tensor.to(wide).abs().pow_(norm_type).sum(dtype=torch.float64).item()
    norm = torch.linalg.vector_norm(tensor, norm_type, dtype=wide).item()
    if order is not Order.SQUARES:
        return norm
    if not norm * norm < math.inf and tensor.isfinite().all():
        # Finite elements have a finite sum of squares: an overflow check may rely on it.
        return min(tensor.double().square().sum().item(), LARGEST_SUM)
    return norm * norm
