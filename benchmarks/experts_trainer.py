"""Clip and AdamW where experts are on a mesh of their own, beside what transformers' Trainer does there.

    python benchmarks/experts_trainer.py             # one GPU
    python benchmarks/experts_trainer.py --ranks 2

takes under two minutes, prints what it found and writes benchmarks/results/experts_trainer_<device>_<ranks>.json. Each
rank has one rank's share of a larger layout: `fsdp`, Qwen3-30B-A3B on 64 ranks, dense parameters under FSDP2 and
experts on a mesh of two dimensions; `replicated`, OLMoE-1B-7B on 8 ranks, experts split and plain tensors otherwise.
transformers is not needed: its two loops are written out here. Up to 5.17 it turns fused and foreach AdamW off for such
parameters; since 5.20 each mesh has a param group of its own and torch's fused AdamW.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import typer
from rich.console import Console
from timing import result_name
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tilestep
from tilestep import native
from tilestep.bench.measure import Contender, measure
from tilestep.bench.results import Group, Result, environment, print_result
from tilestep.bench.sections import free

RESULTS = Path(__file__).parent / "results"
CLIP, RATE = 1.0, 1e-4
Shapes = list[tuple[bool, tuple[int, ...]]]


def qwen() -> Shapes:
    """One rank's share of Qwen3-30B-A3B on 64 ranks: whether a parameter is of experts, and its local shape."""
    ranks, hidden, inner = 64, 2048, 768
    dense = [(4096, hidden), (512, hidden), (512, hidden), (hidden, 4096), (128, hidden)]
    layer: Shapes = [(False, (rows // ranks, columns)) for rows, columns in dense]
    layer += [(False, (size // ranks,)) for size in (128, 128, hidden, hidden)]
    layer += [(True, (128 // ranks, 2 * inner, hidden)), (True, (128 // ranks, hidden, inner))]
    return layer * 48 + [(False, (151_936 // ranks, hidden))] * 2 + [(False, (hidden // ranks,))]


def olmoe() -> Shapes:
    """One rank's share of OLMoE-1B-7B on 8 ranks that split the experts alone."""
    ranks, hidden, inner, experts = 8, 2048, 1024, 64
    layer: Shapes = [(False, (hidden, hidden))] * 4 + [(False, (hidden,))] * 4 + [(False, (experts, hidden))]
    layer += [(True, (experts // ranks, 2 * inner, hidden)), (True, (experts // ranks, hidden, inner))]
    return layer * 16 + [(False, (50_304, hidden))] * 2 + [(False, (hidden,))]


def parameters(shapes: Shapes, is_split: bool, kind: str, ranks: int) -> list[torch.nn.Parameter]:
    """Parameters with gradients: experts on a mesh of theirs, dense ones as FSDP2 has them or as plain tensors.

    Args:
        shapes: of the local parts.
        is_split: whether dense parameters are DTensors.
        kind: of the device.
        ranks: how many there are.
    """
    dense = init_device_mesh(kind, (ranks,), mesh_dim_names=("fsdp",))
    experts = init_device_mesh(kind, (1, ranks), mesh_dim_names=("efsdp", "ep"))
    # Plain tensors are alike on all ranks.
    own, common = (torch.Generator(kind).manual_seed(seed) for seed in (1 + dist.get_rank(), 0))

    def drawn(shape: tuple[int, ...], is_expert: bool) -> Tensor:
        generator = own if is_expert or is_split else common
        local = torch.empty(shape, device=kind, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
        if is_expert:
            return DTensor.from_local(local, experts, [Shard(0), Shard(0)], run_check=False)
        return DTensor.from_local(local, dense, [Shard(0)], run_check=False) if is_split else local

    made = []
    for is_expert, shape in shapes:
        param = torch.nn.Parameter(drawn(shape, is_expert))
        param.grad = drawn(shape, is_expert)
        made.append(param)
    return made


def of_meshes(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """The parameters of each mesh, plain tensors too."""
    found: dict[Any, list[Tensor]] = defaultdict(list)
    for param in params:
        found[param.device_mesh if isinstance(param, DTensor) else None].append(param)
    return [*found.values()]


class Grouped:
    """What transformers does since 5.20: a norm and a param group for each mesh, torch's fused AdamW."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.meshes = of_meshes(params)
        self.optimizer = torch.optim.AdamW([{"params": own} for own in self.meshes], lr=RATE, fused=True)

    def step(self) -> Tensor:
        norms = [torch.nn.utils.get_total_norm([p.grad for p in own if p.grad is not None]) for own in self.meshes]
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        norm = torch.linalg.vector_norm(torch.stack(whole))
        for own in self.meshes:
            torch.nn.utils.clip_grads_with_norm_(own, CLIP, norm)
        self.optimizer.step()
        return norm


class ForLoop:
    """What transformers does up to 5.17: norms, clip and AdamW tensor by tensor."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self.optimizer = torch.optim.AdamW(params, lr=RATE, fused=False, foreach=False)

    def step(self) -> Tensor:
        squares: dict[bool, Tensor] = {}
        grads = [param.grad for param in self.params if param.grad is not None]
        local = [(isinstance(g, DTensor), g.to_local() if isinstance(g, DTensor) else g) for g in grads]
        for is_split in {kind for kind, _ in local}:
            norms = [grad.norm(2) for kind, grad in local if kind is is_split]
            squares[is_split] = torch.linalg.vector_norm(torch.stack(norms)).float().square()
        if True in squares:
            dist.all_reduce(squares[True])
        norm = torch.stack([*squares.values()]).sum().sqrt()
        factor = (CLIP / (norm + 1e-6)).clamp(max=1.0)
        for _, grad in local:
            grad.mul_(factor)
        self.optimizer.step()
        return norm


class Ours:
    """One optimizer and one param group."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.optimizer = tilestep.AdamW(params, lr=RATE, max_grad_norm=CLIP)

    def step(self) -> Tensor:
        self.optimizer.step()
        return self.optimizer.grad_norm


CONTENDERS = {
    "tilestep": Ours,
    "transformers >= 5.20: fused, a group a mesh": Grouped,
    "transformers <= 5.17: tensor by tensor": ForLoop,
}


def farthest(params: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """By how much local parts differ, at most, in units of the learning rate."""
    local = ((p.to_local() if isinstance(p, DTensor) else p for p in listed) for listed in (params, others))
    pairs = zip(*local, strict=True)
    return max(float((own.detach().float() - other.detach().float()).abs().max()) / RATE for own, other in pairs)


def exact_norm(params: Sequence[Tensor]) -> float:
    """The global norm of the gradients in float64; plain tensors, which all ranks have, count once."""
    squares: dict[bool, Tensor] = {}
    for grad in (param.grad for param in params if param.grad is not None):
        is_split = isinstance(grad, DTensor)
        square = (grad.to_local() if is_split else grad).double().square().sum()
        squares[is_split] = squares.get(is_split, torch.zeros_like(square)) + square
    if True in squares:
        dist.all_reduce(squares[True])
    return float(torch.stack([*squares.values()]).sum().sqrt())


def layout(name: str, shapes: Shapes, is_split: bool, device: torch.device, rounds: int) -> tuple[Group, list[str]]:
    """One layout: all contenders from the same start, after a check that they do the same."""
    ranks, numel = dist.get_world_size(), sum(torch.Size(shape).numel() for _, shape in shapes)
    made = {key: parameters(shapes, is_split, device.type, ranks) for key in CONTENDERS}
    runs: dict[str, Any] = {key: kind(made[key]) for key, kind in CONTENDERS.items()}
    exact = exact_norm(made["tilestep"])
    errors = [abs(float(run.step().detach()) / exact - 1) for run in runs.values()]
    ours, *theirs = made.values()
    apart = max(farthest(ours, other) for other in theirs)
    parts = ", ".join(f"{key} {error:.0e}" for key, error in zip(CONTENDERS, errors, strict=True))
    note = f"{name}: relative errors of the norm, which torch returns in bfloat16: {parts}; after a step weights differ"
    note += f" by at most {apart:.2g} learning rates (neighbours in bfloat16 at 0.1 are 5 apart)"
    if errors[0] > 1e-4 or max(errors) > 0.02 or apart > 11:
        raise AssertionError(note)
    # Reads and writes of a step in bfloat16, and the norm's look at gradients.
    traffic = 16 * numel
    rows = measure([Contender(key, run.step, traffic) for key, run in runs.items()], device, rounds)
    title = f"clip and AdamW of {name}: {len(shapes)} bfloat16 parameters, {numel / 1e6:,.0f} M elements a rank"
    return Group(title, rows), [note]


def on_rank(rank: int, ranks: int, folder: str, rounds: int, small: bool, output: str) -> None:
    """What a rank does; rank 0 prints and writes."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    options: dict[str, Any] = {"device_id": device} if gpu else {}
    if gpu:
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    backend = "nccl" if gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=90), **options)
    native.wait()
    result = Result(result_name("experts_trainer", device, ranks), environment(device))
    layouts = {"Qwen3-30B-A3B, a rank of 64, FSDP2 and experts": (qwen(), True)}
    layouts["OLMoE-1B-7B, a rank of 8, experts alone"] = olmoe(), False
    for name, (shapes, is_split) in layouts.items():
        chosen = [(kind, tuple(min(side, 8) for side in shape)) for kind, shape in shapes[-25:]] if small else shapes
        group, notes = layout(name, chosen, is_split, device, rounds)
        result.groups.append(group)
        result.notes += notes
        free(device)
        ours, *theirs = group.rows
        for row in theirs:
            if ours.wall and row.wall:
                result.summary[f"{name}, {row.contender}"] = round(row.wall.median / ours.wall.median, 2)
    if rank == 0:
        print_result(Result(result.section, result.environment, result.groups, result.notes), Console(width=140))
        for key, times in result.summary.items():
            print(f"{times:6.2f} times as long as tilestep: {key}")
        if gpu and not small:
            print(f"written to {result.save(Path(output))}")
    dist.barrier()
    dist.destroy_process_group()


def main(
    ranks: Annotated[int, typer.Option(help="How many GPUs, or processes without one.")] = 1,
    rounds: Annotated[int, typer.Option(help="Figures of each contender.")] = 11,
    small: Annotated[
        bool, typer.Option(help="Few and small parameters: checks this script, measures nothing.")
    ] = False,
    output: Annotated[Path, typer.Option(help="The folder for the JSON.")] = RESULTS,
) -> None:
    """Check, measure, print, write."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
        multiprocessing.spawn(on_rank, (ranks, folder, rounds, small, str(output)), nprocs=ranks)


if __name__ == "__main__":
    typer.run(main)
