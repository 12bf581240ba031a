"""Measure steps without a host in the loop: scaler, clip and schedule, eager and in CUDA graphs, beside torch's.

    python benchmarks/graph_figures.py

takes less than a minute on a GPU, checks what must hold, prints what it found and writes it to benchmarks/results/.
docs/cuda-graphs.md says what each figure means.
"""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # one algorithm for eager and captured products
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from graph_training import schedule, transformer
from timing import between_events, quartiles, result_name, timed
from torch.profiler import ProfilerActivity, profile

import tilestep
from tilestep import native
from tilestep.bench.results import environment

RESULTS = Path(__file__).parent / "results"
TENSORS, ELEMENTS = 2000, 65_536
ROUNDS, TURN = 60, 10
CLIP = 1.0


@dataclass
class Contender:
    """One way to make a step.

    Args:
        name: what the results call it.
        step: makes the step.
        before: comes before each step, outside all figures.
    """

    name: str
    step: Callable[[], Any]
    before: Callable[[], Any] = lambda: None


def events(work: Callable[[], Any]) -> list[dict[str, Any]]:
    """The profiler's events of one call."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]


def traced(contender: Contender) -> dict[str, Any]:
    """Launches, copies, waits and busy time of one step; the synchronization that ends the trace does not count."""
    contender.before()
    seen = events(contender.step)
    kernels = [event for event in seen if event.get("cat") == "kernel"]
    copies = [event for event in seen if event.get("cat") in ("gpu_memcpy", "gpu_memset")]
    calls = [event["name"] for event in seen if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    return {
        "kernels": len(kernels),
        "copies_and_fills": len(copies),
        "device_to_host": sum("DtoH" in event["name"] for event in copies),
        "waits": sum(name in ("cudaStreamSynchronize", "cudaEventSynchronize") for name in calls),
        "kernel_ms": round(sum(event["dur"] for event in kernels) / 1e3, 4),
    }


def by_turns(contenders: list[Contender], rounds: int = ROUNDS, turn: int = TURN) -> dict[str, dict[str, Any]]:
    """Host and wall time of steady steps, then one traced step of each.

    The contenders take turns of several steps. The first of a turn finds caches that are full of another contender's
    tensors: it is reported by itself, as `host_after_another_ms`.
    """
    names = [each.name for each in contenders]
    host, wall, first = ({name: list[float]() for name in names} for _ in range(3))
    for _ in range(5):
        for each in contenders:
            each.before()
            each.step()
    for _ in range(max(1, rounds // turn)):
        for each in contenders:
            for place in range(turn + 1):
                each.before()
                returned, done = timed(each.step, torch.device("cuda"))
                (host if place else first)[each.name].append(returned)
                if place:
                    wall[each.name].append(done)
    return {
        each.name: {
            "host_ms": quartiles(host[each.name]),
            "host_after_another_ms": quartiles(first[each.name]),
            "wall_ms": quartiles(wall[each.name]),
            **traced(each),
        }
        for each in contenders
    }


def back_to_back(step: Callable[[], Any], count: int = 50) -> float:
    """Milliseconds of a step when the host only queues them, one behind the other."""
    times = []
    for _ in range(5):
        step()
        torch.cuda.synchronize()
        times.append(between_events(step, count))
    return statistics.median(times)


def parameters(
    count: int = TENSORS, elements: int = ELEMENTS, dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    """Parameters with gradients; float32 ones as mixed precision has them, since torch's scaler takes no bf16."""
    params = [torch.nn.Parameter(torch.randn(elements, device="cuda", dtype=dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def ours(params: list[torch.nn.Parameter], clip: float | None = CLIP) -> Contender:
    optimizer = tilestep.AdamW(params, lr=1e-4, max_grad_norm=clip)
    scaler, scheduler = tilestep.GradScaler("cuda", init_scale=2.0), schedule(optimizer)
    one = torch.ones((), device="cuda")

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    return Contender("tilestep", step, lambda: scaler.scale(one))


def torchs(params: list[torch.nn.Parameter], clip: float | None = CLIP) -> Contender:
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    scaler, scheduler = torch.amp.GradScaler("cuda", init_scale=2.0), schedule(optimizer)
    one = torch.ones((), device="cuda")

    def step() -> None:
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, clip)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    return Contender("torch fused", step, lambda: scaler.scale(one))


def steady_step() -> dict[str, Any]:
    """Scaler, clip and schedule on 2,000 tensors; ours may neither wait nor read anything back."""
    contenders = [ours(parameters()), torchs(parameters())]
    found = by_turns(contenders)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            contenders[0].before()
            contenders[0].step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    mine = found["tilestep"]
    found["holds"] = {
        "no synchronizing call": mine["waits"] == 0,
        "no transfer to the host": mine["device_to_host"] == 0,
        "host at most 0.3 ms": mine["host_ms"]["median"] <= 0.3,
    }
    return found


def scaler_launches() -> dict[str, Any]:
    """Kernels of the scaler's whole sequence, for two numbers of tensors, without and with a clip."""
    found: dict[str, Any] = {}
    for count in (200, TENSORS):
        for clip in (None, CLIP):
            for make in (ours, torchs):
                contender = make(parameters(count, 1000), clip)
                for _ in range(3):
                    contender.before()
                    contender.step()
                # Beside kernels, a step copies the learning rate that the schedule has changed.
                key = f"{contender.name}, {count} tensors, {'clip' if clip else 'no clip'}"
                seen = traced(contender)
                found[key] = {name: seen[name] for name in ("kernels", "copies_and_fills")}
    mine = [value["kernels"] for key, value in found.items() if key.startswith("tilestep")]
    found["holds"] = {"at most 5 launches": max(mine) <= 5}
    return found


def graphs() -> dict[str, Any]:
    """Replays of captured steps: a step with clip alone, and the scaler's sequence."""
    found: dict[str, Any] = {}
    params = parameters(dtype=torch.bfloat16)
    optimizer = tilestep.AdamW(params, lr=1e-4, max_grad_norm=CLIP)
    alone = tilestep.capture(optimizer)
    scaler = tilestep.GradScaler("cuda", init_scale=2.0)
    scaler.scale(torch.ones((), device="cuda"))
    scaler.step(optimizer)
    scaler.update()
    scaled = tilestep.capture(optimizer, lambda: (scaler.step(optimizer), scaler.update()))

    def rescheduled() -> None:
        optimizer.param_groups[0]["lr"] *= 0.999
        alone.replay()

    contenders = [
        Contender("clip", alone.replay),
        Contender("clip, new lr each time", rescheduled),
        Contender("clip and scaler", scaled.replay),
        Contender("clip, eager", optimizer.step),
    ]
    found.update(by_turns(contenders, 100))
    for each in contenders:
        busy = statistics.median([traced(each)["kernel_ms"] for _ in range(5)])
        queued = back_to_back(each.step)
        found[each.name] |= {
            "kernel_ms": busy,
            "queued_wall_ms": round(queued, 4),
            "over_kernels": round(queued / busy - 1, 4),
        }
    replays = [found["clip"], found["clip and scaler"]]
    found["holds"] = {
        "wall within 3% of the kernels": all(each["over_kernels"] <= 0.03 for each in replays),
        "host at most 0.05 ms": all(each["host_ms"]["median"] <= 0.05 for each in replays),
    }
    return found


def _timed_part(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    native.wait()
    begin = time.perf_counter()
    found = part()
    return {**found, "seconds": round(time.perf_counter() - begin, 1)}


def main(output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None) -> None:
    """Measure, print, write."""
    if not torch.cuda.is_available():
        raise SystemExit("these figures are about GPUs, and there is none here")
    native.wait()
    result: dict[str, Any] = {"environment": environment(), "tensors": TENSORS, "elements": TENSORS * ELEMENTS}
    failed = []
    # A process for each part: once a profiler has run, every later call to CUDA in its process costs more.
    spawned = multiprocessing.get_context("spawn")
    for part in (transformer, scaler_launches, steady_step, graphs):
        with ProcessPoolExecutor(1, mp_context=spawned) as process:
            result[part.__name__] = found = process.submit(_timed_part, part).result()
        print(part.__name__, json.dumps(found, indent=1))
        failed += [f"{part.__name__}: {name}" for name, held in found["holds"].items() if not held]
    path = output or RESULTS / f"{result_name('graphs', torch.device('cuda'))}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    if failed:
        raise SystemExit("not reached: " + "; ".join(failed))


if __name__ == "__main__":
    typer.run(main)
