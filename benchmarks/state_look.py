"""What looking at every state before a step costs: steps with that look and without, in turns, after emptied caches.

python benchmarks/state_look.py --output benchmarks/results/cpu-2-cores/state-look.json

A look reads about five lines of the cache of each state: its object, the tensor behind it (three lines: storage, sizes
and strides, type), and the storage. AdamW has three states for each parameter, its step count included.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import tilestep
from tilestep import native
from tilestep.bench.results import environment

COUNTS = (219, 2000)
STEPS = 300


def measure(device: torch.device, count: int, options: dict[str, Any]) -> dict[str, Any]:
    """Medians of steps of parameters with 64 elements, in microseconds, and the part that the look takes of them."""
    params = [torch.nn.Parameter(torch.randn(64, device=device)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = tilestep.AdamW(params, lr=1e-5, **options)  # type: ignore[attr-defined]
    for _ in range(6):
        optimizer.step()
    states = [engine.states for engine in optimizer.plan.engines]
    looks = [each.look for each in states]
    flush = torch.zeros(16 << 20)
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(STEPS):
        with_look = turn % 2 == 0
        for each, look in zip(states, looks):
            each.look = look if with_look else (lambda threads: True)
        flush.add_(1.0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.step()
        times[with_look].append((time.perf_counter() - begin) * 1e6)
    medians = {name: round(statistics.median(times[key]), 1) for name, key in (("with", True), ("without", False))}
    part = round(1 - medians["without"] / medians["with"], 3)
    return {"tensors": count, **options, "microseconds": medians, "part of a step": part}


def main(output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None, device: str = "") -> None:
    """Measure, print, write."""
    native.wait()
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rows = [measure(where, count, options) for count in COUNTS for options in ({}, {"max_grad_norm": 1.0})]
    found = {"environment": environment(where), "threads": torch.get_num_threads(), "rows": rows}
    print(json.dumps(found, indent=1))
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
