"""Measure where updates run: after backward, beside it, beside the next forward; whole iterations under FSDP2.

    python benchmarks/overlap_figures.py --ranks 2

takes a minute or two a batch size on GPUs, prints what it found and writes it to benchmarks/results/. The model has the
shapes of `tilestep bench step`'s language model, 1.2 B parameters in float32, and computes in bfloat16; every block is
sharded by itself. Contenders take turns in one set of processes, each with a model of its own; first those that clip,
then those that do not. docs/overlap.md says what the schedules are.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import typer
from shard_contenders import TINY, Shape, make_model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tilestep
from tilestep.bench.environment import environment
from tilestep.bench.measure import spread, synchronize
from tilestep.bench.results import Group, Result, Row
from tilestep.bench.sections import free

RESULTS = Path(__file__).parent / "results"
CLIP = 1.0
RATE = 1e-4
BACK_TO_BACK = 3
"""Iterations for one figure, without waiting for the device in between, as in training."""


def sharded(shape: Shape, device: torch.device) -> Any:
    """The model under FSDP2, a group for each block; the same numbers at each call."""
    model = make_model(shape, device, torch.float32)
    # A CPU's reductions take what they get.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device.type == "cuda" else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE, fused=True)


def _ours(params: Any, **options: Any) -> tilestep.Optimizer:
    return tilestep.AdamW(params, lr=RATE, **options)  # type: ignore[attr-defined]


class Training:
    """A model and what updates it.

    Args:
        name: what the tables call it.
        model: the model.
        optimizer: updates it; None for forward and backward alone.
        clips: whether torch's clip comes before the step.
    """

    def __init__(self, name: str, model: Any, optimizer: torch.optim.Optimizer | None, clips: bool = False) -> None:
        self.name, self.model, self.optimizer, self.clips = name, model, optimizer, clips
        self.host: list[float] = []
        self.wall: list[float] = []
        self.peak = 0
        self.losses: list[torch.Tensor] = []

    def iterate(self, tokens: torch.Tensor) -> None:
        """Forward, backward, clip, step."""
        loss = self.model(tokens)
        loss.backward()
        if self.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.model.zero_grad()
        self.losses.append(loss.detach())

    def measure(self, batches: list[torch.Tensor], device: torch.device, *, keep: bool) -> None:
        """Time some iterations, the slowest rank's time."""
        gpu = device.type == "cuda"
        synchronize(device)
        dist.barrier()
        before = torch.cuda.memory_allocated() if gpu else 0
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        for tokens in batches:
            self.iterate(tokens)
        returned = time.perf_counter()
        synchronize(device)
        done = time.perf_counter()
        times = torch.tensor([returned - begin, done - begin], dtype=torch.float64, device=device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        if keep:
            host, wall = (1e3 * value / len(batches) for value in times.tolist())
            self.host.append(host)
            self.wall.append(wall)
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - before) if gpu else 0


def trainings(shape: Shape, device: torch.device, *, clips: bool) -> list[Training]:
    """Every contender with a model of its own; all models begin alike."""

    def ours(name: str, during: Any) -> Training:
        model = sharded(shape, device)
        optimizer = _ours(model.parameters(), max_grad_norm=CLIP if clips else None)
        if during is not None:
            tilestep.overlap(optimizer, model, during)
        return Training(name, model, optimizer)

    fused = sharded(shape, device)
    return [
        Training("no step", sharded(shape, device), None),
        Training("torch fused", fused, _fused(fused.parameters()), clips),
        ours("serial", None),
        ours("backward", "backward"),
        ours("forward", "forward"),
    ]


@dataclass
class Settings:
    """What the ranks are told."""

    ranks: int
    batches: list[int]
    rounds: int
    small: bool
    output: str


def _rank(rank: int, settings: Settings, folder: str) -> None:
    gpu = torch.cuda.is_available()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(settings.ranks))
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", settings.ranks)
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=settings.ranks)
    shape = TINY if settings.small else Shape()
    result = Result(f"overlap-{settings.ranks}", environment(device))
    for clips in (True, False):
        contenders = trainings(shape, device, clips=clips)
        for size in settings.batches:
            for each in contenders:
                each.host, each.wall, each.peak, each.losses = [], [], 0, []
            _measure(contenders, shape, device, size, settings.rounds)
            _report(result, contenders, size, "clip" if clips else "no clip", gpu)
        del contenders
        free(device)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(result.summary, indent=1))
        if gpu:
            print(f"written to {result.save(Path(settings.output))}")


def _measure(contenders: list[Training], shape: Shape, device: torch.device, size: int, rounds: int) -> None:
    generator = torch.Generator(device).manual_seed(dist.get_rank())

    def drawn() -> list[torch.Tensor]:
        sizes = (size, shape.length + 1)
        return [torch.randint(shape.vocabulary, sizes, generator=generator, device=device) for _ in range(BACK_TO_BACK)]

    for turn in range(rounds + 2):
        shift = max(turn - 2, 0) % len(contenders)
        batches = drawn()
        for each in contenders[shift:] + contenders[:shift]:
            each.measure(batches, device, keep=turn >= 2)


def _report(result: Result, contenders: list[Training], size: int, clip: str, gpu: bool) -> None:
    by_name = {each.name: each for each in contenders}
    medians = {each.name: spread(each.wall).median for each in contenders}
    work = f"batch {size}, {clip}"
    for name, median in medians.items():
        exposed = median - medians["no step"]
        result.summary[f"exposed ms, {work}, {name}"] = round(exposed, 3)
        result.summary[f"exposed share, {work}, {name}"] = round(exposed / medians["no step"], 4)
        if dist.get_rank() == 0:
            peak = f"{by_name[name].peak / 2**30:7.2f} GiB" if gpu else ""
            print(f"{work:20} {name:12} {median:9.2f} ms  exposed {exposed:7.2f} ms  {peak}", flush=True)
    for schedule in ("backward", "forward"):
        same = torch.equal(torch.stack(by_name["serial"].losses), torch.stack(by_name[schedule].losses))
        result.summary[f"losses are the serial ones, {work}, {schedule}"] = float(same)
    result.summary["bytes of sharded gradients"] = float(sum(each.numel() * 4 for each in _shards(contenders[0].model)))
    rows = [
        Row(each.name, host=spread(each.host), wall=spread(each.wall), peak_bytes=each.peak if gpu else None)
        for each in contenders
    ]
    result.groups.append(Group(f"iteration, {work}", rows, tags={"batch": str(size), "clip": clip}))


def _shards(model: nn.Module) -> list[torch.Tensor]:
    return [param.to_local() for param in model.parameters()]  # type: ignore[attr-defined]


def main(
    ranks: Annotated[int, typer.Option(help="How many GPUs, or processes without one.")] = 1,
    batch: Annotated[list[int], typer.Option(help="Sequences a rank.")] = [1, 4],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Figures of each contender.")] = 10,
    small: Annotated[bool, typer.Option(help="A small model: checks this script, measures nothing.")] = False,
    output: Annotated[Path, typer.Option(help="The folder for the JSON.")] = RESULTS,
) -> None:
    """Measure, print, write."""
    settings = Settings(ranks, list(batch), rounds, small, str(output))
    spawn: Callable[..., Any] = multiprocessing.spawn
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (settings, folder), nprocs=ranks)


if __name__ == "__main__":
    typer.run(main)
