"""`offload(where="gpu")`: chunks of state are copied to the device, updated there, and copied back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..devices import is_host
from ..errors import OffloadError
from ..kernels.spec import KernelSpec
from ..native.host_memory import HostMemory
from ..optimizer.memory import BySpec, Gradients
from ..runtime import DeviceEngine, Entry
from ..runtime.passes import Passes
from ..timeline.side_stream import Event
from .copies import cut_chunks
from .offloaded import ChunkedPasses, Mirrors, StateOnHost, host_arrays, traffic_of


class StreamedState(StateOnHost):
    """State in page-locked host memory, streamed through buffers on the device at each update."""

    def __init__(self, device: torch.device, chunk_bytes: int, buffers: int, keeps_gradients: bool = False) -> None:
        mirrors = Mirrors(HostMemory(device, "the gradients"), has_parameters=False)
        super().__init__(device, chunk_bytes, keeps_gradients, HostMemory(device), mirrors)
        self.replaces_gradients = keeps_gradients
        self.buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * buffers
        """Device memory for one chunk at a time."""
        self.free: list[Event] = [None] * buffers  # per buffer, after its last chunk was copied out
        self.buffer_size = 0  # bytes of the largest chunk
        self._chunks = 0
        self._returning: set[int] = set()  # parts whose gradients are copied back, for matrix operations

    def contains(self, buffer: torch.Tensor, param: torch.Tensor) -> bool:
        return is_host(buffer.device) and self.memory.holds(buffer)

    def on_build(self, params: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Drop the chunks of earlier tables."""
        super().on_build(params)
        self._chunks = 0
        if self.kept is not None:
            self.set_params([param for _, param in params])
            self._returning.clear()

    def on_entry(self, spec: KernelSpec, entry: Entry) -> None:
        """Set the order of gradients to that of arrays, whose chunks are runs of bytes, and the device of gradients."""
        entry.ordered = bool(host_arrays(spec)) and not spec.program.slices.views
        if self.kept is None:
            return
        if spec.program.matrices.scratch:
            self._returning.add(id(entry.param))
        else:
            entry.gradient_device = torch.device("cpu")

    def gradients(self, params: Sequence[Sequence[torch.Tensor]], gradients: Gradients) -> Gradients:
        """The gradients on the host; kernels wait for their arrival, the host does not."""
        if self.kept is None:
            return gradients
        self.require_fitting()
        taken = [
            [
                (self.mirrors[param], self.kept.step_gradient(self.mirrors[param], gradient))
                for param, gradient in zip(*lists)
            ]
            for lists in zip(params, gradients)
        ]
        self.copies.order(self.compute)
        return [
            [
                gradient.to(self.device, non_blocking=True)
                if gradient is not None and id(mirror.part) in self._returning
                else gradient
                for mirror, gradient in pairs
            ]
            for pairs in taken
        ]

    def finish(self, engine: DeviceEngine) -> None:
        """Drop the gradients, which the step has consumed."""
        if self.kept is not None:
            self.drop_gradients()

    def split_segments(self, parts: BySpec) -> BySpec:
        """Cut segments with passes over rows, columns or other slices so that each fits a buffer."""
        cut: list[tuple[KernelSpec, list[Entry]]] = []
        for spec, entries in parts:
            names, room = host_arrays(spec) if spec.program.slices.views else (), -1
            for entry in entries:
                own = sum(entry.arrays[name].nbytes for name in names)
                if room < own:
                    cut.append((spec, []))
                    room = self.chunk_bytes
                cut[-1][1].append(entry)
                room -= own
        return cut

    def on_passes(self, passes: Passes) -> None:
        """Stream a segment with state on the host."""
        segment = passes.segment
        names = host_arrays(segment.spec)
        if not names or not segment.tiles.count:
            return
        if not passes.has_kernels:
            raise OffloadError(
                "offload() streams state through kernels, and eager PyTorch has none: install Triton for a GPU, or a "
                "C++ compiler for a CPU"
            )
        update = StreamedUpdate(self, passes, names, self._chunks)
        self._chunks += len(update.chunks)
        self.buffer_size = max(self.buffer_size, *(chunk.size for chunk in update.chunks))
        # The only reference: a cycle would keep the state until a garbage collection.
        segment.streamer = update

    @property
    def device_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the buffers, which the first step allocates."""
        return self.buffer_size * len(self.buffers)

    def settle(self) -> None:
        """Wait for state, and for gradients on the host."""
        self.wait()
        if self.kept is not None:
            self.kept.arrived(list(self.mirrors))


class StreamedUpdate(ChunkedPasses):
    """Runs the tile passes of a segment with state on the host."""

    def __init__(self, state: StreamedState, passes: Passes, names: Sequence[str], number: int) -> None:
        super().__init__(passes, state.chunk_bytes)
        segment = passes.segment
        self._state, self._number = state, number
        self.chunks = cut_chunks(passes, names, self._room)
        self._traffic = [traffic_of(segment.spec, index) for index in range(len(segment.spec.program.tiles))]
        self._ready = False

    def settle(self) -> None:
        """Make the host wait for the updates so far, and for gradients on it."""
        self._state.settle()

    def _place(self, position: int) -> int:
        """The place of a chunk's buffer."""
        return (self._number + position) % len(self._state.buffers)

    def _memory(self, position: int) -> torch.Tensor:
        return self._state.buffers[self._place(position)]

    def prepare(self) -> None:
        """Allocate buffers, and make tables that point into them."""
        if self._ready:
            return
        passes, state, self._ready = self._passes, self._state, True
        for place, buffer in enumerate(state.buffers):
            # As large as the largest chunk; the contents of smaller buffers are not needed.
            if buffer.numel() < state.buffer_size:
                state.buffers[place] = buffer = torch.empty(state.buffer_size, dtype=torch.uint8, device=state.device)
                state.inward.keep(buffer)
                state.outward.keep(buffer)
                # Kernels that used this memory before may still be running.
                state.free[place] = state.compute.mark()
        if not self._in_slices:
            self.tile_ranges = [chunk.tile_range(self._memory(place)) for place, chunk in enumerate(self.chunks)]
            return
        (chunk,), self.tile_ranges = self.chunks, (None,)
        memory = self._memory(0)
        for name, begins in chunk.begins.items():
            for place, begin in zip(chunk.tensors, begins.tolist()):
                arrays = passes.segment.entries[place].arrays
                array, view = arrays[name], torch.empty(0, dtype=arrays[name].dtype, device=memory.device)
                at = begin // array.element_size()
                arrays[name] = view.set_(memory.untyped_storage(), at, array.shape, array.stride())
        passes.arrays.read()
        passes.upload()

    def copy_in(self, index: int, position: int) -> None:
        """Copy a chunk into its buffer."""
        state = self._state
        state.inward.follow(state.free[self._place(position)])
        state.inward.copy(self._copied(self._traffic[index][0], position))
        state.compute.follow(state.inward.mark())

    def copy_out(self, index: int, position: int) -> None:
        """Copy the written arrays of a chunk to the host."""
        state = self._state
        free = state.compute.mark()
        if self._traffic[index][1]:
            state.outward.follow(free)
            state.outward.copy([(host, own) for own, host in self._copied(self._traffic[index][1], position)])
            free = state.outward.mark()
        state.free[self._place(position)] = free

    def _copied(self, names: Sequence[str], position: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of memory of a chunk, in its buffer and on the host."""
        memory, runs = self._memory(position), self.chunks[position].runs
        return [
            (memory[run.place : run.place + run.stop - run.start], run.host) for name in names for run in runs[name]
        ]
