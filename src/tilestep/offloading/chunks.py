"""Cutting a segment's tiles into chunks that fit a buffer, and laying their arrays out there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..engine.segment import Segment
from ..engine.windows import Window
from .memory import ALIGNMENT


@dataclass
class Run:
    """Bytes of one array that lie together on the host and in a buffer."""

    host: torch.Tensor  # uint8[bytes], where they live
    place: int  # where they begin in the buffer

    def inside(self, memory: torch.Tensor) -> torch.Tensor:
        """uint8[bytes] of a buffer."""
        return memory[self.place : self.place + self.host.numel()]


@dataclass
class Chunk:
    """A run of tiles whose arrays are in a buffer together.

    Args:
        begins: by array, int64[tensors], where in the buffer it would begin if all of it were there.
    """

    tiles: range  # their places in the segment
    tensors: range  # the places of the tensors they belong to
    runs: dict[str, list[Run]] = field(default_factory=dict)  # by array, what of it the chunk has
    begins: dict[str, np.ndarray] = field(default_factory=dict)
    size: int = 0  # bytes of the buffer that it takes

    def window(self, memory: torch.Tensor) -> Window:
        """The window of the chunk when it is in this buffer."""
        address = memory.data_ptr()
        return Window(self.tiles, self.tensors, {name: begins + address for name, begins in self.begins.items()})


def sizes_of_chunks(tiles: Sequence[int], whole: Sequence[bool], room: int) -> list[tuple[range, range]]:
    """Cut tensors into chunks of at most so many tiles.

    Example:
        >>> sizes_of_chunks([2, 0, 5, 1], [False] * 4, room=3)
        [(range(0, 3), range(0, 3)), (range(3, 6), range(2, 3)), (range(6, 8), range(2, 4))]
        >>> sizes_of_chunks([2, 5, 1], [False, True, False], room=3)
        [(range(0, 2), range(0, 1)), (range(2, 7), range(1, 2)), (range(7, 8), range(2, 3))]
    """
    chunks: list[tuple[range, range]] = []
    begin = first = end = 0

    def close(last: int) -> None:
        if end > begin:
            chunks.append((range(begin, end), range(first, last)))

    for place, count in enumerate(tiles):
        left = count
        while left:
            free = room - (end - begin)
            if end > begin and (free <= 0 or (whole[place] and left > free)):
                close(place if left == count else place + 1)
                begin, first = end, place
                continue
            if end == begin:
                first = place
            taken = left if whole[place] else min(left, free)
            end += taken
            left -= taken
    close(len(tiles))
    return [(tiles, range(tensors.start, tensors.stop)) for tiles, tensors in chunks]


def cut_chunks(segment: Segment, names: Sequence[str], room: int) -> list[Chunk]:
    """Cut a segment so that each chunk's part of some arrays takes about so many bytes."""
    tiles, entries = segment.tiles, segment.entries
    width = sum(entries[0].arrays[name].element_size() for name in names)
    counts = (-(-tiles.numel // tiles.size)).tolist()
    strided = set(segment.own_strided)
    whole = [place in strided for place in range(len(entries))]
    per_chunk = max(room // max(width * tiles.size, 1), 1)
    chunks = [Chunk(*each) for each in sizes_of_chunks(counts, whole, per_chunk)]
    for chunk in chunks:
        lay_out(chunk, segment, names)
    return chunks


def lay_out(chunk: Chunk, segment: Segment, names: Sequence[str]) -> None:
    """Find the bytes of a chunk on the host, and give them places in a buffer."""
    tiles = segment.tiles
    for name in names:
        begins = np.zeros(len(chunk.tensors), dtype=np.int64)
        runs: list[_Span] = []
        for position, place in enumerate(chunk.tensors):
            array = segment.entries[place].arrays[name]
            first = max(chunk.tiles.start - int(tiles.first_tile[place]), 0) * tiles.size
            stop = min((chunk.tiles.stop - int(tiles.first_tile[place])) * tiles.size, int(tiles.numel[place]))
            if stop <= first:
                continue
            # Rows of packed neighbours are even, and so are the places at which tiles cut them.
            packed = segment.entries[place].param.numel() // array.numel()
            first, stop = segment.element_at(place, first) // packed, segment.element_at(place, stop) // packed
            width = array.element_size()
            start = int(array.storage_offset()) * width + first * width
            length = (stop - first) * width
            if not (runs and runs[-1].extend(array, start, length)):
                chunk.size = -(-chunk.size // ALIGNMENT) * ALIGNMENT + start % ALIGNMENT
                runs.append(_Span(array, start, start + length, chunk.size))
            last = runs[-1]
            chunk.size = last.place + last.stop - last.start
            begins[position] = last.place + (start - last.start) - first * width
        chunk.begins[name] = begins
        chunk.runs[name] = [run.run() for run in runs]


@dataclass
class _Span:
    """Neighbouring bytes of a storage, and their place in a buffer."""

    array: torch.Tensor
    start: int
    stop: int
    place: int

    def extend(self, array: torch.Tensor, start: int, length: int) -> bool:
        """Take in what follows, with the gap between; whether it does follow."""
        same = array.untyped_storage().data_ptr() == self.array.untyped_storage().data_ptr()
        if not same or not 0 <= start - self.stop < ALIGNMENT:
            return False
        self.stop = start + length
        return True

    def run(self) -> Run:
        storage = self.array.untyped_storage()
        host = torch.empty(0, dtype=torch.uint8, device="cpu").set_(
            storage, self.start, (self.stop - self.start,), (1,)
        )
        return Run(host, self.place)


def staged_view(array: torch.Tensor, run_place: int, memory: torch.Tensor) -> torch.Tensor:
    """A tensor like one on the host, in a buffer."""
    offset = memory.storage_offset() + run_place
    begin = offset // array.element_size()
    return torch.empty(0, dtype=array.dtype, device=memory.device).set_(
        memory.untyped_storage(), begin, array.shape, array.stride()
    )
