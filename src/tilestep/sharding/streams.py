"""Where communication runs: on a GPU in a stream of its own, on a CPU in the backend's threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..compat import current_stream_number
from ..engine.capturing import is_capturing

__all__ = ["Channel"]


class Channel:
    """A line of communication beside the computation of one device.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # What it has to do is little and awaited: it goes before the next blocks of a large kernel.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._index = 0 if self._stream is None else self._stream.device_index
        self._compute: dict[int, torch.cuda.Stream] = {}

    @property
    def in_order(self) -> bool:
        """Whether what is asked for here runs in that order by itself, without the host waiting."""
        return self._stream is not None

    def note_stream(self) -> None:
        """Remember the current stream as one that has written what is going to be sent."""
        if self._stream is None:
            return
        number = current_stream_number(self._index)
        if number not in self._compute:
            self._compute[number] = torch.cuda.current_stream(self._device)

    def keep(self, *tensors: torch.Tensor | None) -> None:
        """Keep the memory of tensors, when they are let go, until the communication of that time has run."""
        if self._stream is not None:
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(self._stream)

    @contextmanager
    def after_compute(self, *tensors: torch.Tensor | None) -> Iterator[None]:
        """A block of communication that begins when the computation so far has ended.

        Args:
            tensors: what it works on and nobody keeps; their memory is kept until it has run.
        """
        if self._stream is None:
            yield
            return
        self.note_stream()
        for stream in self._compute.values():
            self._stream.wait_stream(stream)
        self._compute.clear()
        self.keep(*tensors)
        with torch.cuda.stream(self._stream):
            yield

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
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def wait_for(self, event: torch.cuda.Event, known: set[int]) -> bool:
        """Let the current stream wait for an event.

        Args:
            event: one that `mark` gave.
            known: the streams that have waited for it, by number; this one is added.

        Returns:
            Whether it has happened, so that nobody else has to wait; who has waited before is not told.
        """
        number = current_stream_number(self._index)
        if number in known:
            return False
        torch.cuda.current_stream(self._device).wait_event(event)
        known.add(number)
        return event.query()

    def mark(self) -> torch.cuda.Event | None:
        """An event after all communication so far; None on a CPU."""
        return None if self._stream is None else self._stream.record_event()
