"""How the scripts of this folder time calls, write figures and name files.

`tilestep.bench.measure` has contenders that take turns; this has single calls and what is written of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from tilestep.bench.measure import between_events, spread, synchronize, timed
from tilestep.bench.results import device_name
from tilestep.devices import is_host

__all__ = ["between_events", "device_milliseconds", "quartiles", "result_name", "spread", "synchronize", "timed"]


def device_milliseconds(call: Callable[[], object], rounds: int = 10, warmup: int = 3) -> float:
    """The median milliseconds of a call on the GPU, where the host queues all calls one after the other."""
    for _ in range(warmup):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    marks[-1].synchronize()
    return spread([before.elapsed_time(after) for before, after in pairwise(marks)]).median


def quartiles(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Median, quartiles and number of values, as results have them."""
    found = spread(values)
    return {
        "median": round(found.median, digits),
        "low": round(found.low, digits),
        "high": round(found.high, digits),
        "count": found.count,
    }


def result_name(subject: str, device: torch.device, count: int = 1) -> str:
    """The name of a result's file, without .json: subject, kind of device, number of GPUs or of processes."""
    kind = "cpu" if is_host(device) else (re.findall(r"[A-Z]+\d+", device_name(device)) or ["gpu"])[0].lower()
    return f"{subject}_{kind}_{count}"
