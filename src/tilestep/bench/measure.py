"""Measurements: contenders take turns in one process, figures are medians; and the bandwidth of memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ..backends.cpp.compile import load_library
from ..devices import has_streams, is_host
from ..errors import BuildError
from ..tracing.lanes import exported


@dataclass(frozen=True)
class Trace:
    """The work of a call."""

    kernels: int  # kernels on the GPU
    copies: int  # copies and fills on the GPU, or between host and GPU
    calls: int  # torch operators called from Python, without nested operators
    peak_bytes: int  # peak of device memory, above the memory allocated before

    @property
    def launches(self) -> int:
        """Kernels, copies and fills."""
        return self.kernels + self.copies


class NotRecorded(RuntimeError):
    """The profiler has recorded no work of the GPU."""


def trace(call: Callable[[], object], device: torch.device) -> Trace:
    """Profile one call."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library prints each start to stderr
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
    events = exported(profiler)["traceEvents"]
    categories = Counter(event.get("cat") for event in events)
    if gpu and not categories["kernel"]:
        raise NotRecorded("the profiler recorded no GPU events: another profiler may be using the GPU")
    return Trace(
        kernels=categories["kernel"] - gpu,
        copies=categories["gpu_memcpy"] + categories["gpu_memset"],
        calls=_outermost(event for event in events if event.get("cat") == "cpu_op") - gpu,
        peak_bytes=torch.cuda.max_memory_allocated(device) - before if gpu else _peak(events),
    )


def _outermost(operators: Iterable[dict[str, Any]]) -> int:
    """Count the intervals that lie in no other interval of their thread."""
    count = 0
    ends: dict[Any, float] = {}
    for operator in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        if operator["ts"] >= ends.get(operator["tid"], -math.inf):
            count += 1
            ends[operator["tid"]] = operator["ts"] + operator["dur"]
    return count


def _peak(events: Iterable[dict[str, Any]]) -> int:
    """Return the highest running sum of the allocations on the CPU, in bytes."""
    allocations = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    allocations.sort(key=lambda event: event["ts"])
    return max(accumulate((event["args"]["Bytes"] for event in allocations), initial=0))


# Threads of an OpenMP runtime spin for a few milliseconds after their work, and would slow down the next contender.
SETTLE_SECONDS = 0.01
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Contender:
    """A way to do the work."""

    name: str  # in tables
    call: Callable[[], object]  # does the work once; may return before a GPU is done
    bytes_moved: int = 0  # minimal memory traffic of the work, in bytes; 0 if unknown
    prepare: Callable[[], object] | None = None  # run before every call, outside all figures
    repeat: int = 1  # consecutive calls per figure


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float
    count: int


@dataclass
class Row:
    """The figures of a contender; a row of tables and of results.

    Times in milliseconds, memory in bytes, bandwidth in bytes a second; None where there is no such figure. `host` is
    the time until the call returns, `wall` until the work is done, `device` the busy time of the GPU when the host is
    ahead of it. `of_limit` is the bandwidth as a fraction of a limit's. `failure` says why there are no figures.
    End to end, `speedup` is over the baseline, `share` what the step alone would be of the iteration, and
    `setup_seconds` the first three steps with all that is built for them.
    """

    contender: str
    host: Spread | None = None
    wall: Spread | None = None
    device: Spread | None = None
    launches: int | None = None
    calls: int | None = None
    peak_bytes: int | None = None
    bytes_moved: int = 0
    bandwidth: float | None = None
    of_limit: float | None = None
    failure: str | None = None
    speedup: float | None = None
    share: float | None = None
    setup_seconds: float | None = None

    @property
    def work(self) -> Spread | None:
        """Device time on a GPU, wall time on a CPU."""
        return self.device or self.wall

    def note_bandwidth(self, limit: float | None = None) -> Row:
        """Set the bandwidth, if times and traffic are known, and its fraction of a limit."""
        work = self.work
        self.bandwidth = self.bytes_moved / (work.median * 1e-3) if work and work.median and self.bytes_moved else None
        self.of_limit = self.bandwidth / limit if self.bandwidth and limit else None
        return self


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


def measure(
    contenders: Sequence[Contender],
    device: torch.device,
    rounds: int = 15,
    warmup: int = 3,
    traced: bool = True,
    busy: bool = True,
    until: float | None = None,
) -> list[Row]:
    """Measure contenders in interleaved rounds, each round in another order."""
    runs = [_Run(contender, device) for contender in contenders]
    for run in runs:
        for _ in range(warmup):
            run.guarded(run.wall, False)
    delay = _delay(device) if has_streams(device) and busy else None
    for turn in range(rounds):
        if until is not None and turn >= LEAST_ROUNDS and time.monotonic() > until:
            break
        shift = turn % max(len(runs), 1)
        for run in runs[shift:] + runs[:shift]:
            run.guarded(run.wall, True)
            if delay is not None:
                run.guarded(run.busy, delay)
    for run in runs:
        if traced:
            run.guarded(run.trace)
        if run.row.failure is None:
            for name, values in run.times.items():
                setattr(run.row, name, spread(values) if values else None)
    return [run.row.note_bandwidth() for run in runs]


def synchronize(device: torch.device) -> None:
    """Wait for all streams of a device; returns at once for a CPU."""
    if has_streams(device):
        torch.cuda.synchronize(device)


def timed(call: Callable[[], object], device: torch.device, repeat: int = 1) -> tuple[float, float]:
    """Milliseconds until a call returns, and until its work is done; means over `repeat` calls in a row."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(repeat):
        call()
    returned = time.perf_counter()
    synchronize(device)
    return (returned - begin) * 1e3 / repeat, (time.perf_counter() - begin) * 1e3 / repeat


class _Run:
    """A contender, and its figures so far."""

    def __init__(self, contender: Contender, device: torch.device) -> None:
        self._contender, self._device = contender, device
        self.row = Row(contender.name, bytes_moved=contender.bytes_moved)
        self.times: dict[str, list[float]] = {"host": [], "wall": [], "device": []}

    def guarded(self, action: Callable[..., object], *arguments: object) -> None:
        """Prepare and act, unless the contender has failed; note it if it fails now."""
        if self.row.failure is not None:
            return
        try:
            if self._contender.prepare is not None:
                self._contender.prepare()
            action(*arguments)
        except Exception as failure:  # a peer may fail in any way; other figures are still valid
            self.row.failure = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"

    def wall(self, keep: bool) -> None:
        if keep and is_host(self._device):
            time.sleep(SETTLE_SECONDS)
        both = timed(self._contender.call, self._device, self._contender.repeat)
        for name, value in zip(("host", "wall"), both, strict=True):
            self.times[name] += [value] if keep else []

    def busy(self, delay: Callable[[float], None]) -> None:
        """Measure the time of the GPU between events, which it is kept from until the host has enqueued everything."""
        delay(self.times["host"][-1])
        self.times["device"].append(between_events(self._contender.call))

    def trace(self) -> None:
        # Otherwise the driver keeps notifying the profiler of every call: later launches take twice the time.
        # A profile after another may then be empty: there are times, but no counts.
        os.environ.setdefault("TEARDOWN_CUPTI", "1")
        for pause in (0.0, 0.2, 1.0):
            time.sleep(pause)
            with contextlib.suppress(NotRecorded):
                traced = trace(self._contender.call, self._device)
                self.row.launches = traced.launches if has_streams(self._device) else None
                self.row.calls, self.row.peak_bytes = traced.calls, traced.peak_bytes
                return


def between_events(call: Callable[[], object], repeat: int = 1) -> float:
    """Milliseconds of a call between two events of the GPU's current stream; the mean over `repeat` calls in a row."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeat):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeat


def _delay(device: torch.device) -> Callable[[float], None]:
    """Work that keeps the GPU busy for some milliseconds, and leaves its cache full of data that no contender reads."""
    source = torch.ones(128 << 20, dtype=torch.uint8, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    for _ in range(3):
        copy()
    taken = between_events(copy, 10)

    def enqueue(milliseconds: float) -> None:
        for _ in range(math.ceil(1.5 * milliseconds / taken) + 4):
            copy()

    return enqueue


COPY = "copy"
READ = "flat read"
PLAIN_LOOP = "plain loop"
LOOP_OVER_TENSORS = "plain loop over tensors"

SOURCE = """
#include <cstdint>
extern "C" void update(T *const *p, T *const *g, T *const *m, T *const *v, const int64_t *n, int64_t count) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < count; ++t) {
        T *__restrict pt = p[t], *__restrict mt = m[t], *__restrict vt = v[t];
        const T *__restrict gt = g[t];
#pragma omp simd
        for (int64_t i = 0; i < n[t]; ++i) {
            T x = gt[i];
            pt[i] += x;
            mt[i] += x;
            vt[i] += x;
        }
    }
}
"""


def copy(device: torch.device, size: int) -> Contender:
    """Return a copy of one buffer to another; it moves every byte twice."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    return Contender(COPY, partial(torch.empty_like(source).copy_, source), bytes_moved=2 * size)


def flat_reads(device: torch.device, size: int) -> list[Contender]:
    """Return reductions that read one flat fp32 buffer once; the fastest is the limit of a read."""
    flat = torch.full((size // 4,), 1e-3, device=device)
    calls: dict[str, Callable[[], object]] = {"sum": flat.sum, "norm": partial(torch.linalg.vector_norm, flat)}
    if has_streams(device):
        from .flat_read import flat_read

        calls["tiles"] = partial(flat_read, flat)
    return [Contender(f"{READ} ({name})", call, flat.nbytes) for name, call in calls.items()]


def plain_loop(elements: int, dtype: torch.dtype) -> Contender | None:
    """Return a compiled loop over four flat arrays with AdamW's traffic, reading four and writing three of them."""
    flat = [torch.ones(elements, dtype=_INTEGER[dtype.itemsize]) for _ in range(4)]
    return _loop(PLAIN_LOOP, [list(array.tensor_split(os.cpu_count() or 1)) for array in flat])


def loop_over_tensors(sizes: Sequence[int], dtype: torch.dtype) -> Contender | None:
    """Return `plain_loop` over as many arrays as a model has tensors, each an allocation of its own."""
    operands = [[torch.ones(size, dtype=_INTEGER[dtype.itemsize]) for size in sizes] for _ in range(4)]
    return _loop(LOOP_OVER_TENSORS, operands)


_INTEGER = {2: torch.int16, 4: torch.int32}


def _loop(name: str, operands: list[list[Tensor]]) -> Contender | None:
    """Return the loop over parameters, gradients and two moments; None without a working compiler."""
    sizes = torch.tensor([array.numel() for array in operands[0]])
    width = operands[0][0].itemsize
    try:
        update = load_library("loops", f"#define T uint{8 * width}_t{SOURCE}").update
    except BuildError:
        return None
    tables = [*(torch.tensor([array.data_ptr() for array in operand]) for operand in operands), sizes]
    addresses = [ctypes.c_void_p(table.data_ptr()) for table in tables]

    def call(held: object = (operands, tables)) -> None:  # the default keeps the arrays alive
        update(*addresses, ctypes.c_int64(len(sizes)))

    return Contender(name, call, bytes_moved=7 * int(sizes.sum()) * width)
