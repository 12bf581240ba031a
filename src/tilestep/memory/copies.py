"""Chunks of tiles: ranges of a segment whose arrays on the host fit a device buffer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..errors import OffloadError
from ..native.host_memory import ALIGNMENT
from ..native.table import address_of
from ..placement.local import REAL_INSTEAD, local_part
from ..runtime.passes import Passes
from ..runtime.segment import Segment, TileRange


def check_device(label: str, param: torch.Tensor, device: torch.device) -> None:
    """Raise for a complex parameter, or for a parameter on another device."""
    if param.is_complex():
        raise OffloadError(f"{label} is complex, and offload() supports only real parameters: {REAL_INSTEAD}")
    actual = local_part(param).device
    if actual != device:
        raise OffloadError(f"{label} is on {actual}, other parameters are on {device}: offload() requires one device")


@dataclass
class Run:
    """A range of bytes of a storage that is contiguous on the host and in a buffer."""

    storage: torch.UntypedStorage  # on the host
    start: int  # first byte in the storage
    stop: int  # last byte plus 1
    place: int  # first byte in the buffer

    @functools.cached_property
    def host(self) -> torch.Tensor:
        """The bytes on the host, uint8."""
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        return empty.set_(self.storage, self.start, (self.stop - self.start,), (1,))

    def extend(self, storage: torch.UntypedStorage, start: int, length: int) -> bool:
        """Extend the run over bytes that follow closely in memory; returns whether it could."""
        if address_of(storage) != address_of(self.storage) or not 0 <= start - self.stop < ALIGNMENT:
            return False
        self.stop = start + length
        return True


@dataclass
class Chunk:
    """Consecutive tiles that share a buffer."""

    tiles: range  # indices in the segment
    tensors: range  # indices of their tensors
    runs: dict[str, list[Run]] = field(default_factory=dict)  # by array, the bytes of the chunk
    begins: dict[str, np.ndarray] = field(default_factory=dict)  # by array, offsets of tensors in the buffer
    size: int = 0  # bytes in the buffer

    def tile_range(self, memory: torch.Tensor) -> TileRange:
        """The chunk's tiles, with addresses in this buffer."""
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


def cut_tiles(passes: Passes, names: Sequence[str], room: int) -> list[tuple[range, range]]:
    """For each chunk of a segment its ranges of tiles and tensors; a chunk has about `room` bytes of named arrays."""
    tiles, strided = passes.segment.tiles, set(passes.arrays.strided)
    width = sum(passes.segment.entries[0].arrays[name].element_size() for name in names)
    counts = (-(-tiles.numel // tiles.size)).tolist()
    most = max(room // max(width * tiles.size, 1), 1)
    return sizes_of_chunks(counts, [place in strided for place in range(len(counts))], most)


def memory_range(segment: Segment, tiles: range, place: int) -> tuple[int, int]:
    """The range of a tensor's elements in memory that belong to some tiles: first, and last plus 1; (0, 0) if none."""
    start, size = int(segment.tiles.first_tile[place]), segment.tiles.size
    first, stop = max(tiles.start - start, 0) * size, min((tiles.stop - start) * size, int(segment.tiles.numel[place]))
    return (segment.element_at(place, first), segment.element_at(place, stop)) if stop > first else (0, 0)


def cut_chunks(passes: Passes, names: Sequence[str], room: int) -> list[Chunk]:
    """Cut a segment into chunks of about `room` bytes of the named arrays."""
    chunks = [Chunk(*bounds) for bounds in cut_tiles(passes, names, room)]
    for chunk in chunks:
        lay_out(chunk, passes.segment, names)
    return chunks


def lay_out(chunk: Chunk, segment: Segment, names: Sequence[str]) -> None:
    """Find the bytes of a chunk on the host, and assign them places in a buffer."""
    for name in names:
        begins = np.zeros(len(chunk.tensors), dtype=np.int64)
        runs = chunk.runs[name] = []
        for position, place in enumerate(chunk.tensors):
            array = segment.entries[place].arrays[name]
            first, stop = memory_range(segment, chunk.tiles, place)
            if not stop:
                continue
            # Arrays that pack elements have rows of even lengths, and tiles begin at even indices.
            packed, width = segment.entries[place].param.numel() // array.numel(), array.element_size()
            first, length = first // packed, (stop // packed - first // packed) * width
            storage, start = array.untyped_storage(), (int(array.storage_offset()) + first) * width
            if not (runs and runs[-1].extend(storage, start, length)):
                chunk.size = -(-chunk.size // ALIGNMENT) * ALIGNMENT + start % ALIGNMENT
                runs.append(Run(storage, start, start + length, chunk.size))
            last = runs[-1]
            chunk.size = last.place + last.stop - last.start
            begins[position] = last.place + (start - last.start) - first * width
        chunk.begins[name] = begins
