"""What a step inside a CUDA graph needs that other steps do not: nothing may be built, moved or uploaded by the way.

A graph replays the launches it has seen, with the addresses they had. So it reads the gradients' addresses from a table
of its own, which no later step overwrites; all other tables are shared with steps outside the graph and never change
again: what would change them makes the engine stale, and a new one is built. Only hyperparameters change in place.
"""

from __future__ import annotations

import numpy as np
import torch

from ..errors import CaptureError

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
