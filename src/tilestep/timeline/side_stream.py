"""`SideStream`: work concurrent with a device's computation, in a separate CUDA stream; immediate on a CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from ..compat import UPDATE, current_stream_number, is_capturing, marked
from ..devices import has_streams
from ..native.table import memory_of

Event = torch.cuda.Event | None  # None on a CPU, where earlier work has finished
_NOTHING: AbstractContextManager[None] = nullcontext()


class Mark(NamedTuple):
    """An event with its place in the order of its stream's marks."""

    event: torch.cuda.Event
    place: int


class Ticket:
    """A pending transition: the host's remaining work, and the mark that follows the device's work."""

    def __init__(self, work: Callable[[], object] | None = None, mark: Mark | None = None) -> None:
        self.work, self.mark = work, mark

    def finish(self) -> None:
        """Do the host's work; if it raises, the next wait tries again."""
        work, self.work = self.work, None
        try:
            if work is not None:
                work()
        except BaseException:
            self.work = work
            raise


class SideStream:
    """A device's side stream: work runs in the order of its submission."""

    in_order = False  # whether a CUDA stream orders the work, without waits of the host

    def __init__(self, device: torch.device, *, own: bool = True, priority: int = 0) -> None:
        self._device, self._is_gpu = device, has_streams(device)
        self.stream = torch.cuda.Stream(device, priority=priority) if own and self._is_gpu else None
        if self.stream is not None:
            self.in_order = True
        self._index = (device.index or 0) if self.stream is None else self.stream.device_index
        self._entered_from: torch.cuda.Stream | None = None
        self.writers: dict[int, torch.cuda.Stream] = {}  # by number, further streams that `after_compute` waits for
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._marks = 0
        self._reached: dict[int, int] = {}  # by number of a stream, the last mark that it has waited for

    # The current stream.

    def current(self) -> torch.cuda.Stream | None:
        """The current stream; None on a CPU."""
        return None if self.stream is None else self._numbered(current_stream_number(self._index))

    def _numbered(self, number: int) -> torch.cuda.Stream:
        """The current stream, whose number is `number`; torch.cuda.current_stream takes ten times as long."""
        current = self._streams.get(number)
        if current is None:
            current = self._streams[number] = torch.cuda.current_stream(self._device)
        return current

    # Work in this stream.

    def after(self, *streams: torch.cuda.Stream) -> AbstractContextManager[None]:
        """A block of work in this stream, after the work so far in `streams`, by default in the current stream."""
        return _NOTHING if self.stream is None else self._after(self.stream, streams)

    @contextmanager
    def _after(self, stream: torch.cuda.Stream, streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
        home = self.current()
        if home is None or home == stream:
            yield
            return
        for waited in streams or (home,):
            stream.wait_stream(waited)
        before, self._entered_from = self._entered_from, home
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            self._entered_from = before

    def after_compute(self, *tensors: torch.Tensor | None) -> AbstractContextManager[Any]:
        """A block of work in this stream, after the work so far in the current stream and in `writers`."""
        if self.stream is None:
            return _NOTHING
        number = current_stream_number(self._index)
        for stream in {**self.writers, number: self._numbered(number)}.values():
            self.stream.wait_stream(stream)
        self.keep(*tensors)
        return torch.cuda.stream(self.stream)

    def note_current(self, streams: dict[int, torch.cuda.Stream]) -> None:
        """Add the current stream to `streams`, by number; nothing on a CPU."""
        if self.stream is not None:
            number = current_stream_number(self._index)
            if number not in streams:
                streams[number] = self._numbered(number)

    @contextmanager
    def left(self) -> Iterator[None]:
        """A block of work in the stream from which this stream was entered; this stream waits, and is waited for."""
        # So allocations inside belong to the compute stream.
        current = self.current()
        if self.stream is None or current is None:
            yield
            return
        home = self._entered_from if current == self.stream else current
        if home is None:
            yield
            return
        home.wait_stream(self.stream)
        with torch.cuda.stream(home):
            yield
        self.stream.wait_stream(home)

    @contextmanager
    def working(self) -> Iterator[None]:
        """A block whose launches and copies go into this stream, without a wait for other streams."""
        with marked(UPDATE), nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy sources to targets in this stream; pairs of target and source."""
        with self.working():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def keep(self, *tensors: torch.Tensor | None) -> None:
        """Keep the allocator from reusing the tensors' memory before this stream's work so far has run."""
        if self.stream is not None:
            on_gpu = [tensor for tensor in tensors if tensor is not None and tensor.is_cuda]
            for tensor in memory_of(on_gpu):
                tensor.record_stream(self.stream)

    # Waits between streams.

    def follow(self, *events: Event) -> None:
        """Make later work in this stream wait for events of other streams."""
        for event in events:
            if event is not None:
                (self.stream or torch.cuda.current_stream(self._device)).wait_event(event)

    def mark(self) -> Event:
        """An event after all work so far."""
        return (self.stream or torch.cuda.current_stream(self._device)).record_event() if self._is_gpu else None

    def next_mark(self, before: Mark | None = None) -> Mark | None:
        """A mark after all work so far, for `wait_for`; None on a CPU."""
        if self.stream is None:
            return None
        self._marks += 1
        return Mark(self.stream.record_event(None if before is None else before.event), self._marks)

    def wait_for(self, mark: Mark, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """Make streams, by default the current stream, wait for a mark, unless they have waited for a later mark."""
        # Called for every look-up of a pending parameter.
        for stream in streams or (self._numbered(current_stream_number(self._index)),):
            if self._reached.get(stream.cuda_stream, 0) < mark.place:
                stream.wait_event(mark.event)
                self._reached[stream.cuda_stream] = mark.place

    def join(self) -> None:
        """Make the current stream wait for all work so far."""
        if self.stream is not None and not self._is_elsewhere():
            self._numbered(current_stream_number(self._index)).wait_stream(self.stream)

    def join_all(self) -> bool:
        """Make every stream that used this stream wait for all work so far, before memory returns to them.

        Returns whether they wait; False on a CPU, and during a capture.
        """
        # A graph under capture does not contain this work, and its memory is not freed inside.
        if self.stream is None or is_capturing():
            return False
        for stream in self._streams.values():
            stream.wait_stream(self.stream)
        return True

    def _is_elsewhere(self) -> bool:
        """Whether a graph is under capture without this stream, so that it must not wait for this stream."""
        if not is_capturing():
            return False
        with torch.cuda.stream(self.stream):
            return not is_capturing()

    def settle(self) -> None:
        """Before a capture: make the current stream wait for all work so far, so that the graph needs no wait."""
        with self.after_compute():
            pass
        self.join()

    def synchronize(self) -> None:
        """Make the host wait for all work so far."""
        if self.stream is not None:
            self.stream.synchronize()


class Held:
    """Keeps memory that side-stream work still reads, until the streams that own it have waited for that work."""

    # So the memory is freed at a point in each owner's order, however far the host runs ahead. With `record_stream` the
    # allocator frees it only when the host sees that the work has run. A wait of another stream would not be enough.

    def __init__(self, line: SideStream) -> None:
        self._line, self._bytes = line, 0
        self.pending: deque[tuple[Any, Mark | None, Sequence[torch.cuda.Stream], int]] = deque()

    def hold(self, memory: Any, mark: Mark | None, streams: Sequence[torch.cuda.Stream], nbytes: int = 0) -> None:
        """Keep memory owned by `streams`, which is read before `mark`."""
        self.pending.append((memory, mark, streams, nbytes))
        self._bytes += nbytes

    def release(self, most: int = -1) -> None:
        """Make streams wait and free their memory: all of it, or all but `most` bytes and the last entry."""
        while self.pending and (most < 0 or (self._bytes > most and len(self.pending) > 1)):
            _, mark, streams, nbytes = self.pending[0]
            if mark is not None:
                self._line.wait_for(mark, streams)
            self.pending.popleft()
            self._bytes -= nbytes
