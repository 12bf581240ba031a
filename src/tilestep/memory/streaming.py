"""State on the host, updates on the device: chunks of state come in, are updated, and go back out."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from ..backends.spec import KernelSpec
from ..devices import is_host
from ..runtime import DeviceEngine, Entry
from ..runtime.segment import Segment
from ..side_stream import Event, SideStream
from .copies import Chunk, HostMemory, check_device, cut_chunks, staged_view
from .mirrors import HostCopies, HostGradients, Mirror, Mirrors, check_unchanged
from .offloaded import OffloadedState, moved_arrays, traffic_of


class Buffer:
    """Device memory through which chunks pass one after the other."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.free: Event = None
        """When the last chunk has left it."""


class Lanes:
    """The two lanes of one device, its computation, and the buffers between them."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self.inward, self.outward = SideStream(device), SideStream(device)
        self.compute = SideStream(device, own=False)
        self.buffers = [Buffer() for _ in range(count)]

    def provide(self, size: int) -> None:
        """Make every buffer at least this large, in bytes; what was in them is lost."""
        for buffer in self.buffers:
            if buffer.memory.numel() < size:
                buffer.memory = torch.empty(size, dtype=torch.uint8, device=self.device)
                self.inward.keep(buffer.memory)
                self.outward.keep(buffer.memory)
                # Kernels that used this memory before may still run.
                buffer.free = self.compute.mark()

    def wait(self) -> None:
        """Have the host see what was copied to it, and let it write to what was copied from it."""
        self.inward.synchronize()
        self.outward.synchronize()


class StreamedState(OffloadedState):
    """State in page-locked host memory, streamed through buffers on the device at each update."""

    def __init__(self, device: torch.device, chunk_bytes: int, buffers: int, keeps_gradients: bool = False) -> None:
        self.device = device
        self.chunk_bytes = chunk_bytes
        self.keeps_gradients = self.looks_at_gradients = keeps_gradients
        self.memory = HostMemory(device)
        self.lanes = Lanes(device, buffers)
        self.updates: list[StreamedUpdate] = []
        self.buffer_size = 0
        """Bytes that the largest chunk takes."""
        self._chunks = 0
        self._gradient_memory = HostMemory(device, "the gradients")
        self._mirrors = Mirrors(self._gradient_memory, has_parameters=False)
        self._copies = HostCopies(self.lanes.outward, self.lanes.compute, chunk_bytes)
        self.kept = HostGradients(self._mirrors, self._copies) if keeps_gradients else None
        self._returning: set[int] = set()
        """Parts whose gradients come back for the step, by `id`: matrix operations take tensors of the device."""

    def make(self, params: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Buffers one behind the other in one piece of host memory."""
        return self.memory.like(params, dtypes)

    def keeps(self, buffer: torch.Tensor, param: torch.Tensor) -> bool:
        """Whether a buffer lies in this memory."""
        return is_host(buffer.device) and self.memory.holds(buffer)

    def check(self, label: str, param: torch.Tensor) -> None:
        """Parameters are on the device that this home was made for."""
        check_device(label, param, self.device)

    def begin(self, params: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Let go of what the tables before have moved."""
        for label, param in params:
            check_device(label, param, self.device)
        self.wait()
        self.updates, self._chunks = [], 0
        if self.kept is not None:
            self._mirrors.follow([param for _, param in params])
            self.kept.follow([param for _, param in params])
            self._returning.clear()

    def on_entry(self, spec: KernelSpec, entry: Entry) -> None:
        """A part of a tensor is a run of bytes in all of its arrays: its gradient must have the same order."""
        entry.ordered = bool(moved_arrays(spec)) and not spec.program.slices.views
        if self.kept is None:
            return
        if spec.program.library.scratch:
            self._returning.add(id(entry.param))
        else:
            entry.gradient_device = torch.device("cpu")

    def gradients(
        self, params: Sequence[Sequence[torch.Tensor]], gradients: list[list[torch.Tensor | None]]
    ) -> list[list[torch.Tensor | None]]:
        """Those that are on the host, for kernels that come after their arrival; the host does not wait."""
        if self.kept is None:
            return gradients
        check_unchanged(list(self._mirrors.values()))
        taken = [
            [(self._mirrors[param], self.kept.taken(self._mirrors[param], gradient)) for param, gradient in zip(*one)]
            for one in zip(params, gradients)
        ]
        self._copies.order(self.lanes.compute)
        return [[self._readable(*each) for each in one] for one in taken]

    def _readable(self, mirror: Mirror, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or id(mirror.part) not in self._returning:
            return gradient
        return gradient.to(self.device, non_blocking=True)

    def drop_gradients(self) -> None:
        """Forget the gradients that are here."""
        self._mirrors.drop()
        self._copies.forget()

    def finish(self, engine: DeviceEngine) -> None:
        """The gradients are used up."""
        if self.kept is not None:
            self.drop_gradients()

    def split_segments(
        self, parts: Sequence[tuple[KernelSpec, Sequence[Entry]]]
    ) -> Sequence[tuple[KernelSpec, Sequence[Entry]]]:
        """Where passes work on rows, columns or other slices, a segment is what fits a buffer."""
        found: list[tuple[KernelSpec, Sequence[Entry]]] = []
        for spec, entries in parts:
            names = moved_arrays(spec) if spec.program.slices.views else ()
            chunk: list[Entry] = []
            size = 0
            for entry in entries:
                own = sum(entry.arrays[name].nbytes for name in names)
                if chunk and size + own > self.chunk_bytes:
                    found.append((spec, chunk))
                    chunk, size = [], 0
                chunk.append(entry)
                size += own
            found.append((spec, chunk))
        return found

    def on_segment(self, segment: Segment) -> None:
        """Give a segment that has state on the host what moves it."""
        names = moved_arrays(segment.spec)
        if not names or not segment.tiles.count:
            return
        update = StreamedUpdate(self, segment, names, self._chunks)
        self._chunks += len(update.chunks)
        self.buffer_size = max(self.buffer_size, *(chunk.size for chunk in update.chunks))
        self.updates.append(update)
        segment.streamer = update

    @property
    def host_bytes(self) -> int:
        """Host memory taken for state, and for gradients."""
        return self.memory.taken + self._gradient_memory.taken

    @property
    def device_bytes(self) -> int:
        """Device memory of the buffers, once the first step has made them."""
        return self.buffer_size * len(self.lanes.buffers)

    def settle(self) -> None:
        """As `wait`, for gradients that are here too."""
        self.wait()
        if self.kept is not None:
            self.kept.arrived(list(self._mirrors))

    def wait(self) -> None:
        """Have the host wait until all updates so far are in its memory."""
        self.lanes.wait()


class StreamedUpdate:
    """Runs the tile passes of a segment whose state lives on the host."""

    def __init__(self, home: StreamedState, segment: Segment, names: Sequence[str], number: int) -> None:
        self._home, self._number = home, number
        # The segment has this: a cycle would keep the state in host memory until it is collected.
        self._segment_ref = weakref.ref(segment)
        self._in_slices = bool(segment.spec.program.slices.views)
        room = 1 << 62 if self._in_slices else home.chunk_bytes
        self.chunks = cut_chunks(segment, names, room)
        self._traffic = [traffic_of(segment.spec, index) for index in range(len(segment.spec.program.tiles))]
        self._ready = False

    @property
    def _segment(self) -> Segment:
        segment = self._segment_ref()
        assert segment is not None, "only its segment runs it"
        return segment

    def settle(self) -> None:
        """Have the host wait for updates so far, and for gradients that it keeps."""
        self._home.settle()

    def _buffer(self, position: int) -> Buffer:
        buffers = self._home.lanes.buffers
        return buffers[(self._number + position) % len(buffers)]

    def _prepare(self) -> None:
        """Have buffers, and tables that point into them."""
        segment, self._ready = self._segment, True
        self._home.lanes.provide(self._home.buffer_size)
        if not self._in_slices:
            tile_ranges = [chunk.tile_range(self._buffer(place).memory) for place, chunk in enumerate(self.chunks)]
            segment.set_tile_ranges(tile_ranges)
            return
        (chunk,) = self.chunks
        memory = self._buffer(0).memory
        for name, begins in chunk.begins.items():
            for place, begin in zip(chunk.tensors, begins.tolist()):
                arrays = segment.entries[place].arrays
                arrays[name] = staged_view(arrays[name], begin, memory)
        segment.read_addresses()
        segment.upload()

    def run(self, index: int) -> None:
        """Bring in chunk after chunk, update it and send it out; the host does not wait."""
        program = self._segment.spec.program
        if program.tiles[index] is None and not program.slices_before(index):
            return
        if not self._ready:
            self._prepare()
        for position, chunk in enumerate(self.chunks):
            self._update(index, position, chunk)
        if not self._in_slices:
            self._segment.finish_tile_ranges(index)

    def _update(self, index: int, position: int, chunk: Chunk) -> None:
        lanes, buffer = self._home.lanes, self._buffer(position)
        into, out = self._traffic[index]
        lanes.inward.follow(buffer.free)
        lanes.inward.copy([(run.inside(buffer.memory), run.host) for name in into for run in chunk.runs[name]])
        lanes.compute.follow(lanes.inward.mark())
        if self._in_slices:
            self._segment.tile_pass(index)
        else:
            self._segment.run_tile_range(index, position)
        buffer.free = lanes.compute.mark()
        if out:
            lanes.outward.follow(buffer.free)
            lanes.outward.copy([(run.host, run.inside(buffer.memory)) for name in out for run in chunk.runs[name]])
            buffer.free = lanes.outward.mark()
