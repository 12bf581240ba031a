"""Where one training iteration ends and the next begins, on the host and on the device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from .events import Events, is_end_of_iteration, is_iteration_mark, runs_backward
from .intervals import length
from .lanes import Lanes, Sorting


@dataclass(frozen=True)
class Iteration:
    """One training iteration."""

    start: float  # microseconds
    stop: float  # microseconds
    lanes: Lanes  # what ran in it

    @property
    def milliseconds(self) -> float:
        """How long it took."""
        return (self.stop - self.start) / 1e3

    @property
    def exposed_milliseconds(self) -> float:
        """How long only the optimizer ran."""
        return length(self.lanes.exposed) / 1e3


def split(events: Events) -> list[Iteration]:
    """Cut a trace into iterations, each with its lanes.

    On the host an iteration is over when the user says so, else after the last of the optimizers' steps between two
    backward passes. On a GPU, which runs behind, it is over when the first computation starts that the host launched
    afterwards: so a schedule that runs updates beside the next forward has them in that iteration.
    """
    if not events.calls and not events.works:
        return []
    sorting = Sorting(events)
    lanes = sorting.lanes()
    ends = _ends(events) or [events.stop]
    if events.works:
        ends = _on_device(sorting.computations(), ends, max(work.stop for work in events.works))
    start = events.works[0].start if events.works else events.start
    iterations = []
    for end in ends:
        if end > start:
            iterations.append(Iteration(start, end, lanes.between(start, end)))
        start = max(start, end)
    return iterations


def _ends(events: Events) -> list[float]:
    marks = [call.stop for call in events.calls if call.is_range and is_iteration_mark(call.name)]
    if marks:
        return sorted(marks)
    ends: list[float] = []
    ran_backward = True
    for call in events.calls:
        if call.is_range and is_end_of_iteration(call.name):
            if ran_backward or not ends:
                ends.append(call.stop)
            else:
                ends[-1] = max(ends[-1], call.stop)
            ran_backward = False
        elif runs_backward(call.name):
            ran_backward = True
    if any(runs_backward(call.name) for call in events.calls):
        return ends
    # Graphs that hold whole iterations show no backward: then each step is one.
    return sorted(call.stop for call in events.calls if call.is_range and is_end_of_iteration(call.name))


def _on_device(computations: Sequence[tuple[float, float]], ends: Sequence[float], last: float) -> list[float]:
    """The moments on the device that belong to moments on the host."""
    moments = [moment for moment, _ in computations]
    found = []
    for end in ends:
        following = computations[bisect_left(moments, end) :]
        found.append(min((start for _, start in following), default=last))
    return found
