"""Which work of a matrix pass a step does not need: the host decides, by hyperparameters and bounds of step counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import RuleError
from ..graph import MatrixPass, Value, evaluate
from ..graph.partition import Condition
from ..graph.tracer import group_value
from .operations import MATRIX_OPERATIONS


class StepBounds:
    """Least and greatest value that each step count may have."""

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
        """A step was launched."""
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


_LOOKED_AHEAD = 1000  # steps among which one is looked for that needs nothing of what the host waits for


class GroupNumbers(Mapping[str, float]):
    """A group's hyperparameters as numbers, by `key` or `key.index`."""

    def __init__(self, group: Mapping[str, Any], step: float | None = None) -> None:
        self.group, self.step = group, step

    def __getitem__(self, name: str) -> float:
        if name == "step" and self.step is not None:
            return self.step
        value = group_value(self.group, name)
        if value is None:
            raise KeyError(name)
        if isinstance(value, torch.Tensor) and value.is_cuda:
            raise RuleError(f"{name} is a tensor on a GPU; matrix operations need it on the host, before the step")
        return float(value)

    def __iter__(self) -> Iterator[str]:
        return iter(self.group)

    def __len__(self) -> int:
        return len(self.group)


class Conditions:
    """What the host knows of the step counts, and so of what their next step needs."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self.groups = groups
        self._bounds: StepBounds | None = None
        self._low = self._high = np.zeros(0, dtype=np.int64)
        self._active = np.zeros(0, dtype=bool)
        self._skipped: dict[tuple[int, tuple[int, ...], frozenset[int]], frozenset[int]] = {}

    def look(self, steps: torch.Tensor, active: np.ndarray) -> None:
        """Take in what is known of the step counts now."""
        if self._bounds is None or self._bounds.steps is not steps:
            self._bounds = StepBounds(steps)
        self._low, self._high = self._bounds.read()
        self._active = active
        self._skipped.clear()  # hyperparameters may have changed

    def launched(self, active: np.ndarray, may_skip: bool) -> None:
        """A step was launched; arguments as for `StepBounds.launched`."""
        assert self._bounds is not None
        self._bounds.launched(active, may_skip)

    def skipped_values(self, matrix_pass: MatrixPass, members: Sequence[int], groups: Sequence[int]) -> frozenset[int]:
        """The values of a pass that these tensors surely do not need in this step, by identity."""
        taking_part = [member for member in members if self._active[member]]
        counts = {(int(self._low[member]), int(self._high[member])) for member in taking_part}
        following = {step + 1 for low, high in counts for step in range(low, high + 1)}
        return self._skipped_in(matrix_pass, groups, frozenset(following))

    def later(self, passes: Sequence[MatrixPass], groups: Sequence[int]) -> list[frozenset[int]] | None:
        """What a later step, that needs nothing of what the host waits for, can be spared."""
        waiting = [{id(value) for value in matrix_pass.values if _waits(value)} for matrix_pass in passes]
        highest = int(self._high.max(initial=0))
        for step in range(highest + 1, highest + 1 + _LOOKED_AHEAD):
            skipped_values = [self._skipped_in(matrix_pass, groups, frozenset((step,))) for matrix_pass in passes]
            if all(needed <= skipped for needed, skipped in zip(waiting, skipped_values)):
                return skipped_values
        return None

    def _skipped_in(self, matrix_pass: MatrixPass, groups: Sequence[int], following: frozenset[int]) -> frozenset[int]:
        key = id(matrix_pass), tuple(groups), following
        if key not in self._skipped:
            numbers = [GroupNumbers(self.groups[group], float(step)) for group in groups for step in sorted(following)]
            decided: dict[tuple[int, bool], bool] = {}
            self._skipped[key] = frozenset(
                identity
                for identity, alternatives in matrix_pass.needed.items()
                if not any(_possible(condition, numbers, decided) for condition in alternatives)
            )
        return self._skipped[key]


def _waits(value: Value) -> bool:
    operation = MATRIX_OPERATIONS.get(value.operation)
    return operation is not None and operation.waits


def _possible(
    condition: Condition, numbers: Sequence[Mapping[str, float]], decided: dict[tuple[int, bool], bool]
) -> bool:
    value, outcome = condition
    key = id(value), outcome
    if key not in decided:
        try:
            decided[key] = any(bool(evaluate(value, group)) == outcome for group in numbers)
        except (KeyError, RuleError):
            decided[key] = True  # it depends on something that only the device knows
    return decided[key]
