"""Where communication runs: on a GPU in a stream of its own, on a CPU in the backend's threads."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ..compat import current_stream_number
from ..devices import has_streams
from ..engine.capturing import is_capturing

__all__ = ["Channel", "Mark"]


_NOTHING: AbstractContextManager[None] = nullcontext()


class Mark(NamedTuple):
    """A place in a line of communication.

    Args:
        event: of the stream there.
        place: larger than those of all marks before.
    """

    event: torch.cuda.Event
    place: int

    @property
    def has_passed(self) -> bool:
        """Whether everything before it is done."""
        return self.event.query()


class Channel:
    """A line of communication beside the computation of one device.

    Args:
        device: where the tensors are.
    """

    in_order = False
    """Whether what is asked for here runs in that order by itself, without the host waiting."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # What it has to do is little and awaited: it goes before the next blocks of a large kernel.
        self._stream = torch.cuda.Stream(device, priority=-1) if has_streams(device) else None
        if self._stream is not None:
            self.in_order = True
        self._index = 0 if self._stream is None else self._stream.device_index
        self._writers: dict[int, torch.cuda.Stream] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._marks = 0
        self._reached: dict[int, int] = {}
        """The last mark that each stream has waited for, by the stream's number: what came before it has come too."""

    def note_writer(self) -> None:
        """Remember the current stream as one that writes what is going to be sent, until `forget_writers`."""
        if self._stream is None:
            return
        number = current_stream_number(self._index)
        if number not in self._writers:
            self._writers[number] = self._current(number)

    def _current(self, number: int) -> torch.cuda.Stream:
        """The current stream, which has this number; torch's own look takes ten times as long as one in here."""
        known = self._streams.get(number)
        if known is None:
            known = self._streams[number] = torch.cuda.current_stream(self._device)
        return known

    def forget_writers(self) -> None:
        """What the streams of `note_writer` have written is sent."""
        self._writers.clear()

    def keep(self, *tensors: torch.Tensor | None) -> None:
        """Keep the memory of tensors, when they are let go, until the communication of that time has run."""
        if self._stream is not None:
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(self._stream)

    def after_compute(self, *tensors: torch.Tensor | None) -> AbstractContextManager[Any]:
        """A block of communication that begins when the computation so far has ended: that until this call.

        Args:
            tensors: what it works on and nobody keeps; their memory is kept until it has run.
        """
        if self._stream is None:
            return _NOTHING
        number = current_stream_number(self._index)
        for stream in {**self._writers, number: self._current(number)}.values():
            self._stream.wait_stream(stream)
        self.keep(*tensors)
        return torch.cuda.stream(self._stream)

    def settle(self) -> None:
        """Before a CUDA graph: let the current stream wait for all there is, so that nothing in the graph has to."""
        with self.after_compute():
            pass
        self.await_communication()

    def _is_elsewhere(self) -> bool:
        """Whether a graph is captured of which communication is not a part yet: it has nothing to wait for there."""
        if self._stream is None or not is_capturing():
            return False
        with torch.cuda.stream(self._stream):
            return not is_capturing()

    def await_communication(self) -> None:
        """Let the current stream wait for all communication so far."""
        if self._stream is not None and not self._is_elsewhere():
            self._current(current_stream_number(self._index)).wait_stream(self._stream)

    def wait_for(self, mark: Mark) -> None:
        """Let the current stream wait for a mark; one that has waited for it, or for a later one, does not again.

        Whoever looks a parameter up comes here.
        """
        number = current_stream_number(self._index)
        if self._reached.get(number, 0) < mark.place:
            self._current(number).wait_event(mark.event)
            self._reached[number] = mark.place

    def mark(self, before: Mark | None = None) -> Mark | None:
        """A mark after all communication so far; None on a CPU.

        Args:
            before: an earlier one that is not needed any more, of which the new one takes the event.
        """
        if self._stream is None:
            return None
        self._marks += 1
        return Mark(self._stream.record_event(None if before is None else before.event), self._marks)
