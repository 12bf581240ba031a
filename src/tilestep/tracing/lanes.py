"""Sorts the events of a trace into lanes and iterations."""

from __future__ import annotations

import json
import re
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..compat import HOST_UPDATE, ITERATION, REPLAY, UPDATE

Interval = tuple[float, float]
Intervals = list[Interval]


def union(*many: Iterable[Interval]) -> Intervals:
    """The union of intervals, sorted."""
    merged: Intervals = []
    for start, stop in sorted(interval for some in many for interval in some):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def minus(base: Intervals, taken: Intervals) -> Intervals:
    """The difference of two unions."""
    left: Intervals = []
    place = 0
    for start, stop in base:
        while place < len(taken) and taken[place][1] <= start:
            place += 1
        at = place
        while start < stop and at < len(taken) and taken[at][0] < stop:
            if taken[at][0] > start:
                left.append((start, taken[at][0]))
            start = max(start, taken[at][1])
            at += 1
        if start < stop:
            left.append((start, stop))
    return left


def overlap(left: Intervals, right: Intervals) -> Intervals:
    """The intersection of two unions.

    Example:
        >>> overlap([(0.0, 4.0), (6.0, 9.0)], [(3.0, 7.0)])
        [(3.0, 4.0), (6.0, 7.0)]
    """
    return minus(left, minus(left, right))


def length(intervals: Intervals) -> float:
    """The total length of a union."""
    return sum(stop - start for start, stop in intervals)


def covers(intervals: Intervals, moment: float) -> bool:
    """Whether a moment is in a union; intervals are closed."""
    place = bisect_right(intervals, (moment, float("inf"))) - 1
    return place >= 0 and moment <= intervals[place][1]


_UPDATE_KERNELS = re.compile(
    # Passes of a rule, the norm, limits and decisions, products of matrices, statistics and changes.
    r"\w+_pass_\d+(_\w+)?|\w+_finish_\d+|norm_tiles|norm_finish|scale_tiles|decide|combine_parts"
    r"|symmetric_tiles|sum_up_reports|count_changes|list_changes"
)
_UPDATE_OPERATORS = re.compile(r"aten::(_foreach_|_amp_|_fused_(adam|adamw|adagrad|sgd)_).*")  # outside of backward
_LIST_KERNEL = "multi_tensor_apply_kernel"  # torch's kernel for lists of tensors, outside of backward
_COMMUNICATION_KERNELS = re.compile(r".*(nccl|symm_mem|multimem).*", re.IGNORECASE)
_COMMUNICATION_OPERATORS = re.compile(r"(c10d|_c10d_functional|fsdp)::.*")
_COMMUNICATION_RANGES = re.compile(r"(gloo|nccl|mpi|ucc):\w+")  # collectives in a backend's own thread
_BACKWARD = "autograd::engine::evaluate_function"
_STEP = re.compile(rf"Optimizer\.step#.*|{REPLAY}")
"""Ranges that end an iteration, if the user does not mark ends."""
_UPDATE_RANGES = re.compile(rf"Optimizer\.(step|zero_grad)#.*|{UPDATE}|{HOST_UPDATE}|{REPLAY}")


def is_update_kernel(name: str) -> bool:
    """Whether a GPU kernel is tilestep's."""
    return _UPDATE_KERNELS.fullmatch(name) is not None


@dataclass(frozen=True)
class Call:
    """An operator or a named range on the host."""

    name: str
    start: float  # microseconds
    stop: float  # microseconds
    thread: Any  # of the host
    is_range: bool  # whether it is a named range, not an operator

    def is_named(self, names: re.Pattern[str], *, is_range: bool) -> bool:
        """Whether it is an operator, or a range, whose name matches."""
        return self.is_range is is_range and names.fullmatch(self.name) is not None

    @property
    def runs_backward(self) -> bool:
        """Whether it runs a node of the backward graph."""
        return not self.is_range and self.name.startswith(_BACKWARD)


@dataclass(frozen=True)
class Work:
    """A kernel or a copy on a device."""

    name: str
    start: float  # microseconds, on the host's clock
    stop: float  # microseconds
    is_copy: bool  # whether it copies or fills memory
    launched: tuple[Any, float] | None  # thread and moment of its launch; None if unknown


def exported(profiler: Any) -> dict[str, Any]:
    """The Chrome trace of one of torch's profilers, which has its events as `traceEvents`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))  # type: ignore[no-any-return]


_CALLS = ("cpu_op", "user_annotation")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_COPIES = ("gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Iteration:
    """One training iteration."""

    start: float  # microseconds
    stop: float  # microseconds
    lanes: Lanes

    @property
    def milliseconds(self) -> float:
        """Its duration."""
        return (self.stop - self.start) / 1e3

    @property
    def exposed_milliseconds(self) -> float:
        """The time in which only the optimizer ran."""
        return length(self.lanes.exposed) / 1e3


def split(events: Events) -> list[Iteration]:
    """Cut a trace into iterations, each with its lanes."""
    # On the host an iteration ends where the user marks it, otherwise after the last optimizer step between two
    # backward passes. On a GPU, which runs behind, it ends when the first computation starts that the host launched
    # afterwards: updates that overlap the next forward belong to the next iteration.
    if not events.calls and not events.works:
        return []
    lanes = events.lanes()
    start, stop = events.extent
    ends = _ends(events) or [stop]
    if events.works:
        ends = _on_device(events.computations(), ends, max(work.stop for work in events.works))
        start = events.works[0].start
    iterations = []
    for end in ends:
        if end > start:
            iterations.append(Iteration(start, end, lanes.between(start, end)))
        start = max(start, end)
    return iterations


def _ends(events: Events) -> list[float]:
    marks = [call.stop for call in events.calls if call.is_range and call.name == ITERATION]
    steps = [call for call in events.calls if call.is_named(_STEP, is_range=True) or call.runs_backward]
    # Graphs of whole iterations show no backward: then each step is an iteration.
    if marks or not any(call.runs_backward for call in steps):
        return sorted(marks or [call.stop for call in steps])
    ends: list[float] = []
    ran_backward = True
    for call in steps:
        if not call.runs_backward:
            ends.append(call.stop if ran_backward or not ends else max(ends.pop(), call.stop))
        ran_backward = call.runs_backward
    return ends


def _on_device(computations: Sequence[tuple[float, float]], ends: Sequence[float], last: float) -> list[float]:
    """Map moments on the host to moments on the device."""
    return [min((start for moment, start in computations if moment >= end), default=last) for end in ends]


@dataclass(frozen=True)
class Lanes:
    """The intervals of each kind of work, in microseconds; of the host on a machine without GPU traces."""

    forward: Intervals = field(default_factory=list)  # computing, outside backward and the optimizer
    backward: Intervals = field(default_factory=list)  # computing, launched by autograd
    communication: Intervals = field(default_factory=list)  # between ranks, of optimizer and model
    update: Intervals = field(default_factory=list)
    copies: Intervals = field(default_factory=list)  # copies and fills, on a GPU
    host: Intervals = field(default_factory=list)
    host_update: Intervals = field(default_factory=list)  # the optimizer's part of the host's time
    optimizer: Intervals = field(default_factory=list)  # the update, with its copies and communication

    def between(self, start: float, stop: float) -> Lanes:
        """The lanes between two moments."""
        return Lanes(**{lane.name: overlap(getattr(self, lane.name), [(start, stop)]) for lane in fields(self)})

    @property
    def exposed(self) -> Intervals:
        """When the optimizer, its copies or its communication ran, and neither forward nor backward did."""
        return minus(self.optimizer, union(self.forward, self.backward))


def _spans(calls: Iterable[Call | Work]) -> Intervals:
    return union((call.start, call.stop) for call in calls)


def _of_thread(calls: Sequence[Call]) -> Lanes:
    """Backward, communication and updates of a host thread; the rest is forward."""

    def named(names: re.Pattern[str], is_range: bool) -> Intervals:
        return _spans(call for call in calls if call.is_named(names, is_range=is_range))

    backward = _spans(call for call in calls if call.runs_backward)
    communication = named(_COMMUNICATION_OPERATORS, is_range=False)
    # Packing gradients for other ranks uses the same operators as optimizers.
    operators = minus(named(_UPDATE_OPERATORS, is_range=False), union(backward, communication))
    update = union(named(_UPDATE_RANGES, is_range=True), operators)
    return Lanes(backward=backward, communication=communication, update=update)


class Events:
    """The `traceEvents` of a Chrome trace that `torch.profiler` has exported, and their lanes.

    Lanes follow from the names of events, and from the work of the host at their launch.
    """

    def __init__(self, trace: Iterable[Mapping[str, Any]]) -> None:
        timed = [event for event in trace if event.get("ph") == "X"]
        launches = {
            event["args"]["correlation"]: (event.get("tid"), float(event["ts"]))
            for event in timed
            if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
        }
        self.calls: list[Call] = []
        self.works: list[Work] = []
        for event in sorted(timed, key=lambda event: float(event["ts"])):
            start = float(event["ts"])
            stop, category, name = start + float(event["dur"]), event.get("cat"), event["name"]
            if category in _CALLS:
                self.calls.append(Call(name, start, stop, event.get("tid"), category == "user_annotation"))
            elif category == "kernel" or category in _COPIES:
                launched = launches.get(event.get("args", {}).get("correlation"))
                self.works.append(Work(name, start, stop, category != "kernel", launched))
        self._threads: dict[Any, list[Call]] = {}
        for call in self.calls:
            self._threads.setdefault(call.thread, []).append(call)
        self._contexts = {thread: _of_thread(calls) for thread, calls in self._threads.items()}

    @property
    def extent(self) -> Interval:
        """The first and the last moment."""
        every: list[Call | Work] = [*self.calls, *self.works]
        return min((event.start for event in every), default=0.0), max((event.stop for event in every), default=0.0)

    def lanes(self) -> Lanes:
        """The lanes of the whole trace."""
        return self._device_lanes() if self.works else self._host_lanes()

    def computations(self) -> list[tuple[float, float]]:
        """Launch and start of each kernel of forward and backward, in order of launches."""
        return sorted(
            (work.launched[1], work.start)
            for work in self.works
            if work.launched is not None and self._lanes_of(work)[0] in ("forward", "backward")
        )

    def _device_lanes(self) -> Lanes:
        by_lane: dict[str, list[Call | Work]] = {lane.name: [] for lane in fields(Lanes)}
        for work in self.works:
            for lane in self._lanes_of(work):
                by_lane[lane].append(work)
        by_lane["host"] += self.calls
        for lane in ("update", "optimizer"):
            by_lane[lane] += [call for call in self.calls if call.is_range and call.name == HOST_UPDATE]
        lanes = {name: _spans(events) for name, events in by_lane.items()}
        return Lanes(**lanes | {"host_update": union(*(context.update for context in self._contexts.values()))})

    def _lanes_of(self, work: Work) -> list[str]:
        """The lanes of a kernel or copy, by its name, and by the work of the host at its launch."""
        thread, moment = work.launched or (None, 0.0)
        context = self._contexts.get(thread, Lanes())
        by_optimizer = covers(context.update, moment)
        if work.is_copy:
            lane = "copies"
        elif _COMMUNICATION_KERNELS.fullmatch(work.name):
            lane = "communication"
        elif by_optimizer or is_update_kernel(work.name):
            return ["update", "optimizer"]
        elif covers(context.communication, moment):
            lane = "communication"
        elif covers(context.backward, moment):
            return ["backward"]
        else:
            return ["update", "optimizer"] if _LIST_KERNEL in work.name else ["forward"]
        return [lane, "optimizer"] if by_optimizer else [lane]

    def _host_lanes(self) -> Lanes:
        every = list(self._contexts.values())
        senders = sorted(
            (start, covers(context.update, start)) for context in every for start, _ in context.communication
        )
        communication = union(*(context.communication for context in every))
        optimizer = union(*(overlap(context.communication, context.update) for context in every))
        working: dict[Any, Intervals] = {}
        for thread, calls in self._threads.items():
            sent = [call for call in calls if call.is_named(_COMMUNICATION_RANGES, is_range=True)]
            inside = _spans(sent)
            communication = union(communication, inside)
            # Only their order links a collective to the step that requested it.
            places = [bisect_right(senders, (call.start, True)) - 1 for call in sent]
            asked = [call for call, place in zip(sent, places) if place >= 0 and senders[place][1]]
            optimizer = union(optimizer, _spans(asked))
            # Work of a backend's thread inside a collective belongs to the collective.
            working[thread] = minus(_spans(call for call in calls if not call.is_range), inside)
        update = union(*(minus(context.update, context.communication) for context in every))
        forward, backward = [], []
        for thread, context in self._contexts.items():
            own = union(context.update, context.communication)
            backward.append(minus(context.backward, own))
            forward.append(minus(minus(working[thread], context.backward), own))
        everything = union(*forward, *backward, update, communication)
        return Lanes(
            forward=union(*forward),
            backward=union(*backward),
            communication=communication,
            update=update,
            host=minus([self.extent], everything),
            optimizer=union(update, optimizer),
        )
