"""Where updates run beside other work: on a GPU in a stream of their own; on a CPU where somebody asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ..compat import current_stream_number
from ..devices import has_streams

_NOTHING: AbstractContextManager[None] = nullcontext()


class Lane:
    """A line of updates beside the computation of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device) if has_streams(device) else None
        self._entered_from: torch.cuda.Stream | None = None

    def current(self) -> torch.cuda.Stream | None:
        """The stream that work goes to now; None on a CPU."""
        return None if self.stream is None else torch.cuda.current_stream(self._device)

    def current_number(self) -> int | None:
        """The same stream's number, which costs a tenth of the stream; None on a CPU."""
        return None if self.stream is None else current_stream_number(self._device.index)

    def after(self, *streams: torch.cuda.Stream) -> AbstractContextManager[None]:
        """A block of updates that begin when what these streams have been given so far is done."""
        return _NOTHING if self.stream is None else self._after(self.stream, streams)

    @contextmanager
    def _after(self, stream: torch.cuda.Stream, streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
        home = self.current()
        if home is None or home == stream:
            yield
            return
        for each in streams or (home,):
            stream.wait_stream(each)
        before, self._entered_from = self._entered_from, home
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            self._entered_from = before

    @contextmanager
    def left(self) -> Iterator[None]:
        """A block of work that no update runs beside, on the stream from which the lane was entered.

        What it allocates is that stream's memory, as if there were no lane.
        """
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

    def mark(self) -> torch.cuda.Event | None:
        """An event after all updates so far; None on a CPU."""
        return None if self.stream is None else self.stream.record_event()

    def join(self) -> None:
        """Let the current stream wait for all updates so far."""
        current = self.current()
        if current is not None and self.stream is not None:
            current.wait_stream(self.stream)

    def keep(self, tensors: list[torch.Tensor]) -> None:
        """Let memory of these tensors be given to nobody else before the updates so far have run."""
        if self.stream is not None:
            for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values():
                tensor.record_stream(self.stream)
