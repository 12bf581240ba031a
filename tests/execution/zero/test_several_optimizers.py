"""Several sharded optimizers whose parameters one backward reaches: ranks may use them in other orders."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_twins import TINY, TOLERANCES, Branches, inputs, sgd
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tilestep


def halves(model: Any) -> list[list[Any]]:
    return [[param for branch in model.branches[start::2] for param in branch.parameters()] for start in range(2)]


def train(make: Callable[[int, Any, list[Any]], Any]) -> None:
    """Two optimizers of half of the branches each, beside two in one process.

    Args:
        make: the sharded optimizer of a half, by its number, the model and the parameters.
    """
    model: Any = Branches()
    twin = copy.deepcopy(model)
    optimizers = [make(number, model, params) for number, params in enumerate(halves(model))]
    references = [sgd(params) for params in halves(twin)]
    for step in range(6):
        data = inputs(3, 4)
        chosen = [0, 1, 2, 3, 4, 5] if (dist.get_rank() + step) % 2 else [[5, 3, 2, 0, 1, 4], [1, 3, 0]][step % 2]
        for net in (model, twin):
            net(data, chosen).backward()
        for param in twin.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())
        for optimizer in (*optimizers, *references):
            optimizer.step()
            optimizer.zero_grad()
        for optimizer in optimizers:
            optimizer.wait()
        for (name, param), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
            message = f"step {step}: {name}"
            torch.testing.assert_close(param, wanted, msg=message, **(TOLERANCES or {"rtol": 0.0, "atol": 0.0}))


def two_of_one_model() -> None:
    train(lambda _, model, params: tilestep.shard(sgd(params), model, bucket_cap_mb=TINY))
    mesh = init_device_mesh(torch.get_default_device().type, (1, 2), mesh_dim_names=("shard", "replicate"))
    train(lambda _, model, params: tilestep.shard(sgd(params), model, mesh, bucket_cap_mb=TINY))


def two_of_separate_modules_with_groups_of_their_own() -> None:
    def make(number: int, model: Any, params: list[Any]) -> Any:
        part = nn.ModuleList(model.branches[number::2])
        mesh = DeviceMesh.from_group(dist.new_group(), torch.get_default_device().type)
        return tilestep.shard(sgd(params), part, mesh, bucket_cap_mb=TINY)

    train(make)


def in_other_orders() -> None:
    """Ranks that stepped them in other orders waited for each other until a timeout, which named none of them."""
    rank = dist.get_rank()
    mesh = init_device_mesh(torch.get_default_device().type, (1, 2), mesh_dim_names=("shard", "replicate"))
    # The host of a GPU waits for the first digest alone.
    on_cpu = torch.get_default_device().type == "cpu"
    for own_mesh, before, clip in itertools.product((None, mesh), (0, 1) if on_cpu else (0,), (None, 1.0)):
        model: Any = Branches()
        optimizers = [
            tilestep.shard(
                tilestep.SGD(params, lr=0.1, max_grad_norm=clip),  # type: ignore[attr-defined]
                model,
                own_mesh,
                bucket_cap_mb=TINY,
            )
            for params in halves(model)
        ]
        for step in range(before + 1):
            model(inputs(3, 4), [0, 1, 2, 3, 4, 5]).backward()
            for optimizer in optimizers if step < before else ():
                optimizer.step()
        said = (
            r"rank 0 has .* of branches\.0\.weight \(.*same order\); rank 1 has .* of branches\.1\.weight .*nothing was"
        )
        for optimizer in optimizers:
            optimizer.wait()
        old = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(ValueError, match=said):
            optimizers[rank].step()
        assert all(map(torch.equal, model.parameters(), old))
        # In one order they go on from there.
        for optimizer in optimizers:
            optimizer.step()
            optimizer.wait()
        assert not any(map(torch.equal, model.parameters(), old))


def of_two_models_in_other_orders() -> None:
    """Optimizers of the same group of ranks, with the same numbers of parameters and with others."""
    rank = dist.get_rank()
    for sizes in ((2, 2), (1, 3)):
        models = [nn.Sequential(*(nn.Linear(3, 3) for _ in range(size))) for size in sizes]
        optimizers = [tilestep.shard(sgd(model.parameters()), model, bucket_cap_mb=TINY) for model in models]
        for model in models:
            model(inputs(2, 3)).sum().backward()
        with pytest.raises(ValueError, match=r"optimizer \d+, of 0\.weight .* optimizer \d+, of 0\.weight"):
            optimizers[rank].step()


CHECKS = [
    two_of_one_model,
    two_of_separate_modules_with_groups_of_their_own,
    in_other_orders,
    of_two_models_in_other_orders,
]


test_two_ranks = each_passes(CHECKS, 2)
