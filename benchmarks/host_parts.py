"""Where the host's time of a steady step goes: looks at tensors, Python, launches, after emptied caches.

    python benchmarks/host_parts.py --output host-parts.json

Gradients keep their memory, or lie in new memory at every step, as after a backward. The whole step is timed without a
profiler. Its parts are what each Python function spends in itself and in C, from steps under `sys.setprofile`. Looks at
tensors and launches are called from `Table.refresh` and `update`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from timing import synchronize, timed

import tilestep
from tilestep import native
from tilestep.bench.results import environment

COUNTS = (50, 219, 2000, 5000)
STEPS = 60


def _flush(megabytes: int = 256) -> Any:
    buffer = torch.zeros(megabytes << 18)
    return lambda: buffer.add_(1.0)


class Parts:
    """Microseconds that each function of a step spends in itself, what it calls in C included."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._stack: list[str] = ["step"]
        self._since = 0.0

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "return"):
            now = time.perf_counter()
            self.steps[-1][self._stack[-1]] += now - self._since
            if event == "call":
                self._stack.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
            elif len(self._stack) > 1:
                self._stack.pop()
            self._since = time.perf_counter()

    def step(self, work: Any) -> None:
        """Run a step under the profiler."""
        self.steps.append(defaultdict(float))
        self._stack, self._since = ["step"], time.perf_counter()
        sys.setprofile(self)
        try:
            work()
        finally:
            sys.setprofile(None)

    def medians(self) -> dict[str, float]:
        """The largest first."""
        names = {name for step in self.steps for name in step}
        found = {name: statistics.median(step.get(name, 0.0) for step in self.steps) * 1e6 for name in names}
        return {name: round(each, 1) for name, each in sorted(found.items(), key=lambda pair: -pair[1]) if each >= 2}


def measure(device: torch.device, count: int, elements: int, clip: bool, moved: bool) -> dict[str, Any]:
    """Quartiles of a step in microseconds, and its parts."""
    params = [torch.nn.Parameter(torch.randn(elements, device=device)) for _ in range(count)]
    kept = [[torch.randn_like(param) for param in params] for _ in range(2)]
    optimizer = tilestep.AdamW(params, lr=1e-5, **({"max_grad_norm": 1.0} if clip else {}))  # type: ignore[attr-defined]
    flush, times, warm, parts = _flush(), [], [], Parts()

    def prepare(turn: int) -> None:
        for param, gradient in zip(params, kept[turn % 2 if moved else 0]):
            param.grad = gradient

    for turn in range(8):
        prepare(turn)
        optimizer.step()
    for turn in range(STEPS):
        prepare(turn)
        warm.append(timed(optimizer.step, device)[0] * 1e3)
        prepare(turn + 1)
        flush()
        times.append(timed(optimizer.step, device)[0] * 1e3)
        prepare(turn)
        flush()
        synchronize(device)
        parts.step(optimizer.step)
    quartiles = [round(each, 1) for each in statistics.quantiles(times, n=4)]
    row = {"tensors": count, "elements": elements, "clip": clip, "gradients": "moved" if moved else "kept"}
    return {**row, "step_us": quartiles, "warm_us": round(statistics.median(warm), 1), "parts_us": parts.medians()}


def main(
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; by default the GPU if there is one.")] = "",
    elements: Annotated[int, typer.Option(help="Elements of each tensor.")] = 1024,
) -> None:
    """Measure, print, write."""
    native.wait()
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rows = []
    for count in COUNTS:
        for moved in (False, True):
            rows.append(measure(where, count, elements, True, moved))
            print(json.dumps(rows[-1]), flush=True)
    if output is not None:
        found = {"environment": environment(where), "threads": torch.get_num_threads(), "rows": rows}
        output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
