"""What cannot be sharded is refused on all ranks at once, with what differs; no rank is left waiting."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_twins import Elementwise, inputs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import tilestep
from tilestep.schedule import warmup_cosine


def sgd(params: Any, **options: Any) -> tilestep.Optimizer:
    return tilestep.SGD(params, **{"lr": 0.1, **options})  # type: ignore[attr-defined]


def refused(pattern: str, make: Callable[[bool], Any]) -> None:
    """`shard` fails on every rank in the same way, and whatever there is can be sharded afterwards."""
    with pytest.raises(ValueError, match=pattern):
        make(dist.get_rank() == 1)
    model = Elementwise()
    optimizer = tilestep.shard(sgd(model.parameters()), model)
    model(inputs(1, 7)).sum().backward()
    optimizer.step()


def models_that_are_wrapped() -> None:
    from torch.distributed.fsdp import fully_shard

    model = Elementwise()
    wrapped = DistributedDataParallel(model)
    refused("the model is a DistributedDataParallel", lambda _: tilestep.shard(sgd(model.parameters()), wrapped))
    inside = nn.Sequential(nn.Linear(2, 2), DistributedDataParallel(nn.Linear(2, 2)))
    refused(r"module '1' is a DistributedDataParallel", lambda _: tilestep.shard(sgd(inside.parameters()), inside))
    sharded = fully_shard(nn.Linear(4, 4))
    refused("FSDP", lambda _: tilestep.shard(sgd(sharded.parameters()), sharded))


def one_rank_alone_has_a_reason() -> None:
    def make(is_other: bool) -> None:
        model = nn.Linear(2, 2)
        tilestep.shard(sgd(model.parameters()), nn.Linear(3, 3) if is_other else model)

    refused(r"rank 1 cannot be sharded|does not belong to the model", make)


def one_rank_alone_fails_before_anything_is_compared() -> None:
    """In the function that makes the optimizer, with another kind of optimizer, or with something that is no module."""
    model = Elementwise()

    def failing(is_other: bool) -> Any:
        return tilestep.shard(lambda: sgd(model.parameters(), lr=-1.0 if is_other else 0.1), model)

    def sharded_already(is_other: bool) -> Any:
        before = Elementwise()
        sharded = tilestep.shard(sgd(before.parameters()), before)
        tilestep.shard(sharded if is_other else sgd(model.parameters()), model)

    for pattern, make in (("Invalid lr: -1", failing), ("is sharded already", sharded_already)):
        refused(f"^rank 1 cannot be sharded: .*{pattern}" if dist.get_rank() == 0 else pattern, make)
    wrong: list[Callable[[], Any]] = [
        lambda: tilestep.shard(torch.optim.SGD(model.parameters(), lr=0.1), model),  # type: ignore[arg-type]
        lambda: tilestep.shard(sgd(model.parameters()), None),  # type: ignore[arg-type]
    ]
    for make in wrong:
        with pytest.raises(TypeError if dist.get_rank() == 1 else ValueError, match=r"shard\(\) requires"):
            _ = make() if dist.get_rank() == 1 else tilestep.shard(sgd(model.parameters()), model)


def ranks_that_differ() -> None:
    def build(shape: int = 4, dtype: torch.dtype = torch.float32, lr: float = 0.1, **options: Any) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, shape)).to(dtype)
        if options.pop("frozen", False):
            model[0].weight.requires_grad_(False)
        names = [{"params": [param]} for param in model.parameters()]
        if options.pop("swapped", False):
            names[0], names[2] = names[2], names[0]
        if options.pop("fewer", False):
            names.pop()
        rule = options.pop("rule", "SGD")
        return tilestep.shard(tilestep.Optimizer(names, rule, lr=lr), model, **options)

    refused(
        r"rank 0 has parameter 1\.weight \(4, 4\).*; rank 1 has parameter 1\.weight \(5, 4\)",
        lambda other: build(shape=5 if other else 4),
    )
    refused(r"float32.*rank 1.*bfloat16", lambda other: build(dtype=torch.bfloat16 if other else torch.float32))
    refused(r"rank 0 has group 0 lr=0\.1; rank 1 has group 0 lr=0\.2", lambda other: build(lr=0.2 if other else 0.1))
    refused(r"bucket_cap_mb=25\.0; rank 1 has bucket_cap_mb=1", lambda other: build(bucket_cap_mb=1 if other else 25.0))
    refused(
        r"bucket_cap_mb=None; rank 1 has bucket_cap_mb=25", lambda other: build(bucket_cap_mb=25 if other else None)
    )
    refused("overlap_grad_sync", lambda other: build(overlap_grad_sync=other))
    refused("frozen", lambda other: build(frozen=other))
    refused("in group 2", lambda other: build(swapped=other))
    refused("rank 1 has group|nothing more|rank 0 has parameter 1.bias", lambda other: build(fewer=other))
    refused(
        r"norm_groups of \[\] ranks; rank 1 has norm_groups of \[2\]",
        lambda other: build(norm_groups=[dist.group.WORLD] if other else []),
    )
    refused(r"rank 0 has state after steps \[2\.0\]; rank 1 has no state", stepped_before)
    refused("Lion", lambda other: build(rule="Lion" if other else "SGD", lr=0.1))


def buffers_that_differ() -> None:
    def build(is_other: bool) -> Any:
        model = Elementwise()
        model.register_buffer("mask", torch.ones(3 if is_other else 2, dtype=torch.bool))
        return tilestep.shard(sgd(model.parameters()), model)

    refused(r"not in the optimizer: mask \(2,\) torch\.bool on .*; rank 1 has .* mask \(3,\)", build)


def rules_that_differ() -> None:
    """In numbers that no name and no hyperparameter tells of."""
    model = Elementwise()

    def scheduled(is_other: bool) -> Any:
        return tilestep.shard(sgd(model.parameters(), lr=warmup_cosine(0.2 if is_other else 0.1, 2, 8)), model)

    def by_step(is_other: bool) -> Any:
        start = 0.2 if is_other else 0.1
        return tilestep.shard(sgd(model.parameters(), lr=lambda step: start / step), model)

    def written(is_other: bool) -> Any:
        factor = 0.25 if is_other else 0.75

        @tilestep.rule
        def scaled(param: Any, grad: Any, *, lr: float = 0.1) -> Any:
            return param - lr * factor * grad

        return tilestep.shard(tilestep.Optimizer(model.parameters(), scaled), model)

    refused(r"rank 0 has group 0 lr=Piecewise\(.*0\.1.*; rank 1 has group 0 lr=Piecewise\(.*0\.2", scheduled)
    refused(r"rank 0 has in group 0 rule SGD with \[\d+\] = .*0\.1.*; rank 1 has .*0\.2", by_step)
    refused(r"rank 0 has in group 0 rule scaled with \[\d+\] = .*0\.75.*; rank 1 has .*0\.25", written)


def stepped_before(is_other: bool) -> None:
    """One rank has loaded a checkpoint, say, and the other one begins anew."""
    model = Elementwise()
    optimizer = sgd(model.parameters())
    for _ in range(0 if is_other else 2):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    tilestep.shard(optimizer, model)


def arguments_that_are_none() -> None:
    model = Elementwise()

    def make(**options: Any) -> Callable[[bool], Any]:
        return lambda _: tilestep.shard(sgd(model.parameters()), model, **options)

    refused("bucket_cap_mb", make(bucket_cap_mb=0))
    refused("grad_buffer", make(grad_buffer="none"))
    refused("param_buffer", make(param_buffer="none"))
    refused("grad_sync_dtype", make(grad_sync_dtype=torch.int32))
    with pytest.raises(TypeError, match="requires a tilestep optimizer"):
        tilestep.shard(torch.optim.SGD(model.parameters(), lr=0.1), model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="module that is trained"):
        tilestep.shard(sgd(model.parameters()), model.parameters())  # type: ignore[arg-type]
    optimizer = tilestep.shard(sgd(model.parameters()), model)
    with pytest.raises(ValueError, match="sharded already"):
        tilestep.shard(optimizer, model)
    meta = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match="meta device"):
        tilestep.shard(sgd(meta.parameters()), meta)


def meshes() -> None:
    model = Elementwise()
    for mesh in (init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1)), init_device_mesh("cpu", (1, 2))):
        own = copy.deepcopy(model)
        optimizer = tilestep.shard(sgd(own.parameters()), own, mesh)
        own(inputs(2, 7)).sum().backward()
        optimizer.step()
    with pytest.raises(ValueError, match="one or two dimensions"):
        tilestep.shard(sgd(model.parameters()), model, init_device_mesh("cpu", (2, 1, 1)))
    with pytest.raises(ValueError, match="name them 'shard' and 'replicate'"):
        unclear = init_device_mesh("cpu", (2, 1), mesh_dim_names=("rows", "columns"))
        tilestep.shard(sgd(model.parameters()), model, unclear)


def a_rank_outside_of_the_mesh() -> None:
    """It is refused, and those in the mesh do not wait for it."""
    model, mesh = Elementwise(), DeviceMesh("cpu", [0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="rank 1 does not belong to"):
            tilestep.shard(sgd(model.parameters()), model, mesh)
        return
    optimizer = tilestep.shard(sgd(model.parameters()), model, mesh)
    model(inputs(2, 7)).sum().backward()
    optimizer.step()


def what_a_sharded_optimizer_does_not_do() -> None:
    model = Elementwise()
    optimizer = tilestep.shard(sgd(model.parameters()), model)
    for work in (lambda: copy.deepcopy(optimizer), lambda: pickle.dumps(optimizer)):
        with pytest.raises(TypeError, match="full_state_dict"):
            work()
    for capture in (optimizer.prepare_capture, lambda: tilestep.capture(optimizer)):
        with pytest.raises(tilestep.CaptureError, match="on the CPU, which has no graphs"):
            capture()
    optimizer.push()
    matrix = nn.Linear(4, 4, bias=False)
    turning = tilestep.shard(tilestep.SOAP(matrix.parameters()), matrix)  # type: ignore[attr-defined]
    for capture in (turning.prepare_capture, lambda: tilestep.capture(turning)):
        with pytest.raises(
            tilestep.CaptureError, match="rule SOAP decomposes matrices in some steps, which ranks must take"
        ):
            capture()


def sums_over_all_tensors_of_which_a_rank_has_some() -> None:
    """A parameter whose blocks cannot be cut is on one rank: the norm of the other ranks was without it."""
    for shape, is_cut in (((3, 5001), False), ((64, 64), True)):
        model = nn.ParameterList([nn.Parameter(torch.ones(shape))])
        optimizer = sgd(model.parameters(), momentum=0.9, max_grad_norm=tilestep.AdaGC(), state_dtype="int8")
        if is_cut:
            tilestep.shard(optimizer, model)
            continue
        with pytest.raises(
            tilestep.RuleError, match=r"has states in blocks that cannot be split.* another state_dtype"
        ):
            tilestep.shard(optimizer, model)


CHECKS = [
    models_that_are_wrapped,
    one_rank_alone_has_a_reason,
    one_rank_alone_fails_before_anything_is_compared,
    ranks_that_differ,
    buffers_that_differ,
    rules_that_differ,
    arguments_that_are_none,
    meshes,
    a_rank_outside_of_the_mesh,
    what_a_sharded_optimizer_does_not_do,
    sums_over_all_tensors_of_which_a_rank_has_some,
]


test_two_ranks = each_passes(CHECKS, 2)


def test_without_a_process_group() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="init_process_group"):
        tilestep.shard(sgd(model.parameters()), model)
