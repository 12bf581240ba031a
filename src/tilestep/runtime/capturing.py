"""What a step inside a CUDA graph needs that other steps do not: nothing may be built, moved or uploaded by the way.

A graph replays the launches it has seen, with the addresses they had. So it reads the gradients' addresses from a table
of its own, which no later step overwrites; all other tables are shared with steps outside the graph and never change
again: what would change them makes the engine stale, and a new one is built. Only hyperparameters change in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import CaptureError
from ..linalg.batches import MatrixBatches, SkippedValues
from .segment import Segment

PREPARE = "call optimizer.prepare_capture() before the capture"
WARM_UP = "run a step like it before the capture"


def require(condition: bool, reason: str) -> None:
    """Raise `CaptureError` unless the condition holds."""
    if not condition:
        raise CaptureError(f"the step cannot be captured: {reason}")


class GraphTables:
    """The tables of gradient addresses that an engine's CUDA graphs read."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._sources: list[torch.Tensor] = []
        """Memory that graphs copy from at each replay; nothing says when a graph is gone."""
        self._prepared: tuple[np.ndarray, torch.Tensor] | None = None

    def prepare(self, addresses: np.ndarray) -> torch.Tensor:
        """Fill a table before a capture, so that the graph need not copy it."""
        table = torch.from_numpy(addresses).to(self._like.device)
        self._prepared = addresses, table
        return table

    def forget(self) -> None:
        """Let go of the prepared table."""
        self._prepared = None

    def table(self, addresses: np.ndarray) -> torch.Tensor:
        """A table for the graph that is being captured."""
        if self._prepared is not None and np.array_equal(self._prepared[0], addresses):
            return self._prepared[1]
        source = torch.empty(addresses.shape, dtype=torch.int64, device="cpu", pin_memory=self._like.is_cuda)
        source.copy_(torch.from_numpy(addresses))
        self._sources.append(source)
        return torch.empty_like(self._like).copy_(source, non_blocking=True)


def require_no_branches(segments: Sequence[Segment], *, alone: bool) -> None:
    """Raise `CaptureError` if the host has to decide what a step needs, or to wait in it, where no graph can let it."""
    for segment in segments:
        matrices, rule = segment.matrices, segment.spec.program.graph.title
        if matrices is None or not matrices.waits or matrices.skipped_values is not None:
            continue
        require(
            matrices.plain() is not None, f"every step of rule {rule} decomposes matrices, for which the host waits"
        )
        require(
            alone,
            f"the host decides at each step of rule {rule} which matrix operations it needs; capture the step alone, "
            "tilestep.capture(optimizer): its replay() decides, and runs outside the graph the steps that it must",
        )


@contextmanager
def nothing_skipped(segments: Sequence[Segment]) -> Iterator[None]:
    """A block in which the host decides nothing: steps do all that some need, unless `HostBranches` leaves it out."""
    undecided = [
        segment.matrices for segment in segments if segment.matrices and segment.matrices.skipped_values is None
    ]
    for matrices in undecided:
        matrices.skipped_values = {}
    try:
        yield
    finally:
        for matrices in undecided:
            matrices.skipped_values = None


@dataclass
class _Part:
    """A segment whose steps differ; `active` tensors take part in the captured one."""

    matrices: MatrixBatches
    skipped_values: SkippedValues
    active: np.ndarray
    may_skip: bool = False


class HostBranches:
    """What a captured step leaves out, of all segments of an engine.

    Some work is needed in some steps alone, by conditions on hyperparameters and the step count. A CUDA graph does the
    same at every replay, so it leaves that work out. The host evaluates the conditions without waiting, and
    only where it is sure that a step needs none of it is the graph replayed; other steps run outside of the graph.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._parts: list[_Part] = []
        self._segments = [segment for segment in segments if segment.matrices and segment.matrices.waits]
        for segment in self._segments:
            assert segment.matrices is not None
            skipped_values = segment.matrices.plain()
            assert skipped_values is not None
            self._parts.append(_Part(segment.matrices, skipped_values, segment.matrices.active))

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """A block in which steps leave it out, whatever they need: their capture."""
        for part in self._parts:
            part.matrices.skipped_values = part.skipped_values
        try:
            yield
        finally:
            for segment, part in zip(self._segments, self._parts):
                part.matrices.skipped_values = None
                part.active, part.may_skip = part.matrices.active, segment.may_skip

    def suffices(self) -> bool:
        """Whether the captured step is what the next step should be; nothing is waited for."""
        return all(part.matrices.suffices(part.skipped_values, part.active) for part in self._parts)

    def replayed(self) -> None:
        """The captured step was launched."""
        for part in self._parts:
            part.matrices.replayed(part.active, part.may_skip)
