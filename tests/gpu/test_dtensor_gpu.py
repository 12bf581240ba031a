"""DTensors on GPUs over NCCL: the checks of tests/placement, and what only a GPU can show.

python -m pytest tests/gpu/test_dtensor_gpu.py
"""

from __future__ import annotations

from typing import Any

import pytest
import test_dtensor_checkpoints as checkpoints
import test_dtensor_compat as compat
import test_dtensor_decisions as decisions
import test_dtensor_matrices as matrices
import test_dtensor_slices as slices
import test_dtensor_steps as steps
import test_muon_layouts as layouts
import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_models import LAYOUTS, assert_equal_on_ranks, backward, batch, full
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tilestep
from tilestep.kernels.spec import NORM
from tilestep.placement import matrices as exchanges
from tilestep.runtime import batches

pytestmark = pytest.mark.two_gpus


def steps_without_waiting() -> None:
    """The host never waits for the GPU, whatever decides the step: clip, skip, scaler, sums over sharded tensors."""
    for name in ("AdamW", "LAMB", "Adafactor"):
        for layout in LAYOUTS:
            net = LAYOUTS[layout][0]()
            optimizer = getattr(tilestep, name)(net.parameters(), lr=1e-3, max_grad_norm=1.0)
            scaler = tilestep.GradScaler("cuda", init_scale=2.0)
            for step in range(4):
                scaler.scale(net(batch(step, layout)).square().mean()).backward()
                if step > 1:
                    torch.cuda.set_sync_debug_mode("error")
                scaler.step(optimizer)
                scaler.update()
                torch.cuda.set_sync_debug_mode("default")
                optimizer.zero_grad()
            assert_equal_on_ranks(optimizer._current_plan().engines[0].control.numbers[NORM])


def matrices_travel_without_waiting() -> None:
    """Nor where matrices travel to their owners and back."""
    for layout in ("fsdp", "mixed", "tensor_parallel"):
        net = LAYOUTS[layout][0]()
        inside = [param for param in net.parameters() if param.dim() == 2]
        optimizer = tilestep.Muon(inside, lr=1e-2, max_grad_norm=1.0)
        for step in range(4):
            backward(net, batch(step, layout))
            if step > 1:
                torch.cuda.set_sync_debug_mode("error")
            optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
            net.zero_grad()
        for param in inside:
            assert_equal_on_ranks(full(param))


def work_on_buckets_is_recorded() -> None:
    """Recordings of the work on each bucket are the work, and the host waits for nothing between two of them."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    shapes = [(256, 128), (128, 256), (192, 192), (64, 320)] * 3
    for placement in (Shard(0), Shard(1)):
        results = []
        for least in (1, 10**9):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(batches, "LEAST_MATRICES", least)
                patch.setattr(exchanges, "OWNED_IN_A_BUCKET", 2 * 256 * 128)
                params = [
                    torch.nn.Parameter(distribute_tensor(_drawn(shape, at), mesh, [placement]))
                    for at, shape in enumerate(shapes)
                ]
                optimizer = tilestep.Muon(params, lr=0.02)
                for step in range(6):
                    for at, param in enumerate(params):
                        gradient = distribute_tensor(_drawn(param.shape, 100 * step + at), mesh, [placement])
                        param.grad = None if (step, at) == (4, 3) else gradient
                    if step == 3:
                        torch.cuda.set_sync_debug_mode("error")
                    optimizer.step()
                    torch.cuda.set_sync_debug_mode("default")
            engine = optimizer._current_plan().engines[0]
            shared = [passes.matrices.shared for passes in engine.passes]
            recorded = [each.is_recorded for own in shared for each in own._recorded.values()]
            assert (len(recorded) >= 2 and all(recorded)) if least == 1 else not recorded
            results.append([full(param).detach().clone() for param in params])
        assert all(map(torch.equal, *results))


def _drawn(shape: Any, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def keeps_ranks_together() -> None:
    """After a hundred clipped steps, what ranks hold in common has the same bits on each."""
    for layout in ("hsdp", "mixed", "tensor_parallel"):
        net = LAYOUTS[layout][0]()
        optimizer = tilestep.AdamW(net.parameters(), lr=1e-2, max_grad_norm=0.05, skip_above=1e4)
        for step in range(100):
            backward(net, batch(step, layout))
            optimizer.step()
            optimizer.zero_grad()
        for param in net.parameters():
            assert_equal_on_ranks(full(param))


def clips_without_waiting() -> None:
    net = LAYOUTS["mixed"][0]()
    for step in range(4):
        backward(net, batch(step, "mixed"))
        dist.barrier()
        torch.cuda.synchronize()
        if step > 1:
            torch.cuda.set_sync_debug_mode("error")
        tilestep.clip_grad_norm_(net.parameters(), 0.05)
        torch.cuda.set_sync_debug_mode("default")
        net.zero_grad()


def loads_what_it_saves() -> None:
    """In one check, as each set of ranks runs some of the checks alone."""
    checkpoints.saves_for_another_number_of_ranks()
    checkpoints.loads_on_another_number_of_ranks()


def loads_remainders_that_it_saves() -> None:
    checkpoints.saves_remainders()
    checkpoints.loads_remainders_on_another_number_of_ranks()


OWN = (
    steps_without_waiting,
    matrices_travel_without_waiting,
    work_on_buckets_is_recorded,
    keeps_ranks_together,
    clips_without_waiting,
    loads_what_it_saves,
    loads_remainders_that_it_saves,
)
CHECKS = {
    **steps.CHECKS,
    **{name: check for name, check in decisions.CHECKS.items() if name != "agrees_over_meshes"},
    **slices.CHECKS,
    **matrices.CHECKS,
    "each_layout_has_one_update": layouts.each_layout_has_one_update,
    "each_addition_has_one_update": layouts.each_addition_has_one_update,
    **{name: check for name, check in checkpoints.ON_FOUR.items() if not name.startswith("saves_")},
    "dtensors_have_what_we_know": compat.dtensors_have_what_we_know,
    "meshes_have_what_we_know": compat.meshes_have_what_we_know,
    **{check.__name__: check for check in OWN},
}

test_on_two_gpus = each_passes(CHECKS, 2, backend="nccl")
