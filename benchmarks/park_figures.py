"""Measure `park` and `unpark`: an optimizer's state to the host and back, beside `.to("cpu")` and plain copies.

    python benchmarks/park_figures.py --out benchmarks/results/park_h100_1.json

takes less than a minute on one H100 with 40 GB of host memory. The state is AdamW's, of bfloat16 parameters with
float32 masters, 12 bytes an element. The link's rate is that of one page-locked buffer of 1 GiB each way. `--elements`
gives the parameters' elements in millions; a small number runs on any GPU.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from timing import timed

import tilestep
from tilestep.bench.results import environment

ROUNDS = 5
LAYER = [(4096, 1024), (1024,), (1024,), (1024, 4096), (3072, 1024), (3072,), (1024, 1024), (1024,)]
BUFFER = 1 << 30


def seconds_of(work: Callable[[], Any]) -> float:
    """Seconds until the device is idle after some work."""
    return timed(work, torch.device("cuda"))[1] / 1e3


def to_cpu(values: list[torch.Tensor]) -> None:
    """Copy tensors to the host as `.to("cpu")` does."""
    for value in values:
        value.to("cpu")


def link() -> dict[str, float]:
    """Bytes per second of one copy of a page-locked buffer, each way."""
    host = torch.empty(BUFFER, dtype=torch.uint8, device="cpu", pin_memory=True)
    device = torch.empty(BUFFER, dtype=torch.uint8, device="cuda")
    out = [seconds_of(lambda: host.copy_(device, non_blocking=True)) for _ in range(ROUNDS)]
    back = [seconds_of(lambda: device.copy_(host, non_blocking=True)) for _ in range(ROUNDS)]
    return {"to_host": BUFFER / min(out), "to_device": BUFFER / min(back)}


def main(
    elements: Annotated[float, typer.Option(help="Elements of all parameters, in millions.")] = 1200.0,
    out: Annotated[Path | None, typer.Option(help="The file to write.")] = None,
) -> None:
    """Print the figures, and write them."""
    rates = link()
    layer = sum(torch.Size(shape).numel() for shape in LAYER)
    shapes = LAYER * max(round(elements * 1e6 / layer), 1)
    params = [torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16, device="cuda")) for shape in shapes]
    optimizer = tilestep.AdamW(params, master_weights=True)  # type: ignore[attr-defined]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    values = [value for param in params for value in optimizer.state[param].values()]
    size = sum(value.nbytes for value in values)
    pageable = seconds_of(partial(to_cpu, values))
    del values
    before = torch.cuda.memory_allocated()
    first = seconds_of(optimizer.park)
    freed = before - torch.cuda.memory_allocated()
    times: dict[str, list[float]] = {"unpark": [seconds_of(optimizer.unpark)], "park": [], "first step after": []}
    for _ in range(ROUNDS):
        times["first step after"].append(seconds_of(optimizer.step))
        times["park"].append(seconds_of(optimizer.park))
        times["unpark"].append(seconds_of(optimizer.unpark))
    seconds = {name: statistics.median(each) for name, each in times.items()}
    share = {
        "park": size / seconds["park"] / rates["to_host"],
        "unpark": size / seconds["unpark"] / rates["to_device"],
    }
    result = {
        "environment": environment(torch.device("cuda")),
        "elements": sum(param.numel() for param in params),
        "tensors": len(params),
        "bytes": size,
        "bytes_freed": freed,
        "link_bytes_per_second": rates,
        "seconds": {"first park": first, '.to("cpu")': pageable, **seconds},
        "all_seconds": times,
        "share_of_link": share,
    }
    print(json.dumps(result, indent=1))
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
