"""Rules on whole matrices of which each rank has a part: to the bit what one process does with the same gradients."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_models import LAYOUTS, device, here, placed, plain
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tilestep
from tilestep.placement import matrices
from tilestep.placement.matrices import MatrixExchange, add_matrix
from tilestep.runtime import batches

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
    """With masters; test_muon_layouts.py has float32 parameters."""
    make, dtype = functools.partial(tilestep.Muon, lr=0.02, master_weights=True), torch.bfloat16
    alone, models = _alone(make, dtype), {name: _placed(*lie, make, dtype) for name, lie in _meshes().items()}
    for step in range(1, 4):
        _step(step, alone, *models.values())
        for model in models.values():
            _same(model.params, alone.params)
    for name, (params, optimizer) in models.items():
        for param, other in zip(params, alone.params):
            buffer = optimizer.state[param]["momentum_buffer"]
            assert torch.equal(*here(buffer, alone.optimizer.state[other]["momentum_buffer"])), name


def muon_in_formats_is_that_of_one_process() -> None:
    """Blocks of codes, masters in remainders, stochastic rounding, a scaler that skips a step: to the bit."""
    cases: list[tuple[torch.dtype, dict[str, Any]]] = [
        (torch.bfloat16, {"state_dtype": "int8", "master_weights": "remainder"}),
        (torch.bfloat16, {"rounding": "stochastic", "master_weights": False}),
        (torch.float32, {"skip_nonfinite": True, "ns_coefficients": "polar_express"}),
    ]
    layouts = [_meshes()[name] for name in ("rows", "replicated rows", "rows twice", "columns and rows")]
    for dtype, given in cases:
        make = functools.partial(tilestep.Muon, lr=0.02, **given)
        rows = layouts if "rounding" not in given and "state_dtype" not in given else layouts[:2]
        alone, models = _alone(make, dtype), [_placed(*lie, make, dtype) for lie in rows]
        for step in range(1, 4):
            is_bad = step == 2 and "skip_nonfinite" in given
            _step(step, alone, *models, without=(4,), factor=torch.inf if is_bad else 1.0)
            for model in models:
                _same(model.params, alone.params)


def soap_is_that_of_one_process() -> None:
    """In float64, through its first step, steps that turn its bases, a skipped one and one without some gradients."""
    meshes = _meshes()
    for limit, names in ((8, ("rows", "columns and rows")), (10_000, ("rows twice", "rows and columns", "whole"))):

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
        layouts = ("columns", "replicated rows", "columns and rows", "whole")
        models = [_placed(*_meshes()[layout], make, torch.float64) for layout in layouts]
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
    """Every matrix has one owner of all ranks of its mesh, the same on all of them; the most work goes first."""
    for layout, (mesh, placements) in _meshes().items():
        exchanges: dict[Any, MatrixExchange] = {}
        work = [1.0 + place % 4 for place in range(16)]
        for amount in work:
            param = distribute_tensor(torch.zeros(8, 8, device=device()), mesh, placements)
            exchange, _ = add_matrix(exchanges, "a matrix", param, lead=0, work=amount, everywhere=False)
        assert len(exchanges) == 1, layout
        owners: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(owners, [exchange.owner(place) for place in range(16)])
        assert all(listed == owners[0] for listed in owners), layout
        loads = [sum(amount for amount, owner in zip(work, owners[0]) if owner == rank) for rank in range(len(owners))]
        assert loads == [sum(work) / len(owners)] * len(owners), (layout, loads)


def ranks_with_the_same_experts_use_their_mesh_s_group() -> None:
    mesh = init_device_mesh(device(), (dist.get_world_size() // 2, 2), mesh_dim_names=("cut", "experts"))
    param = distribute_tensor(torch.zeros(4, 8, 8, device=device()), mesh, [Shard(1), Shard(0)])
    exchange, _ = add_matrix({}, "a stack", param, lead=1, work=1.0, everywhere=False)
    assert exchange.group is mesh.get_group("cut") and exchange.layouts[0].shape == (2, 8, 8)


def _messages(optimizer: Any) -> dict[str, int]:
    with torch.profiler.profile() as profiler:
        optimizer.step()
    return {event.key: event.count for event in profiler.key_averages() if event.key.startswith("c10d::")}


def one_message_to_owners_and_one_back_for_each_bucket() -> None:
    """Also where matrices that other ranks update, and experts, are in the same optimizer; bits stay the same."""
    made: list[Any] = []

    class Counted(matrices.Bucket):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    original = matrices.Bucket, matrices.OWNED_IN_A_BUCKET
    try:
        matrices.Bucket = Counted  # type: ignore[misc]
        for layout, size, least in (
            ("rows", 1, 2),
            ("replicated rows", 1, 2),
            ("columns and rows", 100, 2),
            ("rows", 500, 1),
        ):
            made.clear()
            matrices.OWNED_IN_A_BUCKET = size
            alone = _alone(tilestep.Muon, torch.float32)
            model = _placed(*_meshes()[layout], tilestep.Muon, torch.float32)
            for step in range(1, 3):
                _step(step, alone, model)
                _same(model.params, alone.params)
            assert least <= len(made) <= len(SHAPES), (layout, size, len(made))
            assert _messages(model.optimizer) == {"c10d::alltoall_base_": 2 * len(made)}, layout
    finally:
        matrices.Bucket, matrices.OWNED_IN_A_BUCKET = original  # type: ignore[misc]


class Recording(TorchDispatchMode):
    """In a CUDA graph's place: what the third run does, on the same memory ever after."""

    made: ClassVar[list[Recording]] = []

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.runs, self.calls = 0, list[tuple[Any, Any, Any, Any]]()
        self.made.append(self)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def run(self, work: Any) -> None:
        self.runs += 1
        if self.runs == 3:
            with self:
                work()
            assert self.calls
        elif self.runs < 3:
            work()
        else:
            for function, args, kwargs, result in self.calls:
                again = function(*args, **kwargs)
                if isinstance(result, torch.Tensor) and again is not result:
                    result.copy_(again)


def work_on_buckets_is_recorded() -> None:
    """Buckets go through the same memory one after the other; missing gradients do not change what is launched."""
    if device() == "cuda":
        return  # tests/gpu has true recordings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrices, "OWNED_IN_A_BUCKET", 100)
        for layout in ("rows", "columns and rows", "replicated rows"):
            Recording.made = []
            alone = _alone(tilestep.Muon, torch.float32)
            with pytest.MonkeyPatch.context() as recording:
                recording.setattr(batches, "has_streams", lambda device: True)
                recording.setattr(batches, "LEAST_MATRICES", 1)
                recording.setattr(batches, "RecordedPass", Recording)
                recording.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
                model = _placed(*_meshes()[layout], tilestep.Muon, torch.float32)
                _step(1, model)
                for step in range(2, 7):
                    _step(step, model, without=(2,) if step == 5 else ())
            for step in range(1, 7):
                _step(step, alone, without=(2,) if step == 5 else ())
            _same(model.params, alone.params)
            buckets = sum(1 for each in Recording.made if each.runs == 6)
            assert len(Recording.made) == buckets >= 1, (layout, [each.runs for each in Recording.made])


def only_parts_of_owners_matrices_travel() -> None:
    """The elements that a rank sends are its parts of the matrices of others, and of its own what others have."""
    sent: list[int] = []
    original = dist.all_to_all_single

    def counted(received: Any, message: Any, come: Any, go: Any, **rest: Any) -> Any:
        sent.append(sum(go) - go[dist.get_rank()])
        return original(received, message, come, go, **rest)

    sides = [(128, 64), (64, 128)] * 4
    params = [
        torch.nn.Parameter(placed(torch.zeros(shape, device=device()), *_meshes()["rows"]))
        for shape in [*sides, *[(8, 16, 16)] * 3]
    ]
    optimizer = tilestep.Muon(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    dist.all_to_all_single = counted
    try:
        optimizer.step()
    finally:
        dist.all_to_all_single = original
    # Of eight matrices each of four ranks owns two: it sends a quarter of six, then three quarters of two, in bfloat16.
    ranks = dist.get_world_size()
    own, part = 8 // ranks, 128 * 64 * 2 // ranks
    assert sent == [(8 - own) * part, own * (ranks - 1) * part], sent


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
    # Row states of matrices inside of a tensor have its dimensions, not those of the stack that the rule sees.
    for shape, given in (((2, 3, 8, 6), {}), ((8, 6), {"heads": 2})):
        copies = distribute_tensor(torch.ones(shape, device=device()), meshes["rows"][0], [Replicate()])
        param = torch.nn.Parameter(copies)
        optimizer = tilestep.NorMuon([{"params": [param], **given}])
        for _ in range(2):
            param.grad = torch.ones_like(param)
            optimizer.step()
            assert optimizer.state[param]["second_momentum_buffer"].shape == (*shape[:-1], 1)
            optimizer.load_state_dict(optimizer.state_dict())


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
    by_expert = ("rows", "replicated rows", "rows twice", "whole")
    for rule in (tilestep.registry["Muon"], normalized):
        # What reduces over matrices inside of a tensor needs them whole.
        layouts = {name: lie for name, lie in meshes.items() if rule is not normalized or name in by_expert}

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
    params = [torch.nn.Parameter(placed(whole, *meshes["rows"])) for whole in drawn(0)[:2]]
    optimizer = tilestep.Muon(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    assert not _messages(optimizer)


def matrices_inside_of_cut_tensors_are_those_of_one_process() -> None:
    """Stacks cut along rows and columns, experts of other ranks apart; convolutions; heads and stacks of heads."""
    mesh = _meshes()["rows"][0]
    experts = init_device_mesh(device(), (dist.get_world_size() // 2, 2), mesh_dim_names=("cut", "experts"))
    cases: list[tuple[tuple[int, ...], dict[str, Any], Any, Any]] = [
        ((3, 6, 9), {}, mesh, [Shard(1)]),
        ((3, 6, 9), {}, mesh, [Shard(-1)]),
        ((6, 6, 9), {}, experts, [Shard(1), Shard(0)]),
        ((5, 3, 9), {}, experts, [Shard(2), Shard(0)]),
        ((2, 3, 8, 5), {}, experts, [Shard(2), Shard(3)]),
        ((8, 4, 3, 3), {"flatten": True}, mesh, [Shard(0)]),
        ((6, 5, 3, 3), {"flatten": True}, experts, [Shard(0), Shard(1)]),
        ((6, 12, 8), {"heads": 3}, experts, [Shard(1), Shard(0)]),
        ((9, 8), {"heads": 3}, mesh, [Shard(0)]),
        ((16, 6), {"splits": (8, 4, 4)}, mesh, [Shard(0)]),
        ((16, 6), {"splits": (8, 4, 4)}, mesh, [Shard(1)]),
        ((7, 5), {"splits": (4, 2, 1)}, mesh, [Shard(0)]),
        ((24, 6), {"splits": (2, 1)}, mesh, [Shard(0)]),
        ((24, 6), {"splits": (2, 1)}, experts, [Shard(0), Shard(1)]),
        ((24, 6), {"splits": (2, 1)}, experts, [Replicate(), Shard(0)]),
        ((4, 12, 6), {"splits": (2, 1)}, experts, [Shard(1), Shard(0)]),
        ((2, 12, 6), {"splits": (8, 4)}, mesh, [Shard(0)]),
        ((9, 4, 3, 3), {"flatten": True, "splits": (6, 3)}, mesh, [Shard(0)]),
    ]
    generator = torch.Generator().manual_seed(0)
    for dtype, options in ((torch.float32, {}), (torch.bfloat16, {"rounding": "stochastic"})):
        alone, params, groups = [], [], []
        for shape, given, on, placements in cases:
            whole = torch.randn(shape, generator=generator).to(device(), dtype)
            alone.append(torch.nn.Parameter(whole.clone()))
            params.append(torch.nn.Parameter(placed(whole, on, placements)))
            groups.append(given)
        models = [
            Trained(
                own, tilestep.Muon([{"params": [one], **given} for one, given in zip(own, groups)], lr=0.1, **options)
            )
            for own in (alone, params)
        ]
        for _ in range(3):
            gradients = [torch.randn(shape, generator=generator).to(device(), dtype) for shape, *_ in cases]
            for place, gradient in enumerate(gradients):
                alone[place].grad = gradient
                params[place].grad = placed(gradient, *cases[place][2:])
            for _, optimizer in models:
                optimizer.step()
            _same(params, alone)
        for pair in zip(params, alone):
            states = (model.optimizer.state[own] for own, model in zip(pair, reversed(models)))
            assert torch.equal(*here(*(state["momentum_buffer"] for state in states)))


def matrices_that_ranks_have_parts_of_are_refused() -> None:
    mesh, rows = _meshes()["rows"]
    for shape, placement, given in (
        ((15, 6), Shard(0), {"splits": (2, 1)}),
        ((16, 6), Shard(0), {"rule": "NorMuon", "splits": (8, 4, 4)}),
        ((8, 4, 9), Shard(1), {"rule": normalized}),
        ((8, 4, 3, 3), Shard(0), {"rule": normalized, "flatten": True}),
    ):
        param = torch.nn.Parameter(distribute_tensor(torch.zeros(shape, device=device()), mesh, [placement]))
        try:
            tilestep.Muon([{"params": [("w", param)], **given}])
        except tilestep.MatrixError as error:
            assert "(w) of shape" in str(error) and "it is a DTensor with placements" in str(error), error
        else:
            raise AssertionError(f"{shape} {given} was not refused")
    param = torch.nn.Parameter(distribute_tensor(torch.zeros(16, 6, device=device()), mesh, rows))
    try:
        tilestep.Optimizer([{"params": [("w", param)], "heads": 4}], normalized)
    except tilestep.MatrixError as error:
        assert "reduces over matrices split over ranks" in str(error)
    else:
        raise AssertionError("heads with reductions were not refused")


CHECKS = {
    check.__name__: check
    for check in (
        muon_is_that_of_one_process,
        muon_in_formats_is_that_of_one_process,
        soap_is_that_of_one_process,
        checkpoints_go_round,
        beside_other_rules,
        work_is_divided,
        ranks_with_the_same_experts_use_their_mesh_s_group,
        one_message_to_owners_and_one_back_for_each_bucket,
        work_on_buckets_is_recorded,
        only_parts_of_owners_matrices_travel,
        rules_with_reductions_are_those_of_one_process,
        tensor_parallel_and_sharded,
        stacks_and_heads_are_those_of_one_process,
        matrices_inside_of_cut_tensors_are_those_of_one_process,
        matrices_that_ranks_have_parts_of_are_refused,
    )
}


test_matrices_on_four_ranks = each_passes(CHECKS, 4)
