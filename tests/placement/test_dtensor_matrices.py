"""Rules on whole matrices of which each rank has a part: to the bit what one process does with the same gradients."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

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


@functools.cache
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


class Trained(NamedTuple):
    params: list[Any]
    optimizer: Any


def _alone(make: Any, dtype: torch.dtype) -> Trained:
    params = [torch.nn.Parameter(whole) for whole in _drawn(0, dtype)]
    return Trained(params, make(params))


def _placed(mesh: DeviceMesh, placements: Any, make: Any, dtype: torch.dtype) -> Trained:
    params = [torch.nn.Parameter(placed(whole, mesh, placements)) for whole in _drawn(0, dtype)]
    return Trained(params, make(params))


def _step(step: int, *models: Trained, without: Sequence[int] = (), factor: float = 1.0) -> None:
    """A step of several models, wherever they lie, with the same gradients."""
    for params, optimizer in models:
        for place, (param, grad) in enumerate(zip(params, _drawn(step, params[0].dtype))):
            grad.mul_(factor)
            grad = placed(grad, param.device_mesh, param.placements) if isinstance(param, DTensor) else grad
            param.grad = None if place in without else grad
        optimizer.step()


def _same(params: list[Any], others: list[Any], **tolerance: Any) -> None:
    for place, (param, other) in enumerate(zip(params, others)):
        if tolerance or device() == "cuda":  # a GPU's library takes other kernels for batches of other sizes
            tolerance = tolerance or {"atol": 2e-2, "rtol": 2e-2}
            torch.testing.assert_close(*here(param, other), **tolerance)
        else:
            assert torch.equal(*here(param, other)), place


def muon_is_that_of_one_process() -> None:
    for dtype in (torch.float32, torch.bfloat16):

        def make(params: Any, dtype: torch.dtype = dtype) -> Any:
            return tilestep.Muon(params, lr=0.02, master_weights=dtype is torch.bfloat16)

        alone, models = _alone(make, dtype), {name: _placed(*lie, make, dtype) for name, lie in _meshes().items()}
        for step in range(1, 4):
            _step(step, alone, *models.values())
            for model in models.values():
                _same(model.params, alone.params)
        for name, (params, optimizer) in models.items():
            for param, other in zip(params, alone.params):
                buffer = optimizer.state[param]["momentum_buffer"]
                assert torch.equal(*here(buffer, alone.optimizer.state[other]["momentum_buffer"])), name


def soap_is_that_of_one_process() -> None:
    """In float64, through its first step, steps that turn its bases, a skipped one and one without some gradients."""
    meshes = _meshes()
    small = ("rows", "columns and rows")
    for limit, names in ((8, small), (10_000, [name for name in meshes if name not in small])):

        def make(params: Any, limit: int = limit) -> Any:
            given = {"precondition_frequency": 3, "max_precond_dim": limit}  # of whole matrices, not of parts
            return tilestep.SOAP(params, lr=0.01, normalize_grads=True, skip_nonfinite=True, **given)

        alone = _alone(make, torch.float64)
        models = [_placed(*meshes[name], make, torch.float64) for name in names]
        for step in range(1, 9):
            # Without all of their shapes, or one of two.
            without = {4: (0, 2, 6), 6: (3, 6)}.get(step, ())
            _step(step, alone, *models, without=without, factor=torch.nan if step == 5 else 1.0)
            for model in models:
                _same(model.params, alone.params, atol=1e-9, rtol=1e-8)
        for params, optimizer in models:
            for param, other in zip(params, alone.params):
                state, wanted = optimizer.state[param], alone.optimizer.state[other]
                assert state.keys() == wanted.keys()
                assert ("gram_left" in state) == (other.size(0) <= limit)
                for key in {"gram_left", "gram_right", "exp_avg_sq"} & wanted.keys():
                    torch.testing.assert_close(*here(state[key], wanted[key]), atol=1e-8, rtol=1e-7)


def checkpoints_go_round() -> None:
    """Into the same layout, from one process, and into one process."""
    for name, given in (("SOAP", {"precondition_frequency": 2}), ("Muon", {})):

        def make(params: Any, name: str = name, given: dict[str, Any] = given) -> Any:
            return getattr(tilestep, name)(params, lr=0.01, **given)

        alone = _alone(make, torch.float64)
        models = [_placed(*lie, make, torch.float64) for lie in _meshes().values()]
        for step in range(1, 4):
            _step(step, alone, *models)
        plain = copy.deepcopy(alone.optimizer.state_dict())
        _step(4, alone)
        for params, optimizer in models:
            for state_dict in (copy.deepcopy(optimizer.state_dict()), plain):
                loaded = make(params)
                loaded.load_state_dict(copy.deepcopy(state_dict))
                for param in params:
                    for key, value in optimizer.state[param].items():
                        close = {"atol": 1e-8, "rtol": 1e-7} if state_dict is plain else {"atol": 0, "rtol": 0}
                        torch.testing.assert_close(*here(loaded.state[param][key], value), **close)
            _step(4, Trained(params, loaded))
            _same(params, alone.params, atol=1e-8, rtol=1e-7)


def beside_other_rules() -> None:
    """Groups of one optimizer: matrices to Muon, the rest to AdamW, and one clip over all."""

    def make(params: Any) -> Any:
        groups = [{"params": params[:5]}, {"params": params[5:], "rule": "AdamW", "lr": 1e-3}]
        return tilestep.Optimizer(groups, "Muon", lr=0.02, max_grad_norm=0.5)

    alone, model = _alone(make, torch.float32), _placed(*_meshes()["rows"], make, torch.float32)
    for step in range(1, 4):
        _step(step, alone, model)
        # The norm's partial sums are others; what they change is rounded to bfloat16 in Muon.
        _same(model.params[:5], alone.params[:5], atol=1e-3, rtol=1e-2)
        _same(model.params[5:], alone.params[5:], atol=1e-6, rtol=1e-5)


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
    model = _placed(*_meshes()["rows"], tilestep.Muon, torch.float32)
    _step(1, model)
    with torch.profiler.profile() as profiler:
        model.optimizer.step()
    counts = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("c10d::")}
    assert counts == {"c10d::alltoall_base_": 2}


def rules_with_reductions_are_those_of_one_process() -> None:
    """Norms and means over rows of updates that one rank makes and all apply."""
    meshes = _meshes()
    for name in ("NorMuon", "MuonH"):
        make = functools.partial(getattr(tilestep, name), lr=0.02)
        models = [_placed(*meshes[layout], make, torch.float32) for layout in ("rows", "columns", "rows and columns")]
        alone = _alone(make, torch.float32)
        for step in range(1, 4):
            _step(step, alone, *models)
        for params, _ in models:
            _same(params, alone.params, atol=1e-4, rtol=1e-4)


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


@tilestep.rule
def normalized(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    """Reductions over each matrix, its rows and its columns."""
    update = tilestep.orthogonalize(grad) * grad.norm()
    return param - lr * update / update.abs().amax(dim=-1, keepdim=True) - lr * grad.mean(dim=-2, keepdim=True)


def stacks_and_heads_are_those_of_one_process() -> None:
    """Experts sharded by expert, of which a rank may have none, are sent nowhere; heads are of whole matrices."""
    meshes = _meshes()
    shapes = [(8, 4, 9), (3, 4, 9), (5, 4, 9), (16, 6)]
    layouts = {
        "rows": meshes["rows"],
        "replicated rows": meshes["replicated rows"],
        "rows twice": meshes["rows twice"],
        "whole": meshes["whole"],
    }
    for rule in (tilestep.registry["Muon"], normalized):

        def make(params: Any, rule: Any = rule) -> Any:
            heads = {} if rule is normalized else {"heads": 4}
            return tilestep.Optimizer([{"params": params[:3]}, {"params": params[3:], **heads}], rule, lr=0.1)

        def drawn(step: int) -> list[torch.Tensor]:
            generator = torch.Generator().manual_seed(step)
            return [torch.randn(shape, generator=generator).to(device()) for shape in shapes]

        alone = [torch.nn.Parameter(whole) for whole in drawn(0)]
        models = {name: [torch.nn.Parameter(placed(one, *lie)) for one in drawn(0)] for name, lie in layouts.items()}
        optimizers = {name: make(params) for name, params in models.items()}
        expected = make(alone)
        for step in range(1, 4):
            for name, params in {"": alone, **models}.items():
                for param, gradient in zip(params, drawn(step)):
                    param.grad = placed(gradient, *layouts[name]) if name else gradient
                (optimizers[name] if name else expected).step()
            for params in models.values():
                _same(params, alone, **({} if rule is not normalized else {"atol": 1e-5, "rtol": 1e-5}))
    params = [torch.nn.Parameter(placed(whole, *layouts["rows"])) for whole in drawn(0)[:2]]
    optimizer = tilestep.Muon(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    with torch.profiler.profile() as profiler:
        optimizer.step()
    assert not [event.key for event in profiler.key_averages() if event.key.startswith("c10d::")]


def matrices_that_ranks_have_parts_of_are_refused() -> None:
    mesh, rows = _meshes()["rows"]
    for shape, placement, given in (
        ((8, 4, 9), Shard(1), {}),
        ((8, 4, 9), Shard(2), {}),
        ((8, 4, 3, 3), Shard(0), {"flatten": True}),
        ((16, 6), Shard(0), {"splits": (8, 4, 4)}),
        ((16, 9, 8), Shard(1), {"heads": 3}),
    ):
        param = torch.nn.Parameter(distribute_tensor(torch.zeros(shape, device=device()), mesh, [placement]))
        try:
            tilestep.Muon([("w", param)], **given)
        except tilestep.MatrixError as error:
            assert "(w) of shape" in str(error) and "of which ranks have parts" in str(error), error
        else:
            raise AssertionError(f"{shape} {given} was not refused")
    param = torch.nn.Parameter(distribute_tensor(torch.zeros(16, 6, device=device()), mesh, rows))
    try:
        tilestep.Optimizer([{"params": [("w", param)], "heads": 4}], normalized)
    except tilestep.MatrixError as error:
        assert "of which ranks have parts" in str(error)
    else:
        raise AssertionError("heads with reductions were not refused")


CHECKS = {
    check.__name__: check
    for check in (
        muon_is_that_of_one_process,
        soap_is_that_of_one_process,
        checkpoints_go_round,
        beside_other_rules,
        work_is_divided,
        two_messages_for_each_pass,
        rules_with_reductions_are_those_of_one_process,
        tensor_parallel_and_sharded,
        stacks_and_heads_are_those_of_one_process,
        matrices_that_ranks_have_parts_of_are_refused,
    )
}


test_matrices_on_four_ranks = each_passes(CHECKS, 4)
