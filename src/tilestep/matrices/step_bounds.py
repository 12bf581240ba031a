"""What the host knows of step counts that live on a device, without waiting for it."""

from __future__ import annotations

import numpy as np
import torch


class StepBounds:
    """Least and greatest value that each step count may have.

    Counts on the CPU are read. Of counts on a GPU the host knows how many steps it has launched; where a step may have
    been skipped there, it learns the truth from a copy that arrives some steps later.
    """

    def __init__(self, steps: torch.Tensor) -> None:
        self.steps = steps
        self._version = -1
        self._low = self._high = self._since = np.zeros(len(steps), dtype=np.int64)
        self._copy: torch.Tensor | None = None
        self._arrival: torch.cuda.Event | None = None

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Bounds of the counts as they are now, int64[tensors] each."""
        if not self.steps.is_cuda:
            now = self.steps.numpy().astype(np.int64)
            return now, now
        if self._version != self.steps._version:
            self._version = self.steps._version
            self._low = self._high = self.steps.cpu().numpy().astype(np.int64)
            self._arrival = None
        elif self._arrival is not None and self._arrival.query():
            assert self._copy is not None
            copied = self._copy.numpy().astype(np.int64)
            self._low = np.maximum(self._low, copied)
            self._high = np.minimum(self._high, copied + self._since)
            self._arrival = None
        return self._low, self._high

    def launched(self, active: np.ndarray, may_skip: bool) -> None:
        """A step was launched.

        Args:
            active: bool[tensors], which took part.
        """
        if not self.steps.is_cuda:
            return
        self._high = self._high + active
        self._since = self._since + active
        if not may_skip:
            self._low = self._low + active
        elif self._arrival is None:
            if self._copy is None:
                self._copy = torch.empty(self.steps.shape, dtype=self.steps.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(self.steps, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()
            # The step that is being launched has not counted itself yet.
            self._since = active.astype(np.int64)
