"""Checks of stochastic rounding on two ranks: each has the same batch, so a plain twin trains to the same bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tilestep


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(130, 91), nn.Tanh(), nn.Linear(91, 64, bias=False))
    return net.to(torch.bfloat16)


def make(net: nn.Module, **options: Any) -> Any:
    options = {"lr": 1e-3, "rounding": "stochastic", **options}
    return tilestep.AdamW(net.named_parameters(), **options)


def train(net: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        batch = torch.randn(8, 130, generator=torch.Generator().manual_seed(step)).bfloat16()
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Any) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def columns_and_rows() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for shape, dim in (((41, 130), 0), ((41, 131), 1), ((6, 7, 8), 1), ((6, 7, 8), 2), ((40, 512), 1)):
        plain = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        param = nn.Parameter(distribute_tensor(plain.clone(), mesh, [Shard(dim)]))
        first, second = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
        other = nn.Parameter(plain.clone())
        format = "int8" if shape[-1] == 512 else None
        options: dict[str, Any] = {"rounding": "stochastic", "state_dtype": format}
        optimizer = tilestep.AdamW([("first", first), ("weight", param)], **options)
        wanted = tilestep.AdamW([("first", second), ("weight", other)], **options)
        for step in range(3):
            grad = torch.randn(shape, generator=torch.Generator().manual_seed(step)).bfloat16()
            param.grad, other.grad = distribute_tensor(grad.clone(), mesh, [Shard(dim)]), grad
            optimizer.step()
            wanted.step()
        assert torch.equal(whole(param), other.detach()), (shape, dim)
        for name, value in wanted.state[other].items():
            mine = optimizer.state[param][name]
            kind = torch.uint8 if value.dtype.itemsize == 1 else value.dtype
            assert torch.equal(whole(mine.detach().view(kind)), value.view(kind)), (shape, dim, name)


CHECKS = [columns_and_rows]
