"""Steps inside CUDA graphs, where nothing may be built, moved or uploaded.

A graph replays its launches with the captured addresses. It reads the gradients' addresses from a separate table, which
no later step overwrites. All other tables are shared with steps outside the graph and must not change: a change makes
the engine stale, and a new engine is built. Only hyperparameters change in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from ..errors import CaptureError
from .passes import Passes

PREPARE = "call optimizer.prepare_capture() before the capture"
WARM_UP = "run the step once before the capture"


def require(condition: bool, reason: str) -> None:
    """Raise `CaptureError` unless the condition holds."""
    if not condition:
        raise CaptureError(f"the step cannot be captured: {reason}")


class GraphTables:
    """The tables of gradient addresses that an engine's CUDA graphs read."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self.in_use = False  # whether a graph reads the engine's tables; then only hyperparameters may change
        self.captures = False  # whether a step is being captured
        self._sources: list[torch.Tensor] = []
        """Memory that graphs copy from at each replay; never freed, because graphs do not report their deletion."""
        self._prepared: tuple[np.ndarray, torch.Tensor] | None = None

    def prepare(self, addresses: np.ndarray) -> torch.Tensor:
        """Fill a table before a capture, so that the graph need not copy it."""
        table = torch.from_numpy(addresses).to(self._like.device)
        self._prepared = addresses, table
        return table

    def forget(self) -> None:
        """Drop the prepared table."""
        self._prepared = None

    def table(self, addresses: np.ndarray) -> torch.Tensor:
        """Return a table for the graph under capture."""
        if self._prepared is not None and np.array_equal(self._prepared[0], addresses):
            return self._prepared[1]
        source = torch.empty(addresses.shape, dtype=torch.int64, device="cpu", pin_memory=self._like.is_cuda)
        source.copy_(torch.from_numpy(addresses))
        self._sources.append(source)
        return torch.empty_like(self._like).copy_(source, non_blocking=True)


def require_no_branches(every: Sequence[Passes], *, alone: bool) -> None:
    """Raise `CaptureError` if a step needs decisions or waits of the host, which a graph cannot contain."""
    for passes in every:
        matrices, rule = passes.matrices, passes.segment.spec.program.graph.title
        if matrices is None or not matrices.waits or matrices.skipped_values is not None:
            continue
        require(
            matrices.plain() is not None, f"every step of rule {rule} decomposes matrices, for which the host waits"
        )
        require(
            alone,
            f"the host decides at each step of rule {rule} which matrix operations to run; capture the step alone, "
            "tilestep.capture(optimizer): its replay() decides, and runs steps outside the graph if needed",
        )


@contextmanager
def nothing_skipped(every: Sequence[Passes]) -> Iterator[None]:
    """A block in which the host decides nothing: steps do all optional work, unless `HostBranches` skips it."""
    undecided = [passes.matrices for passes in every if passes.matrices and passes.matrices.skipped_values is None]
    for matrices in undecided:
        matrices.skipped_values = {}
    try:
        yield
    finally:
        for matrices in undecided:
            matrices.skipped_values = None


class HostBranches:
    """The optional work of an engine's segments, which captured steps skip.

    Conditions on hyperparameters and the step count determine the steps that need it. A CUDA graph repeats the same
    work at every replay, so it skips the optional work. The host evaluates the conditions without a sync; the graph is
    replayed only if the step certainly needs no optional work, and other steps run outside the graph.
    """

    def __init__(self, every: Sequence[Passes]) -> None:
        self._matrices = [passes.matrices for passes in every if passes.matrices and passes.matrices.waits]
        plain = [matrices.plain() for matrices in self._matrices]
        assert None not in plain  # `require_no_branches` has refused them
        self._skipped = [skipped for skipped in plain if skipped is not None]
        self._active_matrices = [matrices.active for matrices in self._matrices]
        """The tensors that take part in the captured step."""
        self._may_skip = [False] * len(self._matrices)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """A block, the capture, in which steps skip the optional work."""
        for matrices, skipped in zip(self._matrices, self._skipped):
            matrices.skipped_values = skipped
        try:
            yield
        finally:
            for matrices in self._matrices:
                matrices.skipped_values = None
            self._active_matrices = [matrices.active for matrices in self._matrices]
            self._may_skip = [matrices.segment.control.may_skip for matrices in self._matrices]

    def suffices(self) -> bool:
        """Whether the next step needs no optional work; does not wait for the device."""
        parts = zip(self._matrices, self._skipped, self._active_matrices)
        return all(matrices.suffices(skipped, active) for matrices, skipped, active in parts)

    def replayed(self) -> None:
        """Account for a replay of the captured step."""
        for matrices, active, may_skip in zip(self._matrices, self._active_matrices, self._may_skip):
            if matrices.conditions is not None:
                matrices.conditions.launched(active, may_skip)
