"""The Chrome trace: the profiler's own, with the lanes as one more process on top."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .intervals import Intervals
from .iterations import Iteration
from .report import LANES

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
