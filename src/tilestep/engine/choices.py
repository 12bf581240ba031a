"""What only some steps need, and the host decides which: a captured step leaves it out, and says when that will not do.

A CUDA graph does the same at every replay. What it leaves out is what its rule needs in some steps alone, by conditions
on hyperparameters and the step count that the host can evaluate without waiting; where it cannot tell, the answer is
that the step needs it. So a replay of the graph is right if the host is sure, and else the step runs outside of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ..matrices.batches import MatrixBatches, SkippedValues
from .capturing import require
from .segment import Segment


def require_no_choices(segments: Sequence[Segment], *, alone: bool) -> None:
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
def nothing_left_out(segments: Sequence[Segment]) -> Iterator[None]:
    """A block in which the host decides nothing: steps do all that some need, unless `HostChoices` leaves it out."""
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


class HostChoices:
    """What a captured step leaves out, of all segments of an engine."""

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
