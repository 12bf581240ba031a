"""Let `tilestep tune` measure rules on this GPU, and time steps with the shapes that ship beside those it chose.

    python benchmarks/tuned.py --seconds 40

The table goes to a cache of its own. Steps are of 1.19 B elements in 219 tensors and of 2,000 tensors of random sizes,
without clip, in turns; a shape that was not changed is timed against itself, which shows the noise.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

RESULTS = Path(__file__).parent / "results"


def main(
    seconds: Annotated[float, typer.Option(help="For tuning.")] = 40,
    rounds: Annotated[int, typer.Option(help="Timed turns of each shape.")] = 7,
    kinds: Annotated[str, typer.Option(help="Parts of the names of kinds, between commas; all of them without.")] = "",
    rules: Annotated[str, typer.Option(help="Their names, between commas.")] = "AdamW",
    steps: Annotated[bool, typer.Option(help="Whether to time steps of models with what was chosen.")] = True,
    output: Annotated[Path, typer.Option(help="The folder for the JSON.")] = RESULTS,
    quick: Annotated[bool, typer.Option(help="Tiny sizes, on CPUs too: checks the harness.")] = False,
) -> None:
    """Tune, measure, print, write."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILESTEP_CACHE_DIR"] = folder
        measure(seconds, rounds, kinds, rules, steps, output, quick)


def measure(seconds: float, rounds: int, kinds: str, rules: str, steps: bool, output: Path, quick: bool) -> None:
    """What `main` does, in a cache of its own."""
    from timing import result_name

    from tilestep import Optimizer
    from tilestep.backends.tuning import forced_shape
    from tilestep.bench.measure import timed
    from tilestep.bench.results import environment
    from tilestep.bench.sections import gpu_workloads, make_parameters
    from tilestep.bench.tune import KINDS, jobs, tune
    from tilestep.rules import registry

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    listed = [
        job
        for job in jobs([registry[name] for name in rules.split(",")], device)
        if any(part in job.kind for part in kinds.split(","))
    ]
    result: dict[str, Any] = {"environment": environment(device), "seconds of tuning": {}, "signatures": {}}
    path = output / f"{result_name('tuned', device)}.json"
    output.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        path.write_text(json.dumps(result, indent=1) + "\n")

    begin, ticks = time.monotonic(), 0

    def tick(job: object, text: str) -> None:
        nonlocal ticks
        ticks += 1

    outcomes = []
    for outcome in tune(listed, device, rounds, 1 << 20 if quick else 0, save=False, seconds=seconds, tick=tick):
        outcomes.append(outcome)
        times = outcome.milliseconds
        title = f"{outcome.job.rule.name}, {outcome.job.kind}"
        result["signatures"][title] = {
            "signature": outcome.job.signature,
            "shipped": str(outcome.before),
            "tuned": str(outcome.after),
            "shipped_ms": times[outcome.before],
            "tuned_ms": times[outcome.after],
            "gain": outcome.gain,
            "shapes": {str(shape): taken for shape, taken in times.items()},
        }
        result["seconds of tuning"][title] = round(time.monotonic() - begin, 1)
        print(
            f"{title}: {outcome.before} -> {outcome.after}, {outcome.gain:.2%}, {len(times)} shapes",
            flush=True,
        )
        keep()
    result["steps"], result["turns of tuning"] = {}, ticks
    llama, random = gpu_workloads(quick)[1], gpu_workloads(quick)[0]
    for workload in (llama, random) if steps else ():
        for outcome in outcomes:
            dtype, options = KINDS[outcome.job.kind]
            if dtype is not torch.bfloat16:
                continue
            params = make_parameters(workload, device)
            optimizer = Optimizer(params, outcome.job.rule, lr=1e-4, **options)
            times_of: dict[str, list[float]] = {"shipped": [], "tuned": []}
            for turn in range(rounds):
                for name in sorted(times_of, reverse=bool(turn % 2)):
                    with forced_shape(outcome.before if name == "shipped" else outcome.after):
                        optimizer.rebuild()
                    optimizer.step()
                    times_of[name].append(timed(optimizer.step, device, repeat=4)[1])
            medians = {name: statistics.median(values) for name, values in times_of.items()}
            result["steps"][f"{workload.title}, {outcome.job.rule.name}, {outcome.job.kind}"] = {
                **{f"{name}_ms": round(value, 4) for name, value in medians.items()},
                "gain": round(1 - medians["tuned"] / medians["shipped"], 4),
                "shapes": [str(outcome.before), str(outcome.after)],
            }
            print(f"{workload.title}, {outcome.job.rule.name}, {outcome.job.kind}: {medians}", flush=True)
            keep()
            del params, optimizer
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(typer.run(main))
