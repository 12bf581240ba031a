"""A traced training for people: figures of one iteration lane by lane, of all of them, and a picture."""

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


_COLORS = {
    "forward": "#7fa8c9",
    "backward": "#3d6d99",
    "communication": "#6a994e",
    "update": "#c8553d",
    "copies": "#d9a441",
    "host": "#8a9ba8",
}
_FINEST = 1 / 3000
"""Gaps smaller than this part of the picture's width are drawn over: nobody could see them."""


def draw(report: Report, path: Path, title: str) -> None:
    """Draw the report's shown iteration."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown, rows = report.shown, report.rows()
    figure, panel = pyplot.subplots(figsize=(11, 0.9 + 0.42 * len(rows)), layout="constrained")

    def bars(spans: Intervals) -> list[tuple[float, float]]:
        return [
            ((start - shown.start) / 1e3, (stop - start) / 1e3)
            for start, stop in _visible(spans, shown.stop - shown.start)
        ]

    for place, (name, spans) in enumerate(rows):
        panel.broken_barh(bars(spans), (place - 0.38, 0.76), color=_COLORS[name], linewidth=0)
    for start, width in bars(shown.lanes.exposed):
        panel.axvspan(start, start + width, color=_COLORS["update"], alpha=0.15, linewidth=0)
    panel.set_yticks(range(len(rows)), [name for name, _ in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xlim(0, shown.milliseconds)
    panel.set_xlabel("milliseconds; shaded: only the optimizer runs", fontsize=9)
    panel.tick_params(labelsize=9, left=False)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.set_title(f"{title}\n{report.summary()}", fontsize=9, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _visible(spans: Intervals, width: float) -> Intervals:
    drawn: Intervals = []
    for start, stop in spans:
        if drawn and start - drawn[-1][1] < width * _FINEST:
            drawn[-1] = (drawn[-1][0], stop)
        else:
            drawn.append((start, stop))
    return drawn


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
