"""The figures of a traced training: of one iteration lane by lane, and of all of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .events import read_events
from .intervals import Intervals, length
from .iterations import Iteration, split

if TYPE_CHECKING:
    from rich.table import Table

LANES = {
    "forward": "forward",
    "backward": "backward",
    "communication": "communication",
    "update": "update",
    "copies": "copies",
    "host": "host",
}
"""The lanes, as fields of `Lanes`, and what they are called."""


@dataclass(frozen=True)
class Report:
    """What `tilestep.profile` has seen."""

    iterations: Sequence[Iteration]  # all of them, the first of which often builds kernels
    on_gpu: bool  # whether the lanes are a GPU's
    files: tuple[Path, ...] = ()  # what was written

    @property
    def shown(self) -> Iteration:
        """The iteration that the picture shows: of median length among all but the first."""
        candidates = sorted(self.iterations[1:] or self.iterations, key=lambda each: each.milliseconds)
        return candidates[(len(candidates) - 1) // 2]

    @property
    def exposed_milliseconds(self) -> float:
        """Milliseconds of the shown iteration in which only the optimizer ran."""
        return self.shown.exposed_milliseconds

    @property
    def milliseconds(self) -> float:
        """Milliseconds of the shown iteration."""
        return self.shown.milliseconds

    def rows(self) -> list[tuple[str, Intervals]]:
        """Name and intervals of each lane of the shown iteration; communication and copies only if there are any."""
        lanes = self.shown.lanes
        listed = [(title, getattr(lanes, name)) for name, title in LANES.items()]
        return [(title, spans) for title, spans in listed if spans or title not in ("communication", "copies")]

    def summary(self) -> str:
        """One line with the exposed optimizer time."""
        share = self.exposed_milliseconds / self.milliseconds
        others = self.iterations[1:] or self.iterations
        median = statistics.median(each.exposed_milliseconds for each in others)
        return (
            f"exposed optimizer time {self.exposed_milliseconds:.3f} ms of {self.milliseconds:.3f} ms ({share:.1%}); "
            f"median of {len(others)} iterations {median:.3f} ms"
        )

    def table(self) -> Table:
        """How long each lane was busy in the shown iteration."""
        from rich.table import Table

        lanes, total = self.shown.lanes, self.shown.milliseconds
        table = Table()
        table.add_column("lane")
        for title in ("busy ms", "of the iteration"):
            table.add_column(title, justify="right")
        rows = self.rows()
        if self.on_gpu:
            rows.append(("host, optimizer's calls", lanes.host_update))
        rows += [("optimizer, with its copies and communication", lanes.optimizer), ("  of it exposed", lanes.exposed)]
        for title, spans in rows:
            busy = length(spans) / 1e3
            table.add_row(title, f"{busy:.3f}", f"{busy / total:.1%}")
        return table


def report_on(trace: Sequence[Mapping[str, Any]]) -> Report:
    """Read a trace's events."""
    events = read_events(trace)
    iterations = split(events)
    if not iterations:
        raise ValueError("nothing ran while the profiler was on: train an iteration or more inside the block")
    return Report(iterations, on_gpu=bool(events.works))
