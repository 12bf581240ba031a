"""One profiled call: kernel launches, copies, torch calls and peak memory, read from the profiler's exported trace."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


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
    gpu = device.type == "cuda"
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
