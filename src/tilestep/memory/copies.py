"""Page-locked memory, and chunks of tiles that fit a buffer."""

from __future__ import annotations

import contextlib
import functools
import resource
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ..devices import has_streams
from ..errors import HostMemoryError, OffloadError
from ..placement.local import REAL_INSTEAD, local_part
from ..runtime.segment import Segment, TileRange
from ..tensor_table import address_of


def check_device(label: str, param: torch.Tensor, device: torch.device) -> None:
    """Raise for a complex parameter, or one on another device than the others."""
    if param.is_complex():
        raise OffloadError(f"{label} is complex, and offload() moves real arrays: {REAL_INSTEAD}")
    actual = local_part(param).device
    if actual != device:
        raise OffloadError(
            f"{label} is on {actual}, others of the optimizer are on {device}: offload() takes one device"
        )


ALIGNMENT = 256  # bytes at whose multiples buffers begin
_PAGE = 4096
_PORTABLE, _MAPPED = 1, 2  # flags of CUDA's page-locking: for all contexts, and accessible from kernels
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
    """Host memory that can still be allocated, in bytes, and what limits it."""
    limits: list[tuple[int, str]] = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        limits.append((int(line.split()[1]) * 1024, "memory of the system"))
    with contextlib.suppress(OSError, ValueError):
        # Version 2 of Linux's control groups; pages of files that are not in use can be reclaimed.
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

    # torch allocates page-locked memory in powers of two: of 9.5 GB of state 6.5 GB would be lost.

    def __init__(self, device: torch.device, what: str = "the optimizer's state") -> None:
        self.device = device
        self.what = what
        self._pieces: list[tuple[int, int, weakref.ref[np.ndarray]]] = []

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """One piece of memory for several buffers, each a storage."""
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        if not sum(padded):
            return [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in sizes]
        memory = self._piece(sum(padded))
        starts = np.concatenate([[0], np.cumsum(padded)]).tolist()
        # Sliced before the conversion: the storage then begins in locked memory, and torch finds it pinned.
        return [torch.from_numpy(memory[start : start + size]) for start, size in zip(starts, sizes)]

    def like(self, tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Uninitialized tensors in one piece of memory, with the shapes and memory formats of others."""
        sizes = [-(-tensor.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT for tensor, dtype in zip(tensors, dtypes)]
        ends = dict.fromkeys(dtypes, 0)
        begins = []
        for dtype, size in zip(dtypes, sizes):
            begins.append(ends[dtype] // dtype.itemsize)
            ends[dtype] += size
        # A storage for each dtype: torch.save refuses one that is shared by tensors of several.
        storages = {dtype: flat.untyped_storage() for dtype, flat in zip(ends, self.take(list(ends.values())))}
        made = []
        for tensor, dtype, begin in zip(tensors, dtypes, begins):
            like = torch.empty_like(tensor, dtype=dtype, device="meta", memory_format=torch.preserve_format)
            # Not a view: it has its own version counter, and checks do not see its neighbours as aliases.
            empty = torch.empty(0, dtype=dtype, device="cpu")
            made.append(empty.set_(storages[dtype], begin, like.shape, like.stride()))
        return made

    def _piece(self, size: int) -> np.ndarray:
        there, limit = available()
        if size > there:
            raise self._missing(size, there, limit)
        try:
            array = np.empty(size + _PAGE, dtype=np.uint8)
        except MemoryError:
            raise self._missing(size, there, limit) from None
        first = -array.ctypes.data % _PAGE
        if has_streams(self.device):
            self._lock(array, array.ctypes.data + first, size)
        self._pieces.append((array.ctypes.data, array.nbytes, weakref.ref(array)))
        return array[first : first + size]

    def _missing(self, size: int, there: int, limit: str, why: str = "") -> HostMemoryError:
        kind = "page-locked host memory" if has_streams(self.device) else "host memory"
        return HostMemoryError(
            f"{self.what} needs {gigabytes(size)} of {kind}{why}, and {gigabytes(there)} would fit ({limit}): that is "
            f"{100 * min(there / size, 1):.0f}% of it. Give the optimizer fewer parameters, a rule with less state, or "
            "state of 16 bits (no master_weights)"
        )

    def _lock(self, array: np.ndarray, address: int, size: int) -> None:
        with torch.cuda.device(self.device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE | _MAPPED))
        if code:
            with contextlib.suppress(RuntimeError):
                # The launch clears CUDA's last error.
                torch.zeros(1, device=self.device)
            raise self._missing(size, *available(), why=f", which CUDA could not lock (error {code})")
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


@dataclass
class Run:
    """Bytes of one storage that are contiguous on the host and in a buffer."""

    storage: torch.UntypedStorage  # their storage
    start: int  # their first byte in it
    stop: int  # one past the last
    place: int  # their first byte in the buffer

    @functools.cached_property
    def host(self) -> torch.Tensor:
        """The bytes on the host, uint8."""
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        return empty.set_(self.storage, self.start, (self.stop - self.start,), (1,))

    def inside(self, memory: torch.Tensor) -> torch.Tensor:
        """The bytes in a buffer, uint8."""
        return memory[self.place : self.place + self.stop - self.start]

    def extend(self, storage: torch.UntypedStorage, start: int, length: int) -> bool:
        """Extend the run over bytes that follow closely in memory; returns whether they do."""
        if address_of(storage) != address_of(self.storage) or not 0 <= start - self.stop < ALIGNMENT:
            return False
        self.stop = start + length
        return True


@dataclass
class Chunk:
    """Consecutive tiles whose arrays are in a buffer together."""

    tiles: range  # their indices in the segment
    tensors: range  # the indices of their tensors
    runs: dict[str, list[Run]] = field(default_factory=dict)  # by array, the bytes that belong to the chunk
    begins: dict[str, np.ndarray] = field(default_factory=dict)  # by array, offsets of tensors in the buffer
    size: int = 0  # bytes of the buffer that it needs

    def tile_range(self, memory: torch.Tensor) -> TileRange:
        """The chunk's tiles, with their addresses in this buffer."""
        address = address_of(memory)
        return TileRange(self.tiles, self.tensors, {name: begins + address for name, begins in self.begins.items()})


def sizes_of_chunks(tiles: Sequence[int], uncut: Sequence[bool], room: int) -> list[tuple[range, range]]:
    """Cut tensors into chunks of at most `room` tiles; a tensor that stays uncut may exceed it."""
    chunks: list[tuple[range, range]] = []
    begin = first = end = 0

    def close(last: int) -> None:
        if end > begin:
            chunks.append((range(begin, end), range(first, last)))

    for place, count in enumerate(tiles):
        left = count
        while left:
            free = room - (end - begin)
            if end > begin and (free <= 0 or (uncut[place] and left > free)):
                close(place if left == count else place + 1)
                begin, first = end, place
                continue
            if end == begin:
                first = place
            taken = left if uncut[place] else min(left, free)
            end += taken
            left -= taken
    close(len(tiles))
    return chunks


def cut_tiles(segment: Segment, room: int) -> list[tuple[range, range]]:
    """The ranges of tiles and of tensors of a segment's chunks, of at most `room` tiles."""
    counts, strided = (-(-segment.tiles.numel // segment.tiles.size)).tolist(), set(segment.own_strided)
    return sizes_of_chunks(counts, [place in strided for place in range(len(counts))], room)


def walked_part(segment: Segment, tiles: range, place: int) -> tuple[int, int]:
    """The elements of a tensor in some tiles: first, and one past the last, which is not above it if there are none."""
    start, size = int(segment.tiles.first_tile[place]), segment.tiles.size
    return max(tiles.start - start, 0) * size, min((tiles.stop - start) * size, int(segment.tiles.numel[place]))


def cut_chunks(segment: Segment, names: Sequence[str], room: int) -> list[Chunk]:
    """Cut a segment into chunks whose parts of some arrays take about `room` bytes."""
    width = sum(segment.entries[0].arrays[name].element_size() for name in names)
    per_chunk = max(room // max(width * segment.tiles.size, 1), 1)
    chunks = [Chunk(*bounds) for bounds in cut_tiles(segment, per_chunk)]
    for chunk in chunks:
        lay_out(chunk, segment, names)
    return chunks


def lay_out(chunk: Chunk, segment: Segment, names: Sequence[str]) -> None:
    """Find the bytes of a chunk on the host, and assign them places in a buffer."""
    for name in names:
        begins = np.zeros(len(chunk.tensors), dtype=np.int64)
        runs = chunk.runs[name] = []
        for position, place in enumerate(chunk.tensors):
            array = segment.entries[place].arrays[name]
            first, stop = walked_part(segment, chunk.tiles, place)
            if stop <= first:
                continue
            # Rows of packed neighbours have even lengths, and tiles cut them at even places.
            packed = segment.entries[place].param.numel() // array.numel()
            first, stop = segment.element_at(place, first) // packed, segment.element_at(place, stop) // packed
            width = array.element_size()
            storage, start = array.untyped_storage(), int(array.storage_offset()) * width + first * width
            length = (stop - first) * width
            if not (runs and runs[-1].extend(storage, start, length)):
                chunk.size = -(-chunk.size // ALIGNMENT) * ALIGNMENT + start % ALIGNMENT
                runs.append(Run(storage, start, start + length, chunk.size))
            last = runs[-1]
            chunk.size = last.place + last.stop - last.start
            begins[position] = last.place + (start - last.start) - first * width
        chunk.begins[name] = begins


def staged_view(array: torch.Tensor, run_place: int, memory: torch.Tensor) -> torch.Tensor:
    """A tensor in a buffer with the shape and strides of an array on the host."""
    offset = memory.storage_offset() + run_place
    begin = offset // array.element_size()
    return torch.empty(0, dtype=array.dtype, device=memory.device).set_(
        memory.untyped_storage(), begin, array.shape, array.stride()
    )
