"""The measuring core: contenders take turns in one process, figures are medians; the profiler counts launches."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ..devices import has_streams, is_host


@dataclass(frozen=True)
class Trace:
    """What one call did."""

    kernels: int  # kernels run on the GPU
    copies: int  # copies and fills run on the GPU, or between host and GPU
    calls: int  # torch operators that Python called (those that they call in turn do not count)
    peak_bytes: int  # device memory above what was allocated before, at the highest point

    @property
    def launches(self) -> int:
        """Everything the GPU was asked to run."""
        return self.kernels + self.copies


class NotRecorded(RuntimeError):
    """The profiler has not seen what it was there to see."""


def trace(call: Callable[[], object], device: torch.device) -> Trace:
    """Profile one call.

    >>> seen = trace(lambda: torch.ones(1000).add(1.0), torch.device("cpu"))
    >>> seen.kernels, seen.calls, seen.peak_bytes
    (0, 2, 8012)
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library announces each start on stderr
    activities = [ProfilerActivity.CPU]
    gpu = has_streams(device)
    if gpu:
        activities.append(ProfilerActivity.CUDA)
        witness = torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with profile(activities=activities, profile_memory=not gpu) as profiler:
        if gpu:
            witness.add_(1.0)
        call()
        if gpu:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(exported))
        events = json.loads(exported.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    categories = [event.get("cat") for event in events]
    kernels = categories.count("kernel")
    if gpu and not kernels:
        raise NotRecorded("the profiler has recorded nothing of the GPU: another one may be at work on it")
    return Trace(
        kernels=kernels - gpu,
        copies=categories.count("gpu_memcpy") + categories.count("gpu_memset"),
        calls=_outermost(event for event in events if event.get("cat") == "cpu_op") - gpu,
        peak_bytes=torch.cuda.max_memory_allocated(device) - before if gpu else _peak(events),
    )


def _outermost(operators: Iterable[dict[str, Any]]) -> int:
    """Count the intervals that lie in no other interval of their thread."""
    count = 0
    ends: dict[Any, float] = {}
    for operator in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        if operator["ts"] >= ends.get(operator["tid"], float("-inf")):
            count += 1
            ends[operator["tid"]] = operator["ts"] + operator["dur"]
    return count


def _peak(events: Iterable[dict[str, Any]]) -> int:
    """Return the highest running sum of the allocations on the CPU, in bytes."""
    allocations = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    held = peak = 0
    for allocation in sorted(allocations, key=lambda event: event["ts"]):
        held += allocation["args"]["Bytes"]
        peak = max(peak, held)
    return peak


# Threads of an OpenMP runtime spin for a few milliseconds after their work and would slow down whoever comes next.
SETTLE_SECONDS = 0.01
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    Args:
        repeat: calls made back to back for one figure, the host free to run ahead as in a training loop; figures are
            for one call.
    """

    name: str  # what the tables call it
    call: Callable[[], object]  # does the work once; on a GPU it may return before the work is done
    bytes_moved: int = 0  # the least memory traffic the work needs, in bytes; 0 if unknown
    prepare: Callable[[], object] | None = None  # run before every call, outside all figures
    repeat: int = 1


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float
    count: int


@dataclass
class Timing:
    """What one contender took. Times in milliseconds, memory in bytes; None where the device has no such figure.

    `host` is the time until the call returns, `wall` until the work is done, `device` what the GPU was busy for
    when the host is ahead of it. `failure` says why there are no figures.
    """

    contender: str
    bytes_moved: int = 0
    host: Spread | None = None
    wall: Spread | None = None
    device: Spread | None = None
    trace: Trace | None = None
    failure: str | None = None

    @property
    def busy(self) -> Spread | None:
        """The time to set against a bandwidth: device time on a GPU, wall time on a CPU."""
        return self.device or self.wall

    @property
    def bandwidth(self) -> float | None:
        """Bytes moved a second, or None if the traffic is unknown."""
        if self.busy is None or not self.bytes_moved or self.busy.median == 0:
            return None
        return self.bytes_moved / (self.busy.median * 1e-3)


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles.

    >>> spread([4.0, 1.0, 2.0, 3.0, 100.0])
    Spread(median=3.0, low=2.0, high=4.0, count=5)
    """
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


def synchronize(device: torch.device) -> None:
    """Wait for the device; on a CPU nothing is outstanding."""
    if has_streams(device):
        torch.cuda.synchronize(device)


def measure(
    contenders: Sequence[Contender],
    device: torch.device,
    rounds: int = 15,
    warmup: int = 3,
    traced: bool = True,
    busy: bool = True,
    until: float | None = None,
) -> list[Timing]:
    """Measure contenders in interleaved rounds, each round in another order.

    A contender that raises is reported with its reason and left out of the later rounds.

    >>> cpu = torch.device("cpu")
    >>> numbers = torch.ones(1000)
    >>> sum_, broken = measure([Contender("sum", numbers.sum), Contender("no", lambda: 1 / 0)], cpu, rounds=3)
    >>> sum_.wall.count, broken.failure
    (3, 'ZeroDivisionError: division by zero')
    """
    runs = [_Run(contender, Timing(contender.name, contender.bytes_moved)) for contender in contenders]
    for run in runs:
        for _ in range(warmup):
            run.guarded(_wall, device, False)
    delay = _Delay(device) if has_streams(device) and busy else None
    for turn in range(rounds):
        if until is not None and turn >= LEAST_ROUNDS and time.monotonic() > until:
            break
        shift = turn % max(len(runs), 1)
        for run in runs[shift:] + runs[:shift]:
            run.guarded(_wall, device, True)
            if delay is not None:
                run.guarded(_device, delay)
    for run in runs:
        if traced:
            run.guarded(_traced, device)
        run.finish()
    return [run.timing for run in runs]


@dataclass
class _Run:
    contender: Contender
    timing: Timing
    host: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)

    def guarded(self, action: Callable[..., None], *arguments: object) -> None:
        """Prepare and act, unless the contender has failed; note it if it fails now."""
        if self.timing.failure is not None:
            return
        try:
            if self.contender.prepare is not None:
                self.contender.prepare()
            action(self, *arguments)
        except Exception as failure:  # any peer may fail in any way; the others' figures still count
            self.timing.failure = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"

    def finish(self) -> None:
        if self.timing.failure is None and self.wall:
            self.timing.host = spread(self.host)
            self.timing.wall = spread(self.wall)
            self.timing.device = spread(self.device) if self.device else None


def _wall(run: _Run, device: torch.device, keep: bool) -> None:
    synchronize(device)
    if is_host(device) and keep:
        time.sleep(SETTLE_SECONDS)
    repeat = run.contender.repeat
    begin = time.perf_counter()
    for _ in range(repeat):
        run.contender.call()
    returned = time.perf_counter()
    synchronize(device)
    done = time.perf_counter()
    if keep:
        run.host.append((returned - begin) * 1e3 / repeat)
        run.wall.append((done - begin) * 1e3 / repeat)


def _device(run: _Run, delay: _Delay) -> None:
    """Keep the GPU busy until the host has enqueued everything: the time between the events is then the GPU's own."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    delay.enqueue(run.host[-1])
    begin.record()
    run.contender.call()
    end.record()
    end.synchronize()
    run.device.append(begin.elapsed_time(end))


def _traced(run: _Run, device: torch.device) -> None:
    # Without it the driver goes on telling the profiler of every call: launches measured later take twice the time.
    # With it a profile that follows another may see nothing; then there are times, but no counts.
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
    for pause in (0.0, 0.2, 1.0):
        time.sleep(pause)
        with contextlib.suppress(NotRecorded):
            run.timing.trace = trace(run.contender.call, device)
            return


class _Delay:
    """Work that keeps the GPU busy for a given time, and leaves its cache full of what nobody asked for."""

    def __init__(self, device: torch.device) -> None:
        self.source = torch.ones(128 << 20, dtype=torch.uint8, device=device)
        self.target = torch.empty_like(self.source)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(3):
            self.target.copy_(self.source)
        begin.record()
        for _ in range(10):
            self.target.copy_(self.source)
        end.record()
        end.synchronize()
        self.copy_milliseconds = begin.elapsed_time(end) / 10

    def enqueue(self, milliseconds: float) -> None:
        for _ in range(math.ceil(1.5 * milliseconds / self.copy_milliseconds) + 4):
            self.target.copy_(self.source)
