"""Ways to train: under which placement parameters lie, when updates run, and where state lives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from meshes import grid
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import tilestep
from tilestep.memory.host import HostState
from tilestep.memory.offload import move_state
from tilestep.memory.streaming import StreamedState

PLACEMENTS = ("plain", "fsdp2", "hsdp", "columns", "shard", "shard and copy")
SCHEDULES = (
    "at the step",
    "backward",
    "forward",
    "streamed",
    "streamed gradients",
    "on the host",
    "gradients on the host",
    "streamed in backward",
    "streamed in forward",
)
"""When updates run; and where state, and gradients, are kept: on a CPU they go through the same copies as on a GPU."""


def goes_together(placement: str, schedule: str) -> bool:
    """Whether a way is one; the others are refused, which test_pairs.py holds."""
    return not placement.startswith("shard") or schedule in ("at the step", "streamed")


class Weights(nn.Module):
    """Parameters whose gradients are what a forward is given."""

    def __init__(
        self, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, channels_last: bool = False
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        drawn = [on_device(torch.randn(shape, generator=generator, device="cpu").to(dtype)) for shape in shapes]
        if channels_last:
            drawn = [each.to(memory_format=torch.channels_last) if each.dim() == 4 else each for each in drawn]
        self.weights = nn.ParameterList(map(nn.Parameter, drawn))

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return sum((weight * gradient).sum() for weight, gradient in zip(self.weights, gradients))  # type: ignore[return-value]

    @property
    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [(f"w{place}", param) for place, param in enumerate(self.weights)]


def gradients_of(model: Weights, step: int, zeros: float = 0.0) -> list[torch.Tensor]:
    """Gradients of a step, whole and the same on every rank.

    Args:
        model: of which they are.
        step: another one has others.
        zeros: how many of the elements are zero.
    """
    generator = torch.Generator().manual_seed(100 + step)
    drawn = [torch.randn(param.shape, generator=generator, device="cpu") for param in model.weights]
    for each in drawn:
        each[torch.rand(each.shape, generator=generator, device="cpu") < zeros] = 0
    return [on_device(each.to(param.dtype)) for each, param in zip(drawn, model.weights)]


def backward(model: Weights, gradients: list[torch.Tensor], scaler: Any = None) -> None:
    """A backward of a model wherever it lies; every rank has the same batch."""
    first: Any = model.weights[0]
    if isinstance(first, DTensor) and not isinstance(model, torch.distributed.fsdp.FSDPModule):
        pairs: Any = zip(gradients, model.weights)
        gradients = [distribute_tensor(each, param.device_mesh, param.placements) for each, param in pairs]
    loss = model(gradients)
    (loss if scaler is None else scaler.scale(loss)).backward()


def whole(param: Any) -> torch.Tensor:
    """A parameter's values, all of them, as a copy."""
    value = param.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def device_type() -> str:
    """Where the ranks of this run have their tensors: on a GPU if there is one for each."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device_type())


def placed(model: Weights, placement: str) -> Weights:
    """Put parameters where a placement has them; `attached` does so for those of `shard`."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if placement == "fsdp2":
        fully_shard(model)
    elif placement == "hsdp":
        fully_shard(model, mesh=grid(device_type(), (2, ranks // 2), ("copy", "part")))
    elif placement == "columns":
        from torch.distributed.tensor import Shard

        mesh = init_device_mesh(device_type(), (ranks,))
        parts = [distribute_tensor(each.detach(), mesh, [Shard(each.dim() - 1)]) for each in model.weights]
        model.weights = nn.ParameterList(map(nn.Parameter, parts))
    return model


def attached(
    optimizer: Any, model: nn.Module, placement: str, schedule: str, bucket_cap_mb: float = 0.01, **options: Any
) -> Any:
    """Attach to an optimizer what a way asks for.

    Args:
        optimizer: of the model's parameters.
        model: placed already.
        placement: one of `PLACEMENTS`.
        schedule: one of `SCHEDULES`.
        bucket_cap_mb: of buckets, and a tenth of it of chunks: several even of small models.
        options: for `overlap`.
    """
    if placement.startswith("shard"):
        mesh = None
        if placement == "shard and copy":
            mesh = grid(device_type(), (2, dist.get_world_size() // 2), ("replicate", "shard"))
        tilestep.shard(optimizer, model, mesh, bucket_cap_mb=bucket_cap_mb)
    device, chunk_bytes, keeps = next(model.parameters()).device, round(bucket_cap_mb * 2**20 / 10), "grad" in schedule
    if schedule.startswith("streamed"):
        move_state(optimizer, StreamedState(device, chunk_bytes, 2, keeps), "gpu", "for a test")
    elif schedule.endswith("on the host"):
        move_state(optimizer, HostState(device, chunk_bytes, keeps), "cpu", "for a test")
    during: Any = schedule.removeprefix("streamed in ")
    if during in ("backward", "forward"):
        tilestep.overlap(optimizer, model, during=during, bucket_cap_mb=bucket_cap_mb, **options)
    return optimizer
