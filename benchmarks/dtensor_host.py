"""Measure what clip and AdamW cost the host over many DTensors, on one rank, beside torch's.

    python benchmarks/dtensor_host.py

takes a minute on a GPU, prints what it found and writes it to benchmarks/results/. The parameters are FSDP2's, and each
step has the gradients of a backward of its own.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from timing import result_name
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tilestep
from tilestep import native
from tilestep.bench.measure import Contender, measure
from tilestep.bench.results import Group, Result, environment

RESULTS = Path(__file__).parent / "results"
CLIP = 1.0
HOST_LIMIT_MS = 1.5


class Many(torch.nn.Module):
    """Parameters that each get a gradient.

    Args:
        count: how many.
        elements: elements of each.
    """

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        self.params = torch.nn.ParameterList([torch.randn(elements) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(param.mean() for param in self.params)


def sharded(count: int, elements: int, mesh: dist.DeviceMesh) -> torch.nn.Module:
    """A model under FSDP2, a group for each hundred parameters."""
    sizes = [len(part) for part in torch.arange(count).split(100)]
    model = torch.nn.Sequential(*(Many(size, elements) for size in sizes)).to(mesh.device_type, torch.bfloat16)
    for part in model:
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def contenders(count: int, elements: int, mesh: dist.DeviceMesh) -> list[Contender]:
    """What to compare; backward runs before each call, outside the figures."""
    mine, theirs, functions = (sharded(count, elements, mesh) for _ in range(3))
    x = torch.zeros(1, device=mesh.device_type, dtype=torch.bfloat16)
    traffic = count * elements * 16
    ours = tilestep.AdamW(mine.parameters(), lr=1e-4, max_grad_norm=CLIP)
    fused = torch.optim.AdamW(theirs.parameters(), lr=1e-4, fused=True)
    params = [*theirs.parameters()]
    alone = [*functions.parameters()]

    def backward(model: torch.nn.Module) -> None:
        model.zero_grad()
        model(x).backward()

    def torch_step() -> None:
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        fused.step()

    return [
        Contender("tilestep", ours.step, traffic, lambda: backward(mine)),
        Contender("torch fused", torch_step, traffic, lambda: backward(theirs)),
        Contender(
            "tilestep.clip_grad_norm_ alone",
            lambda: tilestep.clip_grad_norm_(alone, CLIP),
            prepare=lambda: backward(functions),
        ),
    ]


def main(
    count: Annotated[int, typer.Option(help="How many DTensors.")] = 2000,
    elements: Annotated[int, typer.Option(help="Elements of each.")] = 65_536,
    rounds: Annotated[int, typer.Option(help="Timed steps of each contender.")] = 30,
    limit: Annotated[float, typer.Option(help="Seconds after which no round begins.")] = 90,
    output: Annotated[Path, typer.Option(help="The folder for the JSON.")] = RESULTS,
) -> None:
    """Measure, print, write."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
        mesh = init_device_mesh(device.type, (1,))
        compared = contenders(count, elements, mesh)
        # The look before a step is compiled beside the first ones: a training has it after seconds.
        has_look = native.wait()
        timings = measure(compared, device, rounds, until=time.monotonic() + limit)
        dist.destroy_process_group()
    gpu = device.type == "cuda"
    group = Group(f"clip and AdamW, {count} DTensors of {elements} bf16 elements", [])
    group.rows = timings
    result = Result(result_name("dtensor_host", device), environment(device), [group])
    if not has_look:
        result.notes.append("without the compiled look at tensors before a step: no C++ compiler, or TILESTEP_NATIVE=0")
    ours, theirs = timings[0].host, timings[1].host
    if ours is not None and theirs is not None:
        result.summary = {"host_ms": ours.median, "torch_host_ms": theirs.median, "limit_ms": HOST_LIMIT_MS}
    print(json.dumps({row.contender: [row.host, row.wall, row.failure] for row in group.rows}, default=str, indent=1))
    print(json.dumps(result.summary))
    if gpu:
        print(f"written to {result.save(output)}")
    if gpu and (ours is None or ours.median > HOST_LIMIT_MS):
        raise SystemExit(f"the step takes the host more than {HOST_LIMIT_MS} ms")


if __name__ == "__main__":
    typer.run(main)
