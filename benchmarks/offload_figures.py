"""Measure optimizers whose state lives in host memory: the update against two-way copies, and whole iterations.

    python benchmarks/offload_figures.py

takes about three minutes on one H200 with 60 GB of host memory, prints what it found and writes it to
benchmarks/results/. `--parts update` or `--parts iteration` runs one of both; `--quick` runs tiny sizes, on a CPU too.

update: one step over 1.19 B elements with float32 state (bfloat16 parameters with masters; float32 parameters),
against copies of as many bytes both ways at once in the same rounds. iteration: forward, backward and step of a model
of Llama's shape, batch 4, float32 parameters under bfloat16 autocast, with and without offload, and torchao's
CPUOffloadOptimizer beside them if it is installed (it cannot clip, so nobody does).
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from shard_contenders import TINY, Shape, make_model

import tilestep
from tilestep.bench.environment import environment
from tilestep.bench.measure import Contender, Timing, measure
from tilestep.bench.results import Group, Result, Row
from tilestep.bench.workloads import gpu_workloads, make_parameters
from tilestep.offloading.host_update import HostState
from tilestep.offloading.lanes import Lane
from tilestep.offloading.memory import HostMemory
from tilestep.offloading.optimizer import OffloadedOptimizer, move_state
from tilestep.offloading.plan import plan_for
from tilestep.offloading.streaming import StreamedState

RESULTS = Path(__file__).parent / "results"
SHARE_WANTED = 0.85
LEARNING_RATE = 1e-4
PIECE = 64 << 20
BUFFER = 1 << 30
COPY = "copies both ways"


def offloaded(make: Callable[[], Any], device: torch.device, where: str, chunk_mb: int = 64) -> OffloadedOptimizer:
    """An offloaded optimizer; on a CPU through the same motions."""
    if device.type == "cuda":
        return tilestep.offload(make, where=where, chunk_mb=chunk_mb)
    home = StreamedState(device, chunk_mb << 10, 3) if where == "gpu" else HostState(device, chunk_mb << 10)
    return move_state(make(), home, where, "to check the harness")


def two_way_copy(size: int, device: torch.device) -> Contender:
    """Copies of so many bytes into the device and as many out of it, in pieces, at once."""
    room = min(BUFFER, size)
    source, target = HostMemory(device, "a copy").take([room, room])
    source.zero_()
    target.zero_()
    here = torch.zeros(2, room, dtype=torch.uint8, device=device)
    inward, outward = Lane(device), Lane(device)

    def call() -> None:
        for start in range(0, size, PIECE):
            at = start % room
            stop = min(at + PIECE, room, at + size - start)
            inward.copy([(here[0, at:stop], source[at:stop])])
            outward.copy([(target[at:stop], here[1, at:stop])])

    return Contender(COPY, call, bytes_moved=2 * size)


def update_group(dtype: torch.dtype, device: torch.device, chunks: list[int], rounds: int, quick: bool) -> Group:
    """One step, streamed in chunks of several sizes and on the CPU, beside the copies."""
    workload = dataclasses.replace(gpu_workloads(quick)[1], dtype=dtype)
    low = dtype is not torch.float32

    def make() -> Any:
        params = make_parameters(workload, device)
        return tilestep.AdamW(params, lr=LEARNING_RATE, master_weights=low)

    contenders: list[Contender] = []
    keep: list[Any] = []
    for chunk in chunks:
        optimizer = offloaded(make, device, "gpu", chunk)
        plan = plan_for(optimizer)
        keep.append(optimizer)
        contenders.append(Contender(f"streamed, {chunk} MiB", optimizer.step, plan.inward + plan.outward))
    on_host = offloaded(make, device, "cpu")
    contenders.append(Contender("on the CPU", on_host.step, plan.gradients + plan.parameters))
    contenders.append(Contender("on the GPU, not offloaded", make().step))
    contenders.append(two_way_copy(plan.inward, device))
    timings = measure(contenders, device, rounds, traced=False, busy=False)
    limit = next(bandwidth(timing) for timing in timings if timing.contender == COPY)
    group = Group(f"update of {workload.title}, float32 state", [], limit, COPY)
    group.rows = [row_of(timing, limit) for timing in timings]
    group.tags = {"state_bytes": str(plan.state)}
    if device.type == "cuda":
        group.tags["report"] = str(keep[0].offload_report())
    return group


def bandwidth(timing: Timing) -> float | None:
    """Bytes a second until all copies are done: what runs in other streams is in the wall time alone."""
    return timing.bytes_moved / (timing.wall.median * 1e-3) if timing.wall and timing.bytes_moved else None


def row_of(timing: Timing, limit: float | None) -> Row:
    row = Row.of(timing, None, gpu=False)
    row.bandwidth = bandwidth(timing)
    row.of_limit = row.bandwidth / limit if row.bandwidth and limit else None
    return row


def torchao_optimizer() -> Any | None:
    """torchao's class, wherever this version keeps it; None without torchao."""
    for module in ("torchao.optim", "torchao.prototype.low_bit_optim"):
        try:
            return importlib.import_module(module).CPUOffloadOptimizer
        except (ImportError, AttributeError):
            continue
    return None


def optimizers(device: torch.device) -> dict[str, Callable[[Any], Any]]:
    """Ways to make an optimizer of parameters."""

    def ours(params: Any) -> Any:
        return tilestep.AdamW(params, lr=LEARNING_RATE)

    ways: dict[str, Callable[[Any], Any]] = {
        "not offloaded": ours,
        "offloaded, gpu": lambda params: offloaded(lambda: ours(params), device, "gpu"),
        "offloaded, cpu": lambda params: offloaded(lambda: ours(params), device, "cpu"),
    }
    theirs = torchao_optimizer()
    if theirs is not None and device.type == "cuda":
        ways["torchao"] = lambda params: theirs(params, torch.optim.AdamW, fused=True, lr=LEARNING_RATE)
    return ways


def iteration(model: Any, optimizer: Any, text: torch.Tensor) -> Callable[[], None]:
    """Forward, backward, step."""

    def call() -> None:
        with torch.autocast(text.device.type, torch.bfloat16):
            loss = model(text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def iteration_group(device: torch.device, rounds: int, batch: int, quick: bool) -> Group:
    """A training's iteration, and the memory that each way needs on the device."""
    shape = TINY if quick else Shape()
    text = torch.randint(shape.vocabulary, (batch, shape.length + 1), device=device)
    contenders, peaks = [], {}
    for name, way in optimizers(device).items():
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        model = make_model(shape, device, torch.float32)
        call = iteration(model, way([*model.parameters()]), text)
        if device.type == "cuda":
            call()
            torch.cuda.synchronize(device)
            peaks[name] = torch.cuda.max_memory_allocated(device) - before
        contenders.append(Contender(name, call))
    timings = measure(contenders, device, rounds, warmup=2, traced=False, busy=False)
    elements = sum(param.numel() for param in model.parameters())
    group = Group(f"iteration, batch {batch}, {elements / 1e9:.3g} B float32 parameters, bfloat16 autocast", [])
    for timing in timings:
        row = row_of(timing, None)
        row.peak_bytes = peaks.get(timing.contender)
        group.rows.append(row)
    group.tags = {"state_bytes": str(8 * elements)}
    return group


def walls(group: Group) -> dict[str, float]:
    return {row.contender: row.wall.median for row in group.rows if row.wall is not None}


def summary_of(groups: dict[str, Group]) -> dict[str, float]:
    """What the figures to reach are about."""
    found: dict[str, float] = {}
    for name, group in groups.items():
        shares = [row.of_limit for row in group.rows if row.contender.startswith("streamed") and row.of_limit]
        if shares:
            found[f"{name}: best share of two-way copies"] = max(shares)
    if "iteration" in groups:
        times = walls(groups["iteration"])
        plain = times.get("not offloaded")
        for name, wall in times.items():
            if plain is not None and name != "not offloaded":
                found[f"iteration: {name}, ms more"] = wall - plain
        limit = next((group.limit for name, group in groups.items() if name == "update fp32"), None)
        if limit:
            # State goes in and out once; what the update itself takes without offload is hidden beneath that.
            size = 2 * int(groups["iteration"].tags["state_bytes"])
            copies = 1e3 * size / limit
            step = walls(groups["update fp32"]).get("on the GPU, not offloaded", 0.0)
            found["iteration: copies, ms"] = copies
            found["iteration: copies that cannot be hidden, ms"] = copies / SHARE_WANTED - step
    return found


def main(
    parts: Annotated[str, typer.Option(help="update, iteration, or both with a comma.")] = "update,iteration",
    chunks: Annotated[str, typer.Option(help="MiB of a chunk, with commas.")] = "64",
    rounds: Annotated[int, typer.Option(help="Timed calls of each contender.")] = 9,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 4,
    output: Annotated[Path, typer.Option(help="The folder for the JSON.")] = RESULTS,
    quick: Annotated[bool, typer.Option(help="Tiny sizes, on a CPU too: checks the harness.")] = False,
) -> None:
    """Measure, print, write."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    sizes = [int(size) for size in chunks.split(",")]
    groups: dict[str, Group] = {}
    result = Result("offload", environment(device))

    def add(name: str, make: Callable[[], Group]) -> None:
        groups[name] = group = make()
        result.groups = list(groups.values())
        result.summary = summary_of(groups)
        for row in group.rows:
            share = f"{100 * row.of_limit:.1f}% of two-way copies" if row.of_limit else ""
            wall = f"{row.wall.median:.1f} ms" if row.wall else row.failure
            host = f"host {row.host.median:.1f} ms" if row.host else ""
            memory = f"peak {row.peak_bytes / 1e9:.2f} GB" if row.peak_bytes else ""
            print(f"{name}: {row.contender}: {wall} {host} {share} {memory}", flush=True)
        if device.type == "cuda":
            print(f"written to {result.save(output)}", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    if "update" in parts:
        add("update bf16", lambda: update_group(torch.bfloat16, device, sizes, rounds, quick))
        add("update fp32", lambda: update_group(torch.float32, device, [64], rounds, quick))
    if "iteration" in parts:
        add("iteration", lambda: iteration_group(device, rounds, batch, quick))
    if torchao_optimizer() is None:
        result.notes.append("torchao is not installed: nothing beside tilestep")
    print(json.dumps(result.summary, indent=1))
    if device.type == "cuda":
        result.save(output)


if __name__ == "__main__":
    typer.run(main)
