"""Training iterations as lanes of work, with exposed optimizer time: `tilestep.profile` and `tilestep trace`.

torch's profiler provides the events; this package assigns them to lanes, by the names of kernels, operators and
ranges only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity

from ..compat import ITERATION
from .lanes import Events, Intervals, Iteration, exported, length, split
from .shown import OTHER_COLOUR, OURS_COLOUR, picture, table

if TYPE_CHECKING:
    from rich.table import Table


_COLORS = {
    "forward": "#7fa8c9",
    "backward": "#3d6d99",
    "communication": "#6a994e",
    "update": OURS_COLOUR,
    "copies": "#d9a441",
    "host": OTHER_COLOUR,
}
_FINEST = 1 / 3000  # fraction of the picture's width below which gaps are drawn over


def draw(report: Report, path: Path, title: str) -> None:
    """Draw the shown iteration of a report."""
    shown, rows = report.shown, report.rows()

    def bars(spans: Intervals) -> list[tuple[float, float]]:
        drawn: Intervals = []
        for start, stop in spans:
            if drawn and start - drawn[-1][1] < (shown.stop - shown.start) * _FINEST:
                drawn[-1] = (drawn[-1][0], stop)
            else:
                drawn.append((start, stop))
        return [((start - shown.start) / 1e3, (stop - start) / 1e3) for start, stop in drawn]

    with picture(path, 1, figsize=(11, 0.9 + 0.42 * len(rows))) as (_, (panel,)):
        for place, (name, spans) in enumerate(rows):
            panel.broken_barh(bars(spans), (place - 0.38, 0.76), color=_COLORS[name], linewidth=0)
        for start, width in bars(shown.lanes.exposed):
            panel.axvspan(start, start + width, color=OURS_COLOUR, alpha=0.15, linewidth=0)
        panel.set_yticks(range(len(rows)), [name for name, _ in rows])
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.set_xlim(0, shown.milliseconds)
        panel.set_xlabel("milliseconds; shaded: only the optimizer runs", fontsize=9)
        panel.tick_params(labelsize=9, left=False)
        panel.spines["left"].set_visible(False)
        panel.set_title(f"{title}\n{report.summary()}", fontsize=9, loc="left")


LANES = tuple(_COLORS)  # names of the shown lanes


@dataclass(frozen=True)
class Report:
    """The results of `tilestep.profile`."""

    iterations: Sequence[Iteration]  # the first often builds kernels
    on_gpu: bool  # whether the lanes are of a GPU
    files: tuple[Path, ...] = ()  # written files

    @property
    def shown(self) -> Iteration:
        """The iteration of the picture: of median length among all but the first."""
        candidates = sorted(self.iterations[1:] or self.iterations, key=attrgetter("milliseconds"))
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
        listed = [(name, getattr(lanes, name)) for name in LANES]
        return [(name, spans) for name, spans in listed if spans or name not in ("communication", "copies")]

    def summary(self) -> str:
        """A line with the exposed optimizer time."""
        share = self.exposed_milliseconds / self.milliseconds
        others = self.iterations[1:] or self.iterations
        median = statistics.median(iteration.exposed_milliseconds for iteration in others)
        return (
            f"exposed optimizer time {self.exposed_milliseconds:.3f} ms of {self.milliseconds:.3f} ms ({share:.1%}); "
            f"median of {len(others)} iterations {median:.3f} ms"
        )

    def table(self) -> Table:
        """The busy time of each lane in the shown iteration."""
        lanes, total = self.shown.lanes, self.shown.milliseconds
        rows = self.rows()
        if self.on_gpu:
            rows.append(("host, optimizer's calls", lanes.host_update))
        rows += [("optimizer, with its copies and communication", lanes.optimizer), ("  of it exposed", lanes.exposed)]
        busy = [(title, length(spans) / 1e3) for title, spans in rows]
        return table(
            "",
            ["lane", "busy ms", "of the iteration"],
            [(title, f"{ms:.3f}", f"{ms / total:.1%}") for title, ms in busy],
        )


def report_on(trace: Sequence[Mapping[str, Any]]) -> Report:
    """Read a trace's events."""
    events = Events(trace)
    iterations = split(events)
    if not iterations:
        raise ValueError("nothing ran inside the block: run at least one training iteration")
    return Report(iterations, on_gpu=bool(events.works))


_PROCESS = "tilestep lanes"


def lane_events(iterations: Iterable[Iteration]) -> list[dict[str, Any]]:
    """Events that show the lanes of all iterations in a trace viewer."""
    titles = [*LANES, "only the optimizer", "iteration"]
    events = [_named("process_name", 0, name=_PROCESS), _named("process_sort_index", 0, sort_index=-1)]
    events += [_named("thread_name", place, name=title) for place, title in enumerate(titles)]
    for number, iteration in enumerate(iterations):
        for place, name in enumerate(LANES):
            events += _spans(name, place, getattr(iteration.lanes, name))
        events += _spans(titles[-2], len(titles) - 2, iteration.lanes.exposed)
        (whole,) = _spans(f"iteration {number}", len(titles) - 1, [(iteration.start, iteration.stop)])
        exposed = round(iteration.exposed_milliseconds, 6)
        events.append({**whole, "args": {"exposed optimizer time, ms": exposed}})
    return events


def _named(kind: str, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": arguments}


def _spans(name: str, thread: int, spans: Intervals) -> list[dict[str, Any]]:
    return [
        {"ph": "X", "cat": "lane", "name": name, "pid": _PROCESS, "tid": thread, "ts": start, "dur": stop - start}
        for start, stop in spans
    ]


class Profile:
    """A traced context, made by `tilestep.profile`.

    Args:
        out: the folder for the files; None writes none.
        picture: whether to draw.
        title: the title of the picture.
    """

    def __init__(self, out: Path | None, picture: bool, title: str) -> None:
        self._out, self._picture, self._title = out, picture, title
        self._profiler: torch.profiler.profile | None = None
        self._report: Report | None = None

    @property
    def report(self) -> Report:
        """The measured times, after the context.

        Raises:
            RuntimeError: inside the block.

        Example:
            >>> import torch, tilestep
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = tilestep.SGD([weight], lr=0.1)
            >>> with tilestep.profile(out=None) as profile:
            ...     for _ in range(2):
            ...         weight.square().sum().backward()
            ...         optimizer.step()
            >>> profile.report.milliseconds >= profile.report.exposed_milliseconds
            True
        """
        if self._report is None:
            raise RuntimeError("the report exists only after the block has ended")
        return self._report

    def iteration(self) -> None:
        """Mark the end of an iteration; only needed if it calls no `optimizer.step()`, as in a replayed graph.

        Example:
            >>> import torch, tilestep
            >>> with tilestep.profile(out=None) as profile:
            ...     for _ in range(3):
            ...         total = torch.ones(1000).sum()
            ...         profile.iteration()
            >>> len(profile.report.iterations)
            3
        """
        with torch.profiler.record_function(ITERATION):
            pass

    def __enter__(self) -> Profile:
        if self._picture and self._out is not None and importlib.util.find_spec("matplotlib") is None:
            raise ImportError("picture=True requires matplotlib: pip install matplotlib, or pass picture=False")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library prints each start to stderr
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        self._report, self._profiler = None, torch.profiler.profile(activities=activities)
        self._profiler.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        if kind is None and torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler.__exit__(kind, error, traceback)
        if kind is None:
            self._report = _written(profiler, self._out, self._picture, self._title)
            if _collected is not None:
                _collected[1].append(self._report)


def profile(out: str | os.PathLike[str] | None = "trace", *, picture: bool = True, title: str = "") -> Profile:
    """Trace training iterations: when forward, backward, update, copies and communication ran.

    An iteration ends with `optimizer.step()`, of torch's optimizers too; several steps without a backward between them
    end one iteration. Where no step is called between iterations, as in a replayed graph of a whole iteration, call
    `iteration()` on what the block gives. A few iterations are enough, after one or two outside the block: a trace of
    many is long to write. The block waits for the GPU at its begin and end.

    Args:
        out: folder for `trace.json`, which trace viewers of browsers open, and `trace.png`; in a distributed job
            `trace-rank<rank>` instead. None writes nothing.
        picture: whether to draw `trace.png`; this needs matplotlib.
        title: of the picture.

    Returns:
        A context manager; its `report` has the figures when the block is over.

    Raises:
        ImportError: when the block begins, if matplotlib is needed and not there.
        ValueError: when the block is over, if nothing ran in it.

    Source: torch.profiler.

    Example:
        >>> import torch, tilestep
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = tilestep.AdamW(model.parameters())
        >>> with tilestep.profile(out=None) as traced:
        ...     for _ in range(3):
        ...         model(torch.randn(8, 64)).square().mean().backward()
        ...         optimizer.step()
        >>> len(traced.report.iterations)
        3
        >>> 0 < traced.report.exposed_milliseconds < traced.report.milliseconds
        True
    """
    if _collected is not None:
        return Profile(_collected[0], picture, title)
    return Profile(None if out is None else Path(out), picture, title)


_collected: tuple[Path, list[Report]] | None = None
"""The folder and the list of `collecting`."""


@contextmanager
def collecting(out: Path) -> Iterator[list[Report]]:
    """A context in which every `profile` writes to one folder; the list collects the reports."""
    global _collected
    reports: list[Report] = []
    before, _collected = _collected, (out, reports)
    try:
        yield reports
    finally:
        _collected = before


def _written(profiler: torch.profiler.profile, out: Path | None, picture: bool, title: str) -> Report:
    trace = exported(profiler)
    report = report_on(trace["traceEvents"])
    if out is None:
        return report
    out.mkdir(parents=True, exist_ok=True)
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    path = out / (f"trace-rank{torch.distributed.get_rank()}.json" if is_distributed else "trace.json")
    trace["traceEvents"] += lane_events(report.iterations)
    path.write_text(json.dumps(trace), encoding="utf-8")
    if not picture:
        return replace(report, files=(path,))
    drawn = path.with_suffix(".png")
    where = torch.cuda.get_device_name() if report.on_gpu else "CPU"
    draw(report, drawn, title or f"one training iteration on {where}, torch {torch.__version__}")
    return replace(report, files=(path, drawn))
