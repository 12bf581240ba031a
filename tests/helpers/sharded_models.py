"""Small models, distributed in every way, beside the same model in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from meshes import grid
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH = 8


class Block(nn.Module):
    """Two matrices, a norm and a scale that no wrapper touches; 5 and 1 rows do not divide by 4 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks between two odd layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.odd = nn.Linear(WIDTH, 5)
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(torch.tanh(self.odd(x)))


def model() -> Model:
    """The same model on every rank and at every call."""
    torch.manual_seed(0)
    return Model()


def device() -> str:
    """The device type of the process group's tensors."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def plain() -> Model:
    """The model in one process."""
    return model().to(device())


def fsdp() -> Model:
    """Sharded over all ranks, a group for each block."""
    made = plain()
    for block in made.blocks:
        fully_shard(block)
    return fully_shard(made)


def hsdp() -> Model:
    """Sharded over two ranks, replicated over the others."""
    mesh = grid(device(), (dist.get_world_size() // 2, 2), ("replicate", "shard"))
    made = plain()
    for block in made.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(made, mesh=mesh)


def tensor_parallel() -> Model:
    """The blocks' matrices over all ranks; everything else plain tensors."""
    mesh = grid(device(), (dist.get_world_size(),), ("tp",))
    made = plain()
    for block in made.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return made


def mixed() -> Model:
    """Tensor-parallel over two ranks, the rest over FSDP: two meshes."""
    mesh = grid(device(), (dist.get_world_size() // 2, 2), ("dp", "tp"))
    made = plain()
    for block in made.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(made, mesh=mesh["dp"])


LAYOUTS: dict[str, tuple[Callable[[], Model], Callable[[], int]]] = {
    "fsdp": (fsdp, dist.get_world_size),
    "hsdp": (hsdp, dist.get_world_size),
    "tensor_parallel": (tensor_parallel, lambda: 1),
    "mixed": (mixed, lambda: dist.get_world_size() // 2),
}
"""How to make each model, and over how many ranks its batches are split."""


def batch(step: int, layout: str | None = None) -> torch.Tensor:
    """The batch of a step: all of it, or a rank's part."""
    generator = torch.Generator().manual_seed(1000 + step)
    whole = torch.randn(8, 5, generator=generator).to(device())
    if layout is None:
        return whole
    parts = LAYOUTS[layout][1]()
    return whole.chunk(parts)[dist.get_rank() * parts // dist.get_world_size()]


def backward(net: nn.Module, x: torch.Tensor, factor: float = 1.0) -> None:
    """Gradients of a loss that is a mean over the batch, so that ranks' gradients average."""
    (net(x).square().mean() * factor).backward()


def full(tensor: Any) -> torch.Tensor:
    """All of a DTensor, or a plain tensor itself."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed(whole: torch.Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    """A DTensor of what every rank has already: nothing is sent."""
    return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)


def here(tensor: Any, whole: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a DTensor, and the same part of a whole tensor, or of another that lies alike.

    All ranks' parts are everything, and nothing is sent to compare them.
    """
    tensor, whole = tensor.detach(), whole.detach()
    if not isinstance(tensor, DTensor):
        return tensor, whole
    if isinstance(whole, DTensor):
        assert tensor.placements == whole.placements
        return tensor.to_local(), whole.to_local()
    if any(type(placement) not in (Shard, Replicate) for placement in tensor.placements):
        return tensor.full_tensor(), whole  # what is cut in strides
    return tensor.to_local(), _part(whole, tensor.device_mesh, tensor.placements)


def _part(whole: torch.Tensor, mesh: DeviceMesh, placements: Any) -> torch.Tensor:
    """This rank's part of a tensor that each rank has; a DTensor made for it would cost ten times as much."""
    for place, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts, rank = whole.chunk(mesh.size(place), placement.dim), mesh.get_local_rank(place)
            whole = parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)
    return whole


def assert_same(net: nn.Module, reference: nn.Module, **tolerance: Any) -> None:
    """The parameters of both models are the same."""
    for (name, param), (_, wanted) in zip(net.named_parameters(), reference.named_parameters()):
        torch.testing.assert_close(*here(param, wanted), msg=lambda text, n=name: f"{n}: {text}", **tolerance)


def assert_equal_on_ranks(value: torch.Tensor) -> None:
    """A tensor has the same bits on every rank."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value.detach().cpu())
    assert all(torch.equal(other, everywhere[0]) for other in everywhere), everywhere
