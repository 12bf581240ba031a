"""Page-locked host memory, and how much is available."""

from __future__ import annotations

import contextlib
import resource
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ..devices import has_streams
from ..errors import HostMemoryError
from .table import address_of

ALIGNMENT = 256  # bytes; buffers begin at multiples of it
_PAGE = 4096
_PORTABLE, _MAPPED = 1, 2  # flags of cudaHostRegister: for all contexts, and accessible from kernels
_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def gigabytes(count: float) -> str:
    """A number of bytes as text."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} bytes"


def available() -> tuple[int, str]:
    """Host memory that can still be allocated, in bytes, and the limit in words."""
    limits: list[tuple[int, str]] = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        limits.append((int(line.split()[1]) * 1024, "memory of the system"))
    with contextlib.suppress(OSError, ValueError):
        # Linux control groups v2; inactive file pages can be reclaimed.
        limit = int((_CONTROL_GROUP / "memory.max").read_text())
        used = int((_CONTROL_GROUP / "memory.current").read_text())
        lines = (_CONTROL_GROUP / "memory.stat").read_text().splitlines()
        idle = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        limits.append((max(limit - used + idle, 0), "limit of the control group"))
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    with contextlib.suppress(OSError, ValueError):
        if space != resource.RLIM_INFINITY:
            pages = int(_STATM.read_text().split()[0])
            limits.append((max(space - pages * resource.getpagesize(), 0), "limit of the process's address space"))
    return min(limits) if limits else (1 << 62, "unknown")


class HostMemory:
    """Page-locked pieces of host memory for asynchronous copies; a piece is freed with its last tensor."""

    # torch allocates page-locked memory in powers of two: 9.5 GB of state would waste 6.5 GB.

    def __init__(self, device: torch.device, what: str = "the optimizer's state") -> None:
        self.device = device
        self.what = what
        self._pieces: list[tuple[int, int, weakref.ref[np.ndarray]]] = []

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Allocate one piece of memory for several buffers, each with a separate storage."""
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        if not sum(padded):
            return [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in sizes]
        memory = self._piece(sum(padded))
        starts = np.concatenate([[0], np.cumsum(padded)]).tolist()
        # Slice before the conversion: the storage then begins in locked memory, and torch reports it as pinned.
        return [torch.from_numpy(memory[start : start + size]) for start, size in zip(starts, sizes)]

    def like(self, tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Uninitialized tensors in one piece of memory, with the shapes and memory formats of `tensors`."""
        sizes = [-(-tensor.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT for tensor, dtype in zip(tensors, dtypes)]
        ends = dict.fromkeys(dtypes, 0)
        begins = []
        for dtype, size in zip(dtypes, sizes):
            begins.append(ends[dtype] // dtype.itemsize)
            ends[dtype] += size
        # A storage per dtype: torch.save refuses a storage that tensors of several dtypes share.
        storages = {dtype: flat.untyped_storage() for dtype, flat in zip(ends, self.take(list(ends.values())))}
        made = []
        for tensor, dtype, begin in zip(tensors, dtypes, begins):
            like = torch.empty_like(tensor, dtype=dtype, device="meta", memory_format=torch.preserve_format)
            # `set_`, not a view: each tensor has its own version counter, and is not an alias of its neighbours.
            empty = torch.empty(0, dtype=dtype, device="cpu")
            made.append(empty.set_(storages[dtype], begin, like.shape, like.stride()))
        return made

    def _piece(self, size: int) -> np.ndarray:
        free, limit = available()
        if size > free:
            raise self._missing(size, free, limit)
        try:
            array = np.empty(size + _PAGE, dtype=np.uint8)
        except MemoryError:
            raise self._missing(size, free, limit) from None
        first = -array.ctypes.data % _PAGE
        if has_streams(self.device):
            self._lock(array, array.ctypes.data + first, size)
        self._pieces.append((array.ctypes.data, array.nbytes, weakref.ref(array)))
        return array[first : first + size]

    def _missing(self, size: int, free: int, limit: str, why: str = "") -> HostMemoryError:
        kind = "page-locked host memory" if has_streams(self.device) else "host memory"
        return HostMemoryError(
            f"{self.what} requires {gigabytes(size)} of {kind}{why}, but only {gigabytes(free)} are available "
            f"({limit}), {100 * min(free / size, 1):.0f}%. Use fewer parameters, a rule with less state, or 16-bit "
            "state without master_weights"
        )

    def _lock(self, array: np.ndarray, address: int, size: int) -> None:
        with torch.cuda.device(self.device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE | _MAPPED))
        if code:
            with contextlib.suppress(RuntimeError):
                # A launch clears CUDA's last error.
                torch.zeros(1, device=self.device)
            raise self._missing(size, *available(), why=f" that CUDA could not lock (error {code})")
        finalizer = weakref.finalize(array, _unlock, address, self.device)
        finalizer.atexit = False

    @property
    def taken(self) -> int:
        """Bytes of the pieces in use."""
        self._pieces = [piece for piece in self._pieces if piece[2]() is not None]
        return sum(size for _, size, _ in self._pieces)

    def holds(self, buffer: torch.Tensor) -> bool:
        """Whether a tensor is in a piece of this memory."""
        address = address_of(buffer)
        return (
            any(start <= address < start + size for start, size, piece in self._pieces if piece() is not None)
            or not buffer.numel()
        )


def _unlock(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)
