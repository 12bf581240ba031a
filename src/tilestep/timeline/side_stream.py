"""Work concurrent with a device's computation: in a separate stream on a GPU; on a CPU at once, or in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from ..compat import UPDATE, current_stream_number, is_capturing, marked
from ..devices import has_streams
from ..native.table import memory_of

Event = torch.cuda.Event | None  # a point in a stream's order; None on a CPU, where all before it has happened
_NOTHING: AbstractContextManager[None] = nullcontext()


class Mark(NamedTuple):
    """A point that knows which others it comes after."""

    event: torch.cuda.Event
    place: int


class Ticket:
    """A transition on its way: what the host still has to do for it, and the point in a line after it."""

    def __init__(self, work: Callable[[], object] | None = None, mark: Mark | None = None) -> None:
        self.work, self.mark = work, mark

    def finish(self) -> None:
        """Do what the host has to do; if it raises, the next to wait tries again."""
        work, self.work = self.work, None
        try:
            if work is not None:
                work()
        except BaseException:
            self.work = work
            raise


class SideStream:
    """A line of work of one device, in the order in which it is asked for."""

    in_order = False  # whether what is asked for runs in that order by itself, without the host waiting

    def __init__(self, device: torch.device, *, own: bool = True, priority: int = 0) -> None:
        self._device, self._is_gpu = device, has_streams(device)
        self.stream = torch.cuda.Stream(device, priority=priority) if own and self._is_gpu else None
        if self.stream is not None:
            self.in_order = True
        self._index = (device.index or 0) if self.stream is None else self.stream.device_index
        self._entered_from: torch.cuda.Stream | None = None
        self.writers: dict[int, torch.cuda.Stream] = {}  # by number those that `after_compute` waits for
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._marks = 0
        self._reached: dict[int, int] = {}  # by number of a stream the last mark that it has waited for

    # Which stream is current.

    def current(self) -> torch.cuda.Stream | None:
        """The stream that work goes to now; None on a CPU."""
        return None if self.stream is None else self._numbered(current_stream_number(self._index))

    def _numbered(self, number: int) -> torch.cuda.Stream:
        """The current stream, which has this number; torch's own look takes ten times as long as one in here."""
        current = self._streams.get(number)
        if current is None:
            current = self._streams[number] = torch.cuda.current_stream(self._device)
        return current

    # Work in this stream.

    def after(self, *streams: torch.cuda.Stream) -> AbstractContextManager[None]:
        """A block of work that begins when these streams, by default the current one, have done what they have."""
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
        """A block of work that begins when the current stream and `writers` have done what they have."""
        if self.stream is None:
            return _NOTHING
        number = current_stream_number(self._index)
        for stream in {**self.writers, number: self._numbered(number)}.values():
            self.stream.wait_stream(stream)
        self.keep(*tensors)
        return torch.cuda.stream(self.stream)

    def note_current(self, streams: dict[int, torch.cuda.Stream]) -> None:
        """Add the stream that work goes to now to some streams, by number; on a CPU there is none."""
        if self.stream is not None:
            number = current_stream_number(self._index)
            if number not in streams:
                streams[number] = self._numbered(number)

    @contextmanager
    def left(self) -> Iterator[None]:
        """A block of work that nothing in this stream runs beside, on the stream from which it was entered."""
        # What it allocates is that stream's memory, as if there were no other.
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
        """A block whose launches and copies go into this line, after what was asked for in it."""
        with marked(UPDATE), nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy in this line."""
        with self.working():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def keep(self, *tensors: torch.Tensor | None) -> None:
        """Let memory of these tensors be given to nothing else before the work so far has run."""
        if self.stream is not None:
            on_gpu = [tensor for tensor in tensors if tensor is not None and tensor.is_cuda]
            for tensor in memory_of(on_gpu):
                tensor.record_stream(self.stream)

    # Waiting for it, and its waiting for others.

    def follow(self, *events: Event) -> None:
        """Let what follows here wait for points in other lines."""
        for event in events:
            if event is not None:
                (self.stream or torch.cuda.current_stream(self._device)).wait_event(event)

    def mark(self) -> Event:
        """The point after all that was asked for here so far."""
        return (self.stream or torch.cuda.current_stream(self._device)).record_event() if self._is_gpu else None

    def next_mark(self, before: Mark | None = None) -> Mark | None:
        """A mark after all work so far, for `wait_for`; None on a CPU."""
        if self.stream is None:
            return None
        self._marks += 1
        return Mark(self.stream.record_event(None if before is None else before.event), self._marks)

    def wait_for(self, mark: Mark, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """Let streams, by default the current one, wait for a mark; one that has waited for a later one does not."""
        # Every look at a parameter comes through this function.
        for stream in streams or (self._numbered(current_stream_number(self._index)),):
            if self._reached.get(stream.cuda_stream, 0) < mark.place:
                stream.wait_event(mark.event)
                self._reached[stream.cuda_stream] = mark.place

    def join(self) -> None:
        """Let the current stream wait for all work so far."""
        if self.stream is not None and not self._is_elsewhere():
            self._numbered(current_stream_number(self._index)).wait_stream(self.stream)

    def join_all(self) -> bool:
        """Let every stream that this was used from wait for all work so far: before memory is given back to them.

        Whether they do: on a CPU there are none.
        """
        # A graph that is captured now knows nothing of this work, and none of its memory is given back inside.
        if self.stream is None or is_capturing():
            return False
        for stream in self._streams.values():
            stream.wait_stream(self.stream)
        return True

    def _is_elsewhere(self) -> bool:
        """Whether a graph is captured of which this stream is not a part yet: there is nothing to wait for there."""
        if not is_capturing():
            return False
        with torch.cuda.stream(self.stream):
            return not is_capturing()

    def settle(self) -> None:
        """Before a CUDA graph: let the current stream wait for all there is, so that nothing in the graph has to."""
        with self.after_compute():
            pass
        self.join()

    def synchronize(self) -> None:
        """Have the host wait for all that was asked for here."""
        if self.stream is not None:
            self.stream.synchronize()


class Held:
    """Memory that work in a line still reads, until the streams that it belongs to have waited for that work."""

    # So it is free at a point of each stream, however far the host is ahead of it: the allocator would free it when the
    # host sees that the work has run. The stream of the next memory may be another: its waiting would not do.

    def __init__(self, line: SideStream) -> None:
        self._line, self._bytes = line, 0
        self.pending: deque[tuple[Any, Mark | None, Sequence[torch.cuda.Stream], int]] = deque()

    def hold(self, memory: Any, mark: Mark | None, streams: Sequence[torch.cuda.Stream], nbytes: int = 0) -> None:
        """Keep memory of these streams, which is read before a mark."""
        self.pending.append((memory, mark, streams, nbytes))
        self._bytes += nbytes

    def give_back(self, most: int = -1) -> None:
        """Let streams wait and have their memory back: all of it, or but for so many bytes and the last."""
        while self.pending and (most < 0 or (self._bytes > most and len(self.pending) > 1)):
            _, mark, streams, nbytes = self.pending[0]
            if mark is not None:
                self._line.wait_for(mark, streams)
            self.pending.popleft()
            self._bytes -= nbytes
