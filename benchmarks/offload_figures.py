"""Measure optimizers whose state lives in host memory: the update against two-way copies, and whole iterations.

    python benchmarks/offload_figures.py --limit 180

takes about three minutes on one H200 with 90 GB of host memory, prints what it found and writes it to
benchmarks/results/ after each part. `--parts update` or `--parts iteration` runs one of both; `--quick` runs tiny
sizes, on a CPU too.

update: one step over 1.19 B elements with float32 state (float32 parameters; bfloat16 ones with masters), against
copies of as many bytes both ways at once in the same rounds. iteration: forward, backward and step of a model of
Llama's shape, batch 4, float32 parameters under bfloat16 autocast, without offload, with it, with it beside backward
and beside the next forward, and torchao's CPUOffloadOptimizer beside them if it is installed (it cannot clip, so nobody
does).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from shard_contenders import TINY, Shape, make_model
from timing import result_name, spread, timed

import tilestep
from tilestep.bench.measure import Contender, Row, measure
from tilestep.bench.results import Group, Result, environment
from tilestep.bench.sections import free, gpu_workloads, make_parameters
from tilestep.memory.host import HostState
from tilestep.memory.offload import move_state
from tilestep.memory.offloaded import OffloadedOptimizer, plan_for
from tilestep.memory.streaming import StreamedState
from tilestep.native.host_memory import HostMemory, available
from tilestep.timeline.side_stream import SideStream

BACK_TO_BACK = 3
"""Iterations for one figure: what an update leaves for the next forward is hidden there only if one follows at once."""
RESULTS = Path(__file__).parent / "results"
SHARE_WANTED = 0.85
LEARNING_RATE = 1e-4
PIECE = 64 << 20
BUFFER = 1 << 30
COPY = "copies both ways"
HOST_NEEDED = 90 << 30
"""Bytes of host memory that all contenders of one part take together."""


def grow_host_memory(wanted: int) -> None:
    """Touch memory that a virtual machine says it has only once it is used."""
    blocks: list[np.ndarray] = []
    waits = 5
    while available()[0] + len(blocks) * BUFFER < wanted and waits:
        if available()[0] > 2 * BUFFER:
            blocks.append(np.ones(BUFFER, dtype=np.uint8))
        else:
            time.sleep(1)
            waits -= 1


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
    inward, outward = SideStream(device), SideStream(device)

    def call() -> None:
        for start in range(0, size, PIECE):
            at = start % room
            stop = min(at + PIECE, room, at + size - start)
            inward.copy([(here[0, at:stop], source[at:stop])])
            outward.copy([(target[at:stop], here[1, at:stop])])

    return Contender(COPY, call, bytes_moved=2 * size)


def update_group(
    dtype: torch.dtype, device: torch.device, chunks: list[int], rounds: int, quick: bool, until: float
) -> Group:
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
    timings = measure(contenders, device, rounds, traced=False, busy=False, until=until)
    limit = next(bandwidth(timing) for timing in timings if timing.contender == COPY)
    group = Group(f"update of {workload.title}, float32 state", [], limit, COPY)
    group.rows = [row_of(timing, limit) for timing in timings]
    group.tags = {"state_bytes": str(plan.state)}
    if device.type == "cuda":
        group.tags["report"] = str(keep[0].offload_report())
    return group


def bandwidth(timing: Row) -> float | None:
    """Bytes a second until all copies are done: what runs in other streams is in the wall time alone."""
    return timing.bytes_moved / (timing.wall.median * 1e-3) if timing.wall and timing.bytes_moved else None


def row_of(row: Row, limit: float | None) -> Row:
    row.bandwidth = bandwidth(row)
    row.of_limit = row.bandwidth / limit if row.bandwidth and limit else None
    return row


def torchao_optimizer() -> tuple[Any | None, str]:
    """torchao's class, wherever this version keeps it, or why there is none."""
    reasons = []
    for module in ("torchao.optim", "torchao.prototype.low_bit_optim"):
        try:
            return importlib.import_module(module).CPUOffloadOptimizer, ""
        except Exception as error:  # a wheel for another torch may fail in any way
            reasons.append(f"{module}: {type(error).__name__}: {error}")
    return None, "; ".join(reasons)


class NoStep:
    """Forward and backward alone.

    Args:
        params: whose gradients are dropped.
    """

    def __init__(self, params: list[Any]) -> None:
        self._params = params

    def step(self) -> None: ...

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None


def optimizers(device: torch.device, state_dtype: str | None) -> dict[str, Callable[[Any], Any]]:
    """Ways to make an optimizer for a model."""

    def ours(model: Any) -> Any:
        return tilestep.AdamW(model.parameters(), lr=LEARNING_RATE, state_dtype=state_dtype)

    def moved(where: str) -> Callable[[Any], Any]:
        return lambda model: offloaded(lambda: ours(model), device, where)

    def beside(during: Any) -> Callable[[Any], Any]:
        return lambda model: tilestep.overlap(moved("gpu")(model), model, during)

    ways: dict[str, Callable[[Any], Any]] = {
        "no step": lambda model: NoStep([*model.parameters()]),
        "not offloaded": ours,
        "offloaded, gpu": moved("gpu"),
        "offloaded, gpu, backward": beside("backward"),
        "offloaded, gpu, forward": beside("forward"),
        "offloaded, cpu": moved("cpu"),
    }
    theirs, _ = torchao_optimizer()
    if theirs is not None and device.type == "cuda":
        ways["torchao"] = lambda model: theirs([*model.parameters()], torch.optim.AdamW, fused=True, lr=LEARNING_RATE)
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


def backward_ms(model: Any, text: torch.Tensor) -> float:
    """What backward takes alone."""
    taken = []
    for _ in range(4):
        with torch.autocast(text.device.type, torch.bfloat16):
            loss = model(text)
        taken.append(timed(loss.backward, text.device)[1])
        model.zero_grad()
    return spread(taken[1:]).median


def iteration_group(
    device: torch.device, rounds: int, batch: int, quick: bool, until: float, state_dtype: str | None, ways: list[str]
) -> Group:
    """A training's iteration, and the memory that each way needs on the device."""
    shape = TINY if quick else Shape()
    text = torch.randint(shape.vocabulary, (batch, shape.length + 1), device=device)
    contenders, peaks, failed = [], {}, []
    elements, backward = 0, 0.0
    chosen = {name: way for name, way in optimizers(device, state_dtype).items() if not ways or name in ways}
    for name, way in chosen.items():
        begin = time.monotonic()
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        model = make_model(shape, device, torch.float32)
        elements = sum(param.numel() for param in model.parameters())
        if name == "no step":
            backward = backward_ms(model, text)
        try:
            call = iteration(model, way(model), text)
            for _ in range(2):
                call()
        except Exception as error:  # any peer may fail in any way; the others' figures still count
            failed.append(Row(name, failure=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
            del model
            continue
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            peaks[name] = torch.cuda.max_memory_allocated(device) - before
        contenders.append(Contender(name, call, repeat=BACK_TO_BACK))
        print(f"iteration: {name} is there after {time.monotonic() - begin:.0f} s", flush=True)
    timings = measure(contenders, device, rounds, warmup=1, traced=False, busy=False, until=until)
    kept = f", {state_dtype} states" if state_dtype else ""
    title = f"iteration, batch {batch}, {elements / 1e9:.3g} B float32 parameters, bfloat16 autocast{kept}"
    group = Group(title, failed)
    for timing in timings:
        row = row_of(timing, None)
        row.peak_bytes = peaks.get(timing.contender)
        group.rows.append(row)
    group.tags = {"state_bytes": str(8 * elements), "backward_ms": str(backward)}
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
        found.update(_iterations(groups["iteration"], groups.get("update fp32")))
    return found


def _iterations(group: Group, update: Group | None) -> dict[str, float]:
    """How much longer iterations with offload are, and how much longer the copies alone make them."""
    times = walls(group)
    found = {f"iteration: {name}, ms": wall for name, wall in times.items()}
    plain = times.get("not offloaded")
    for name, wall in times.items():
        if plain is not None and name not in ("not offloaded", "no step"):
            found[f"iteration: {name}, ms more"] = wall - plain
    if update is None or not update.limit:
        return found
    # State goes in and out once, both ways at once: half of these bytes each way, and both count in the bandwidth.
    copies = 2e3 * int(group.tags["state_bytes"]) / update.limit
    step, backward = walls(update).get("on the GPU, not offloaded", 0.0), float(group.tags["backward_ms"])
    found["iteration: copies, ms"] = copies
    found["iteration: the update that they replace, ms"] = step
    found["iteration: backward alone, ms"] = backward
    found["iteration: copies that cannot be hidden, ms"] = copies - step
    found[f"iteration: copies that cannot be hidden at {100 * SHARE_WANTED:.0f}% of the bandwidth, ms"] = (
        copies / SHARE_WANTED - step
    )
    found["iteration: copies that cannot be hidden beside backward, ms"] = max(copies - backward, 0.0) - step
    return found


def main(
    parts: Annotated[str, typer.Option(help="update, iteration, or both with a comma.")] = "update,iteration",
    chunks: Annotated[str, typer.Option(help="MiB of a chunk, with commas.")] = "64",
    rounds: Annotated[int, typer.Option(help="Timed calls of each contender.")] = 9,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 4,
    state_dtype: Annotated[str, typer.Option(help="What the iteration's states are kept in.")] = "",
    ways: Annotated[str, typer.Option(help="Ways of an iteration to measure, with semicolons; all without.")] = "",
    limit: Annotated[float, typer.Option(help="Seconds after which no further round begins.")] = 180,
    output: Annotated[Path, typer.Option(help="The folder for the JSON.")] = RESULTS,
    quick: Annotated[bool, typer.Option(help="Tiny sizes, on a CPU too: checks the harness.")] = False,
) -> None:
    """Measure, print, write."""
    begin = time.monotonic()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    gpu = device.type == "cuda"
    sizes = [int(size) for size in chunks.split(",")]
    groups: dict[str, Group] = {}
    result = Result(result_name("offload", device), environment(device))
    if gpu and not quick:
        grow_host_memory(HOST_NEEDED // 4 if state_dtype else HOST_NEEDED)
    print(f"host memory: {available()[0] / 1e9:.0f} GB, after {time.monotonic() - begin:.0f} s", flush=True)

    def add(name: str, share: float, make: Callable[[float], Group]) -> None:
        started = time.monotonic()
        if started - begin > limit:
            result.notes.append(f"no time was left for {name}")
        else:
            try:
                groups[name] = make(begin + share * limit)
            except Exception as error:
                result.notes.append(f"{name} failed: {type(error).__name__}: {error}")
        if name in groups:
            result.groups = list(groups.values())
            result.summary = summary_of(groups)
            _say(name, groups[name])
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        if gpu:
            result.save(output)
        free(device)

    def iterations(until: float) -> Group:
        names = [name.strip() for name in ways.split(";") if name.strip()]
        return iteration_group(device, rounds, batch, quick, until, state_dtype or None, names)

    theirs, reason = torchao_optimizer()
    if theirs is None:
        result.notes.append(f"torchao is not beside tilestep: {reason}")
    if "update" in parts:
        add("update fp32", 0.35, lambda until: update_group(torch.float32, device, sizes, rounds, quick, until))
    if "iteration" in parts:
        add("iteration", 0.8, iterations)
    if "update" in parts:
        add("update bf16", 1.0, lambda until: update_group(torch.bfloat16, device, [64], rounds, quick, until))
    print(json.dumps(result.summary, indent=1))
    for note in result.notes:
        print(f"note: {note}")
    if gpu:
        print(f"written to {result.save(output)}")


def _say(name: str, group: Group) -> None:
    for row in group.rows:
        share = f"{100 * row.of_limit:.1f}% of two-way copies" if row.of_limit else ""
        wall = (
            f"{row.wall.median:.1f} ms ({row.wall.low:.1f} to {row.wall.high:.1f}, {row.wall.count})"
            if row.wall
            else row.failure
        )
        host = f"host {row.host.median:.1f} ms" if row.host else ""
        memory = f"peak {row.peak_bytes / 1e9:.2f} GB" if row.peak_bytes else ""
        print(f"{name}: {row.contender}: {wall} {host} {share} {memory}", flush=True)


if __name__ == "__main__":
    typer.run(main)
