"""`profile`: a block of training that is traced, and what is written of it: a report, a Chrome trace with lanes."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from ..marks import ITERATION
from .intervals import Intervals
from .iterations import Iteration
from .report import LANES, Report, draw, report_on

_PROCESS = "tilestep lanes"


def lane_events(iterations: Iterable[Iteration]) -> list[dict[str, Any]]:
    """Events that show the lanes of all iterations in a trace viewer.

    Example:
        >>> from tilestep.tracing.lanes import Lanes
        >>> lanes = Lanes(update=[(1.0, 3.0)], optimizer=[(1.0, 3.0)])
        >>> [event["name"] for event in lane_events([Iteration(0.0, 4.0, lanes)]) if event["ph"] == "X"]
        ['update', 'only the optimizer', 'iteration 0']
    """
    titles = [*LANES.values(), "only the optimizer", "iteration"]
    events = [_named("process_name", 0, _PROCESS), {**_named("process_sort_index", 0, ""), "args": {"sort_index": -1}}]
    events += [_named("thread_name", place, title) for place, title in enumerate(titles)]
    for number, iteration in enumerate(iterations):
        for place, name in enumerate(LANES):
            events += _spans(LANES[name], place, getattr(iteration.lanes, name))
        events += _spans(titles[-2], len(titles) - 2, iteration.lanes.exposed)
        (whole,) = _spans(f"iteration {number}", len(titles) - 1, [(iteration.start, iteration.stop)])
        exposed = round(iteration.exposed_milliseconds, 6)
        events.append({**whole, "args": {"exposed optimizer time, ms": exposed}})
    return events


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _spans(name: str, thread: int, spans: Intervals) -> list[dict[str, Any]]:
    return [
        {"ph": "X", "cat": "lane", "name": name, "pid": _PROCESS, "tid": thread, "ts": start, "dur": stop - start}
        for start, stop in spans
    ]


class Profile:
    """A traced block; made by `profile`.

    Args:
        out: folder for the files; None writes none.
        picture: whether to draw.
        title: of the picture.
    """

    def __init__(self, out: Path | None, picture: bool, title: str) -> None:
        self._out, self._picture, self._title = out, picture, title
        self._profiler: torch.profiler.profile | None = None
        self._report: Report | None = None

    @property
    def report(self) -> Report:
        """What was seen.

        Raises:
            RuntimeError: inside the block.
        """
        if self._report is None:
            raise RuntimeError("the report is there when the block is over")
        return self._report

    def iteration(self) -> None:
        """Say that an iteration is over; only needed where `optimizer.step()` does not say so by itself."""
        with torch.profiler.record_function(ITERATION):
            pass

    def __enter__(self) -> Profile:
        if self._picture and self._out is not None and importlib.util.find_spec("matplotlib") is None:
            raise ImportError("the picture needs matplotlib: pip install matplotlib, or picture=False")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library announces each start on stderr
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
            for watcher in _watchers:
                watcher.append(self._report)


def profile(out: str | os.PathLike[str] | None = "trace", *, picture: bool = True, title: str = "") -> Profile:
    """Trace the iterations of a training: when forward, backward, update, copies and communication ran.

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
    return Profile(_redirected(out), picture, title)


_watchers: list[list[Report]] = []
_folder: Path | None = None


@contextmanager
def collecting(out: Path) -> Iterator[list[Report]]:
    """A block in which every `profile` writes to one folder, and the list has the reports."""
    global _folder
    reports: list[Report] = []
    before, _folder = _folder, out
    _watchers.append(reports)
    try:
        yield reports
    finally:
        _watchers.remove(reports)
        _folder = before


def _redirected(out: str | os.PathLike[str] | None) -> Path | None:
    if _folder is not None:
        return _folder
    return None if out is None else Path(out)


def _written(profiler: torch.profiler.profile, out: Path | None, picture: bool, title: str) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(exported))
        trace = json.loads(exported.read_text(encoding="utf-8", errors="replace"))
    report = report_on(trace["traceEvents"])
    if out is None:
        return report
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{_stem()}.json"
    trace["traceEvents"] += lane_events(report.iterations)
    path.write_text(json.dumps(trace), encoding="utf-8")
    if not picture:
        return replace(report, files=(path,))
    drawn = path.with_suffix(".png")
    draw(report, drawn, title or _described(report))
    return replace(report, files=(path, drawn))


def _stem() -> str:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return f"trace-rank{torch.distributed.get_rank()}"
    return "trace"


def _described(report: Report) -> str:
    where = torch.cuda.get_device_name() if report.on_gpu else "CPU"
    return f"one training iteration on {where}, torch {torch.__version__}"
