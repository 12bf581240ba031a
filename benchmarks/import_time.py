"""Time what `import tilestep` adds to `import torch`, in new interpreters that take turns.

    python benchmarks/import_time.py --output benchmarks/results

Processor seconds are the process's own, its threads' too: they say the same on a machine that does other things. The
first turn, in which files are read and compiled, does not count; byte code is kept, as that of installed packages is.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

CONTENDERS = {
    "torch": "import torch",
    "torch and tilestep": "import torch, tilestep",
    "torch and torch.distributed.checkpoint": "import torch, torch.distributed.checkpoint",
}


def taken(code: str) -> tuple[float, float]:
    """Seconds on the wall and on processors of a new interpreter that runs this."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - begin, spent


def main(
    rounds: Annotated[int, typer.Option(min=2, help="Turns of each.")] = 7,
    output: Annotated[Path | None, typer.Option(help="The folder for the JSON.")] = None,
) -> None:
    """Measure, print, write."""
    from timing import result_name

    from tilestep.bench.results import environment

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    for turn in range(rounds + 1):
        for name, code in CONTENDERS.items():
            measured = taken(code)
            if turn:
                times[name].append(measured)
    rows = {}
    for name, measured_of in times.items():
        wall, spent = ([each[place] for each in measured_of] for place in (0, 1))
        rows[name] = {
            "seconds": round(statistics.median(wall), 3),
            "processor seconds": round(statistics.median(spent), 3),
            "quartiles of processor seconds": [round(each, 3) for each in statistics.quantiles(spent, n=4)[::2]],
        }
        print(f"{name}: {rows[name]}", flush=True)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        result = {"environment": environment(torch.device("cpu")), "rounds": rounds, "imports": rows}
        (output / f"{result_name('import_time', torch.device('cpu'))}.json").write_text(
            json.dumps(result, indent=1) + "\n"
        )


if __name__ == "__main__":
    sys.exit(typer.run(main))
