"""Matrix passes as CUDA graphs of their own: a hundred calls of a matrix library cost the host as much as one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

LEAST_MATRICES = 32
"""Fewer are not worth a graph: its workspace stays allocated between steps."""

_RUNS_BEFORE = 2
"""Kernels are built and libraries set themselves up in the first runs; a recording is too late for that."""


class RecordedPass:
    """A pass that launches the same work on the same memory at every step, recorded at its third run.

    Inside somebody else's capture, and where the recording fails, the work is launched as ever.
    """

    def __init__(self, device: torch.device, work: Callable[[], None], pool: Any) -> None:
        self._device = device
        self._work = work
        self._pool = pool
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._fails = False

    @property
    def is_recorded(self) -> bool:
        """Whether runs replay a graph."""
        return self._graph is not None

    def run(self) -> None:
        """Launch the pass on the current stream."""
        if torch.cuda.is_current_stream_capturing() or self._fails:
            self._work()
            return
        self._runs += 1
        if self._graph is None and self._runs > _RUNS_BEFORE:
            self._record()
        if self._graph is None:
            self._work()
        else:
            self._graph.replay()

    def _record(self) -> None:
        """Nothing runs while a graph is recorded, so what fails here can still be launched as ever."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            current, side = torch.cuda.current_stream(), _side_stream(self._device)
            side.wait_stream(current)
            try:
                with torch.cuda.stream(side):
                    graph.capture_begin(self._pool, capture_error_mode="thread_local")
                    try:
                        self._work()
                    finally:
                        graph.capture_end()
            except RuntimeError:
                self._fails = True
                return
            current.wait_stream(side)
        self._graph = graph


@lru_cache(maxsize=64)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that recordings are made on: the default one takes none.

    Its first product makes the matrix library's workspace for this stream, which would otherwise be memory of the
    first graph and stay there after it.
    """
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for dtype in (torch.bfloat16, torch.float32):
            small = torch.ones(1, 16, 16, dtype=dtype, device=device)
            torch.baddbmm(small, small, small)
    return stream
