"""Which schedule is the fastest for a training: tried in its first steps, and then kept."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch

from ..devices import has_streams

TRIED = ("serial", "forward")
"""Schedules that take gradients at `step()`, and so mean the same to whoever trains."""

WARM_UP = 3
"""Steps before the first that counts: they build kernels and grow memory."""

BLOCK = 4
"""Steps of one schedule before the other's turn; the first belongs to both."""

ROUNDS = 3
"""Blocks of each schedule."""

WORTH = 0.995
"""What part of the serial iteration's time another must take at most: less than that is noise."""


@dataclass(frozen=True)
class OverlapReport:
    """When updates run, and why.

    Args:
        milliseconds: of an iteration by schedule, medians of the slowest rank; empty where nothing was measured.
    """

    during: str  # "serial", "backward" or "forward"
    reason: str  # why
    milliseconds: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        times = ", ".join(f"{name} {value:.3g} ms" for name, value in self.milliseconds.items())
        return f"updates run: {self.during} ({self.reason}{': ' + times if times else ''})"


class Clock(Protocol):
    """Tells when a device has come to a point of its work."""

    def mark(self) -> Any:
        """The point after all that was asked for so far."""

    def between(self, earlier: Any, later: Any) -> float:
        """Milliseconds between two points; may wait for the later one."""


class DeviceClock:
    """The current stream's time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """An event that is recorded now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        """Milliseconds between two events."""
        later.synchronize()
        return earlier.elapsed_time(later)


def device_clock(device: torch.device) -> Clock | None:
    """A device's clock; None for a CPU, beside whose host nothing runs."""
    return DeviceClock(device) if has_streams(device) else None


class Trial:
    """Runs steps in one schedule and in the other, by turns, and chooses at a step that is the same on all ranks.

    Numbers do not depend on the schedule, so trying costs none. The host waits for the device once, when it chooses.

    Example:
        >>> class Steps:
        ...     "Forward takes 9 ms, serial 10."
        ...     now = 0.0
        ...     def mark(self):
        ...         Steps.now += {"serial": 10.0, "forward": 9.0}[trial.during]
        ...         return Steps.now
        ...     def between(self, earlier, later):
        ...         return later - earlier
        >>> trial = Trial(Steps(), lambda times: None)
        >>> while trial.report is None:
        ...     trial.note_step()
        >>> print(trial.report)
        updates run: forward (as measured in this training: serial 10 ms, forward 9 ms)
    """

    def __init__(self, clock: Clock, slowest: Callable[[torch.Tensor], None]) -> None:
        self._clock, self._slowest = clock, slowest
        self._marks: list[Any] = []
        self._blocks: list[tuple[str, list[Any]]] = []
        self._steps = 0
        self.during = TRIED[0]
        """The schedule of the coming step."""
        self.report: OverlapReport | None = None
        """What was chosen, once it is."""

    def note_step(self) -> None:
        """After a step."""
        self._steps += 1
        counted = self._steps - WARM_UP
        if counted <= 0:
            return
        self._marks.append(self._clock.mark())
        if counted % BLOCK:
            return
        self._blocks.append((self.during, self._marks))
        self._marks = []
        if len(self._blocks) == ROUNDS * len(TRIED):
            self._choose()
        else:
            self.during = TRIED[len(self._blocks) % len(TRIED)]

    def _choose(self) -> None:
        found: dict[str, list[float]] = {name: [] for name in TRIED}
        for name, marks in self._blocks:
            found[name].extend(self._clock.between(*pair) for pair in pairwise(marks))
        medians = torch.tensor(
            [statistics.median(times) for times in found.values()], dtype=torch.float64, device="cpu"
        )
        self._slowest(medians)
        known = dict(zip(found, medians.tolist()))
        best = min(known, key=known.__getitem__)
        self.during = best if known[best] < WORTH * known[TRIED[0]] else TRIED[0]
        self.report = OverlapReport(self.during, "as measured in this training", known)
        self._blocks = []
