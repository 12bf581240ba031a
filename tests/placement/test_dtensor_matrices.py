"""Rules on whole matrices of which each rank has a part: to the bit what one process does with the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_models import LAYOUTS, device, here, placed, plain
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tilestep
from tilestep.placement.matrices import MatrixExchange

SHAPES = [(12, 8), (8, 12), (8, 8), (5, 8), (1, 6), (32, 8), (8, 8), (6, 3)]
"""With parts of no rows, and one whose part has the shape of a matrix beside it."""


def _meshes() -> dict[str, tuple[DeviceMesh, list[Any]]]:
    flat = init_device_mesh(device(), (dist.get_world_size(),), mesh_dim_names=("shard",))
    grid = init_device_mesh(device(), (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    return {
        "rows": (flat, [Shard(0)]),
        "columns": (flat, [Shard(1)]),
        "replicated rows": (grid, [Replicate(), Shard(0)]),
        "rows and columns": (grid, [Shard(0), Shard(1)]),
        "columns and rows": (grid, [Shard(1), Shard(0)]),
        "rows twice": (grid, [Shard(0), Shard(0)]),
        "whole": (flat, [Replicate()]),
    }


def _drawn(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device(), dtype) for shape in SHAPES]


def _pair(mesh: DeviceMesh, placements: Any, make: Any, dtype: torch.dtype) -> tuple[list[Any], Any, list[Any], Any]:
    wholes = _drawn(0, dtype)
    mine = [torch.nn.Parameter(placed(whole, mesh, placements)) for whole in wholes]
    others = [torch.nn.Parameter(whole.clone()) for whole in wholes]
    return mine, make(mine), others, make(others)


def _step(step: int, params: list[Any], others: list[Any], *optimizers: Any, without: Sequence[int] = ()) -> None:
    for place, (param, other, grad) in enumerate(zip(params, others, _drawn(step, others[0].dtype))):
        other.grad = None if place in without else grad
        param.grad = None if place in without else placed(grad, param.device_mesh, param.placements)
    for optimizer in optimizers:
        optimizer.step()


def _same(params: list[Any], others: list[Any], **tolerance: Any) -> None:
    for place, (param, other) in enumerate(zip(params, others)):
        if tolerance or device() == "cuda":  # a GPU's library takes other kernels for batches of other sizes
            tolerance = tolerance or {"atol": 2e-2, "rtol": 2e-2}
            torch.testing.assert_close(*here(param, other), **tolerance)
        else:
            assert torch.equal(*here(param, other)), place


def muon_is_that_of_one_process() -> None:
    for name, (mesh, placements) in _meshes().items():
        for dtype in (torch.float32, torch.bfloat16):

            def make(params: Any, dtype: torch.dtype = dtype) -> Any:
                return tilestep.Muon(params, lr=0.02, master_weights=dtype is torch.bfloat16)

            mine, optimizer, others, expected = _pair(mesh, placements, make, dtype)
            for step in range(1, 4):
                _step(step, mine, others, optimizer, expected)
                _same(mine, others)
            for param, other in zip(mine, others):
                buffer = optimizer.state[param]["momentum_buffer"]
                assert torch.equal(*here(buffer, expected.state[other]["momentum_buffer"])), name


def soap_is_that_of_one_process() -> None:
    """In float64, through its first step, steps that turn its bases, a skipped one and one without some gradients."""
    meshes = _meshes()
    limits = {name: 8 if name in ("rows", "columns and rows") else 10_000 for name in meshes}
    for name, (mesh, placements) in meshes.items():

        def make(params: Any, limit: int = limits[name]) -> Any:
            given = {"precondition_frequency": 3, "max_precond_dim": limit}  # of whole matrices, not of parts
            return tilestep.SOAP(params, lr=0.01, normalize_grads=True, skip_nonfinite=True, **given)

        mine, optimizer, others, expected = _pair(mesh, placements, make, torch.float64)
        for step in range(1, 9):
            if step == 5:
                for param, other, grad in zip(mine, others, _drawn(step, torch.float64)):
                    other.grad = grad.fill_(torch.nan)
                    param.grad = placed(grad, mesh, placements)
                optimizer.step()
                expected.step()
            else:
                # All of their shapes, or one of two.
                without = {4: (0, 2, 6), 6: (3, 6)}.get(step, ())
                _step(step, mine, others, optimizer, expected, without=without)
            _same(mine, others, atol=1e-9, rtol=1e-8)
        for param, other in zip(mine, others):
            assert optimizer.state[param].keys() == expected.state[other].keys()
            assert ("gram_left" in optimizer.state[param]) == (other.size(0) <= limits[name])
            for key in {"gram_left", "gram_right", "exp_avg_sq"} & expected.state[other].keys():
                both = here(optimizer.state[param][key], expected.state[other][key])
                torch.testing.assert_close(*both, atol=1e-8, rtol=1e-7)


def checkpoints_go_round() -> None:
    """Into the same layout, from one process, and into one process."""
    for mesh, placements in _meshes().values():
        for name, given in (("SOAP", {"precondition_frequency": 2}), ("Muon", {})):

            def make(params: Any, name: str = name, given: dict[str, Any] = given) -> Any:
                return getattr(tilestep, name)(params, lr=0.01, **given)

            mine, optimizer, others, expected = _pair(mesh, placements, make, torch.float64)
            for step in range(1, 4):
                _step(step, mine, others, optimizer, expected)
            saved, plain = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(expected.state_dict())
            for state_dict in (saved, plain):
                loaded = make(mine)
                loaded.load_state_dict(copy.deepcopy(state_dict))
                for param in mine:
                    for key, value in optimizer.state[param].items():
                        close = {"atol": 1e-8, "rtol": 1e-7} if state_dict is plain else {"atol": 0, "rtol": 0}
                        torch.testing.assert_close(*here(loaded.state[param][key], value), **close)
            _step(4, mine, others, loaded, expected)
            _same(mine, others, atol=1e-8, rtol=1e-7)


def beside_other_rules() -> None:
    """Groups of one optimizer: matrices to Muon, the rest to AdamW, and one clip over all."""
    mesh, placements = _meshes()["rows"]

    def make(params: Any) -> Any:
        groups = [{"params": params[:5]}, {"params": params[5:], "rule": "AdamW", "lr": 1e-3}]
        return tilestep.Optimizer(groups, "Muon", lr=0.02, max_grad_norm=0.5)

    mine, optimizer, others, expected = _pair(mesh, placements, make, torch.float32)
    for step in range(1, 4):
        _step(step, mine, others, optimizer, expected)
        # The norm's partial sums are others; what they change is rounded to bfloat16 in Muon.
        _same(mine[:5], others[:5], atol=1e-3, rtol=1e-2)
        _same(mine[5:], others[5:], atol=1e-6, rtol=1e-5)


def work_is_divided() -> None:
    """Every matrix has one owner, the same on all ranks, and the largest are with different ones."""
    mesh, _ = _meshes()["rows"]
    exchange = MatrixExchange(mesh, [0], everywhere=False)
    places = [
        exchange.add("a matrix", distribute_tensor(torch.zeros(8 * (place % 4 + 1), 16), mesh, [Shard(0)]))
        for place in range(8)
    ]
    owned: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(owned, [place for place in places if exchange.owns(place)])
    assert sorted(place for places_of_rank in owned for place in places_of_rank) == places
    assert all(sum(place % 4 == 3 for place in places_of_rank) <= 1 for places_of_rank in owned) and all(owned)


def two_messages_for_each_pass() -> None:
    mesh, placements = _meshes()["rows"]
    mine, optimizer, others, expected = _pair(mesh, placements, lambda params: tilestep.Muon(params), torch.float32)
    _step(1, mine, others, optimizer, expected)
    with torch.profiler.profile() as profiler:
        optimizer.step()
    counts = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("c10d::")}
    assert counts == {"c10d::alltoall_base_": 2}


def tensor_parallel_and_sharded() -> None:
    """What tensor parallelism has cut, FSDP cuts again, along the same dimension too."""
    for layout in ("mixed", "fsdp", "tensor_parallel"):
        net, reference = LAYOUTS[layout][0](), plain()
        for name in ("Muon", "SOAP"):
            given = {"lr": 0.02} if name == "Muon" else {"lr": 0.01, "precondition_frequency": 2}
            mine, others = ([param for param in model.parameters() if param.dim() == 2] for model in (net, reference))
            optimizer, expected = getattr(tilestep, name)(mine, **given), getattr(tilestep, name)(others, **given)
            for step in range(4):
                torch.manual_seed(step)
                for param, other in zip(mine, others):
                    other.grad = torch.randn(other.shape).to(other)
                    param.grad = other.grad
                    if isinstance(param, DTensor):
                        whole = DTensor.from_local(other.grad, param.device_mesh, run_check=False)
                        param.grad = whole.redistribute(placements=param.placements)
                optimizer.step()
                expected.step()
                _same(mine, others, atol=1e-3, rtol=1e-3)


CHECKS = {
    check.__name__: check
    for check in (
        muon_is_that_of_one_process,
        soap_is_that_of_one_process,
        checkpoints_go_round,
        beside_other_rules,
        work_is_divided,
        two_messages_for_each_pass,
        tensor_parallel_and_sharded,
    )
}


test_matrices_on_four_ranks = each_passes(CHECKS, 4)
