"""Events of a profiler's trace, out of the file that it exports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """An operator or a named range on the host."""

    name: str
    start: float  # microseconds
    stop: float  # microseconds
    thread: Any  # of the host
    is_range: bool  # whether it is a named range, not an operator


@dataclass(frozen=True)
class Work:
    """A kernel or a copy on a device."""

    name: str
    start: float  # microseconds, on the host's clock
    stop: float  # microseconds
    is_copy: bool  # whether it copies or fills memory rather than being a kernel
    launched: tuple[Any, float] | None  # thread and moment of the call that launched it; None if the trace has it not


@dataclass(frozen=True)
class Events:
    """What a trace has of host and devices, each in order of time."""

    calls: list[Call]
    works: list[Work]

    @property
    def start(self) -> float:
        """The first moment."""
        return min([call.start for call in self.calls[:1]] + [work.start for work in self.works[:1]], default=0.0)

    @property
    def stop(self) -> float:
        """The last moment."""
        return max([call.stop for call in self.calls] + [work.stop for work in self.works], default=0.0)


_CALLS = ("cpu_op", "user_annotation")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_COPIES = ("gpu_memcpy", "gpu_memset")


def read_events(trace: Iterable[Mapping[str, Any]]) -> Events:
    """Take what counts out of the `traceEvents` of a Chrome trace that `torch.profiler` has exported.

    Example:
        >>> read_events([{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 2.0, "tid": 7}]).calls
        [Call(name='aten::mm', start=1.0, stop=3.0, thread=7, is_range=False)]
    """
    timed = [event for event in trace if event.get("ph") == "X"]
    launches = {
        event["args"]["correlation"]: (event.get("tid"), float(event["ts"]))
        for event in timed
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    calls, works = [], []
    for event in timed:
        start = float(event["ts"])
        stop, category, name = start + float(event["dur"]), event.get("cat"), event["name"]
        if category in _CALLS:
            calls.append(Call(name, start, stop, event.get("tid"), category == "user_annotation"))
        elif category == "kernel" or category in _COPIES:
            launched = launches.get(event.get("args", {}).get("correlation"))
            works.append(Work(name, start, stop, category != "kernel", launched))
    return Events(sorted(calls, key=lambda each: each.start), sorted(works, key=lambda each: each.start))
