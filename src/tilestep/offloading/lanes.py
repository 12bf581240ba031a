"""Two lanes of copies beside the computation: into the device and out of it, each in order, without the host.

On a CPU, where nothing runs beside anything, both lanes are immediate: the same chunks, buffers and copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from ..devices import has_streams
from ..marks import UPDATE, marked

Mark = torch.cuda.Event | None
"""A point in a lane's order; None on a CPU, where everything before it has happened."""


class Lane:
    """A queue of work on a device: a stream of our own, or whichever is current."""

    def __init__(self, device: torch.device, own: bool = True) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if own and has_streams(device) else None
        self._streams: dict[int, Lane] = {}

    def here(self) -> Lane:
        """The lane that work goes to now, and stays with its stream when another one is current."""
        if self._stream is not None or not has_streams(self._device):
            return self
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream not in self._streams:
            lane = self._streams[stream.cuda_stream] = Lane(self._device, own=False)
            lane._stream = stream
        return self._streams[stream.cuda_stream]

    def after(self, *marks: Mark) -> None:
        """Let what follows here wait for points in other lanes."""
        for mark in marks:
            if mark is not None:
                (self._stream or torch.cuda.current_stream(self._device)).wait_event(mark)

    def mark(self) -> Mark:
        """The point after all that was asked for here so far."""
        if not has_streams(self._device):
            return None
        return (self._stream or torch.cuda.current_stream(self._device)).record_event()

    @contextmanager
    def working(self) -> Iterator[None]:
        """A block whose launches and copies go into this lane."""
        with marked(UPDATE), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy in this lane."""
        with self.working():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory, once it is given back, until this lane has used it."""
        if self._stream is not None and tensor.is_cuda:
            tensor.record_stream(self._stream)

    def wait(self) -> None:
        """Have the host wait for all that was asked for here."""
        if self._stream is not None:
            self._stream.synchronize()


class Buffer:
    """Device memory through which chunks pass one after the other."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.free: Mark = None
        """When the last chunk has left it."""


class Lanes:
    """The two lanes of one device, its computation, and the buffers between them."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self.inward, self.outward = Lane(device), Lane(device)
        self.compute = Lane(device, own=False)
        self.buffers = [Buffer() for _ in range(count)]

    def provide(self, size: int) -> None:
        """Make every buffer at least this large, in bytes; what was in them is lost."""
        for buffer in self.buffers:
            if buffer.memory.numel() < size:
                buffer.memory = torch.empty(size, dtype=torch.uint8, device=self.device)
                self.inward.uses(buffer.memory)
                self.outward.uses(buffer.memory)
                # Whoever had this memory before may still be computing with it.
                buffer.free = self.compute.mark()

    def wait(self) -> None:
        """Have the host see what was copied to it, and let it write to what was copied from it."""
        self.inward.wait()
        self.outward.wait()
