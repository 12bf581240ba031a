"""Layers that cast to fp8 for their products, as docs/guide/setups.md says of them: torchao's, on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import tilestep

float8 = pytest.importorskip("torchao.float8")


def model(recipe: str, dtype: torch.dtype = torch.float32, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).to(dtype)
    # A CPU multiplies no fp8 numbers: emulated layers cast, and multiply what the casts have left.
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True, **options)
    return float8.convert_to_float8_training(made, config=config)


def losses(trained: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for step in range(6):
        optimizer.zero_grad()
        dtype = next(trained.parameters()).dtype
        inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = (trained(inputs) - inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_nothing_changes_for_the_optimizer(recipe: str, dtype: torch.dtype) -> None:
    own, torchs, plain = (model(recipe, dtype) for _ in range(3))
    assert type(own[0]).__name__ == "Float8Linear"  # type: ignore[index]
    assert {(type(param.data), param.dtype) for param in own.parameters()} == {(torch.Tensor, dtype)}
    wanted = losses(torchs, torch.optim.AdamW(torchs.parameters(), lr=1e-2))
    # A weight on the other side of a border of fp8 changes the loss by more than both optimizers differ.
    assert losses(own, tilestep.AdamW(own.parameters(), lr=1e-2)) == pytest.approx(wanted, rel=1e-2)
    assert losses(plain, torch.optim.SGD(plain.parameters(), lr=0.0)) != pytest.approx(wanted, rel=1e-2)


@pytest.fixture
def mesh() -> Iterator[dist.DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fp8_all_gathers_of_fsdp2_keep_another_kind_of_parameter(mesh: dist.DeviceMesh) -> None:
    """Without them FSDP2's parameters are DTensors as ever; with them they are refused by name, and nothing changes."""
    for gathers_fp8 in (False, True):
        sharded = model("tensorwise", enable_fsdp_float8_all_gather=gathers_fp8)
        for layer in sharded:
            fully_shard(layer, mesh=mesh)
        if gathers_fp8:
            with pytest.raises(tilestep.GradientError, match="is a DTensor of WeightWithDynamicFloat8CastTensor"):
                tilestep.AdamW(sharded.parameters())
        else:
            found = losses(sharded, tilestep.AdamW(sharded.parameters(), lr=1e-2))
            alone = model("tensorwise")
            assert found == pytest.approx(losses(alone, tilestep.AdamW(alone.parameters(), lr=1e-2)), rel=1e-4)
