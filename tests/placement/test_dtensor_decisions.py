"""Norms, clips and skips over DTensors: exact, and the same decision on every rank."""

from __future__ import annotations

import copy
import itertools
import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import each_passes
from sharded_models import LAYOUTS, assert_equal_on_ranks, assert_same, backward, batch, device, full, plain
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import tilestep
from tilestep.placement import ReductionGroup

ORDERS = [2.0, 1.0, 3.0, 0.5, -1.5, 0.0, math.inf, -math.inf]


def _tensors() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """DTensors on a mesh, on slices of it, and plain tensors; and the same whole."""
    mesh = init_device_mesh(device(), (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    whole = [torch.randn(shape, device=device()) + 0.1 for shape in [(7, 5), (3,), (2, 6), (4, 4), (1,), (6,), (5, 2)]]
    whole[4].zero_()
    placed: list[torch.Tensor] = [
        distribute_tensor(whole[0], mesh, [Shard(0), Shard(1)]),
        distribute_tensor(whole[1], mesh["dp"], [Shard(0)]),
        distribute_tensor(whole[2], mesh["tp"], [Replicate()]),
        distribute_tensor(whole[3], mesh, [Replicate(), Shard(0)]),
        distribute_tensor(whole[4], mesh, [Shard(0), Shard(0)]),
        whole[5].clone(),
        distribute_tensor(whole[6], mesh["tp"], [Shard(0)]),
    ]
    return placed, whole


def norms_of_all_orders() -> None:
    placed, whole = _tensors()
    for order in ORDERS:
        for chosen in (range(len(whole)), range(3), [1], [2, 5], [1, 2, 6]):
            got = tilestep.total_norm([placed[index] for index in chosen], order)
            wanted = tilestep.total_norm([whole[index] for index in chosen], order)
            torch.testing.assert_close(got, wanted, msg=lambda text, o=order, c=chosen: f"{o} of {[*c]}: {text}")
            assert_equal_on_ranks(got)


def norms_of_partial_sums() -> None:
    mesh = init_device_mesh(device(), (dist.get_world_size(),))
    terms = torch.arange(6.0, device=device()) + dist.get_rank()
    partial = DTensor.from_local(terms, mesh, [Partial()])
    wanted = full(partial).norm()
    torch.testing.assert_close(tilestep.total_norm([partial]), wanted)
    weight = torch.nn.Parameter(distribute_tensor(torch.zeros(6, device=device()), mesh, [Replicate()]))
    weight.grad = partial
    torch.testing.assert_close(tilestep.clip_grad_norm_([weight], 1.0), wanted)
    torch.testing.assert_close(full(weight.grad).norm(), torch.ones((), device=device()))


def clips_gradients() -> None:
    """As torch's on the whole gradients; a norm below the limit leaves them as they are."""
    for layout in LAYOUTS:
        net, reference = LAYOUTS[layout][0](), plain()
        backward(net, batch(0, layout))
        backward(reference, batch(0))
        for limit in (0.05, 1e6):
            got = tilestep.clip_grad_norm_(net.parameters(), limit)
            wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), limit)
            torch.testing.assert_close(got, wanted)
            assert_equal_on_ranks(got)
            # As torch's is used, which is a DTensor; and as plain tensors are.
            assert type(got) is torch.Tensor
            assert torch.equal(got.full_tensor(), got)
            assert torch.equal(got.to_local(), got)
            assert f"{got:.6e}" == f"{got.item():.6e}"
            for (name, param), (_, other) in zip(net.named_parameters(), reference.named_parameters()):
                torch.testing.assert_close(full(param.grad), other.grad, msg=lambda text, n=name: f"{n}: {text}")


def updates_complex_parameters() -> None:
    """As torch's on the whole parameters, with complex DTensors as state."""
    mesh = init_device_mesh(device(), (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)

    def draw(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, dtype=like.dtype, generator=generator).to(device())

    whole = [torch.zeros(6, 3, dtype=torch.complex64), torch.zeros(5, dtype=torch.complex64), torch.zeros(3)]
    whole = list(map(draw, whole))
    placements: list[list[Any]] = [[Shard(0)], [Replicate()], [Shard(0)]]
    params = [
        torch.nn.Parameter(distribute_tensor(tensor.clone(), mesh, how)) for tensor, how in zip(whole, placements)
    ]
    others = [torch.nn.Parameter(tensor.clone()) for tensor in whole]
    mine, theirs = tilestep.AdamW(params, lr=0.1, max_grad_norm=0.5), torch.optim.AdamW(others, lr=0.1)
    for step in range(4):
        for param, other, how in zip(params, others, placements):
            other.grad = draw(other)
            param.grad = distribute_tensor(other.grad.clone(), mesh, how)
        if step == 1:
            norm = tilestep.total_norm([param.grad for param in params])
            torch.testing.assert_close(norm, torch.nn.utils.get_total_norm([other.grad for other in others]))
        mine.step()
        torch.nn.utils.clip_grad_norm_(others, 0.5)
        theirs.step()
        if step == 2:
            mine.load_state_dict(copy.deepcopy(mine.state_dict()))
    for param, other in zip(params, others):
        torch.testing.assert_close(full(param), other)
        torch.testing.assert_close(full(mine.state[param]["exp_avg"]), theirs.state[other]["exp_avg"])


@tilestep.rule
def by_size(param: Any, grad: Any, *, lr: float = 0.1) -> Any:
    return param - lr * grad / param.numel()


def refuses_complex_shards_beside_plain_ones() -> None:
    """A plain parameter before it hid a DTensor whose pairs of reals its rule counted as elements of the whole."""
    mesh = init_device_mesh(device(), (dist.get_world_size(),))
    whole = torch.ones(4, 4, dtype=torch.complex64, device=device())
    alone, sharded = (torch.nn.Parameter(t) for t in (whole.clone(), distribute_tensor(whole, mesh, [Shard(0)])))
    for params in ([sharded], [alone, sharded]):
        said = f"parameter {len(params) - 1} of group 0 is complex: by_size does not support complex"
        with pytest.raises(tilestep.GradientError, match=said):
            tilestep.Optimizer(params, by_size)


def sees_what_one_rank_has() -> None:
    """A NaN in one rank's shard is everyone's norm."""
    placed, _ = _tensors()
    if dist.get_rank() == dist.get_world_size() - 1:
        placed[0].to_local()[...] = math.nan  # type: ignore[attr-defined]
    for order in (2.0, math.inf, -math.inf):
        assert tilestep.total_norm(placed, order).isnan()
    with pytest.raises(RuntimeError, match="non-finite"):
        tilestep.total_norm(placed, error_if_nonfinite=True)


def _spoil(net: torch.nn.Module, rank: int, value: float) -> None:
    """Put a value into one rank's part of a gradient."""
    if dist.get_rank() == rank:
        param = max(net.parameters(), key=lambda candidate: getattr(candidate, "_local_tensor", candidate).numel())
        getattr(param.grad, "_local_tensor", param.grad).view(-1)[0] = value


def skips_on_every_rank() -> None:
    """One rank's NaN skips the step everywhere; so does a NaN in a plain tensor's gradient on one rank alone."""
    for layout in LAYOUTS:
        net = LAYOUTS[layout][0]()
        before = [full(param).clone() for param in net.parameters()]
        optimizer = tilestep.AdamW(net.parameters(), lr=0.1, skip_nonfinite=True)
        for value in (math.nan, math.inf):
            backward(net, batch(0, layout))
            _spoil(net, dist.get_world_size() - 1, value)
            optimizer.step()
            optimizer.zero_grad()
        assert int(optimizer.skipped_steps) == 2, layout
        for param, old in zip(net.parameters(), before):
            assert torch.equal(full(param), old), layout
        backward(net, batch(0, layout))
        optimizer.step()
        assert int(optimizer.skipped_steps) == 2
        assert float(optimizer.state[net.first.weight]["step"]) == 1
    net = LAYOUTS["tensor_parallel"][0]()
    optimizer = tilestep.AdamW(net.parameters(), lr=0.1, skip_nonfinite=True)
    backward(net, batch(0))
    if dist.get_rank() == 0:
        net.first.weight.grad[0, 0] = math.nan
    optimizer.step()
    assert int(optimizer.skipped_steps) == 1


def _scaled_training(layout: str, scaler: Any, reference_scaler: Any) -> None:
    net, reference = LAYOUTS[layout][0](), plain()
    optimizer = tilestep.AdamW(net.parameters(), lr=1e-2, max_grad_norm=0.05)
    expected = tilestep.AdamW(reference.parameters(), lr=1e-2, max_grad_norm=0.05)
    for step in range(4):
        for model, own, whose in ((net, optimizer, scaler), (reference, expected, reference_scaler)):
            own.zero_grad()
            x = batch(step, layout if model is net else None)
            whose.scale(model(x).square().mean()).backward()
        if step == 1:
            _spoil(net, 0, math.inf)
            reference.first.weight.grad[0, 0] = math.inf
        for own, whose in ((optimizer, scaler), (expected, reference_scaler)):
            whose.step(own)
            whose.update()
        assert scaler.get_scale() == reference_scaler.get_scale(), (layout, step)
        assert_same(net, reference, atol=1e-5, rtol=1e-4)
    assert int(optimizer.skipped_steps) == 1


def scalers_agree() -> None:
    """One rank's overflow skips the step and lowers the scale on all, with tilestep's scaler and with torch's."""
    for layout in ("fsdp", "hsdp", "mixed"):
        _scaled_training(layout, *(tilestep.GradScaler(device(), init_scale=1024.0) for _ in range(2)))
    # What a scaler has found on one rank alone counts on all.
    for clip in (None, 1.0):
        net = LAYOUTS["mixed"][0]()
        optimizer = tilestep.AdamW(net.parameters(), lr=1e-2, max_grad_norm=clip)
        backward(net, batch(0, "mixed"))
        optimizer.found_inf = torch.full((), float(dist.get_rank() == 1), device=device())
        optimizer.step()
        assert int(optimizer.skipped_steps) == 1
    net = LAYOUTS["fsdp"][0]()
    optimizer = tilestep.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device(), init_scale=1024.0)
    scaler.scale(net(batch(0, "fsdp")).square().mean()).backward()
    _spoil(net, 1, math.inf)
    scaler.step(optimizer)
    assert int(optimizer.skipped_steps) == 1


def agrees_over_meshes() -> None:
    """Which ranks agree, and how much each counts."""
    size, rank = dist.get_world_size(), dist.get_rank()
    root = init_device_mesh(device(), (2, size // 2), mesh_dim_names=("dp", "tp"))
    one = torch.ones(8, device=device())
    on_both = distribute_tensor(one, root, [Shard(0), Replicate()])
    on_dp, on_tp = distribute_tensor(one, root["dp"], [Shard(0)]), distribute_tensor(one, root["tp"], [Replicate()])
    alone = ReductionGroup.of_tensors([("tp", on_tp)])
    assert alone.ranks == sorted(root["tp"].mesh.tolist()) and alone.share(on_tp) == 2 / size
    for listed in ([("dp", on_dp), ("tp", on_tp)], [("both", on_both), ("dp", on_dp)]):
        ranks = ReductionGroup.of_tensors(listed)
        assert ranks.ranks == [*range(size)]
        assert ranks.share(on_dp) == 2 / size and ranks.share(on_tp) == 1 / size
        assert ranks.share(on_both) == 2 / size and ranks.share(one) == 1 / size
    # torch gives results of operations the mesh of an earlier, equal one.
    again = init_device_mesh(device(), (2, size // 2), mesh_dim_names=("dp", "tp"))
    on_again = distribute_tensor(one, again["tp"], [Replicate()])
    assert ReductionGroup.of_tensors([("dp", on_dp), ("again", on_again)]).ranks == [*range(size)]
    pairs = DeviceMesh(device(), torch.arange(size).view(-1, 2))
    crossed = DeviceMesh(device(), torch.arange(size).view(2, -1).t().contiguous())
    first = DTensor.from_local(
        one, DeviceMesh(device(), pairs.mesh[rank // 2].tolist(), _init_backend=False), [Shard(0)], run_check=False
    )
    own = next(row for row in crossed.mesh.tolist() if rank in row)
    second = DTensor.from_local(one, DeviceMesh(device(), own, _init_backend=False), [Shard(0)], run_check=False)
    with pytest.raises(tilestep.GradientError, match="not slices of one mesh"):
        ReductionGroup.of_tensors([("first", first), ("second", second)])


def optimizers_that_send_nothing_step_in_any_order() -> None:
    """And a rank may leave a step out."""
    rank = dist.get_rank()
    for make in (LAYOUTS["fsdp"][0], lambda: DDP(plain())):
        net = make()
        params = list(net.parameters())
        optimizers = [tilestep.SGD(part, lr=0.1) for part in (params[::2], params[1::2])]
        for step in range(3):
            backward(net, batch(step, "fsdp"))
            for optimizer in optimizers[:: 1 if rank % 2 else -1]:
                if rank or step or optimizer is optimizers[0]:
                    optimizer.step()


def optimizers_that_send_step_in_one_order() -> None:
    """Ranks that stepped clipped optimizers, or others that reduce over ranks, in other orders mixed up their sums."""
    rank = dist.get_rank()
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (tilestep.SGD, {"max_grad_norm": 1.0}),
        (tilestep.SGD, {"skip_nonfinite": True}),
        (tilestep.LAMB, {}),
        (tilestep.Muon, {}),
    ]
    for (make, options), before in itertools.product(kinds, (0, 2)):
        if before and make is not tilestep.SGD:
            continue
        net = LAYOUTS["fsdp"][0]()
        blocks = [[param for param in block.parameters() if param.dim() == 2] for block in net.blocks]
        optimizers = [make(params, lr=0.1, **options) for params in blocks]
        for step in range(before + 1):
            backward(net, batch(step, "fsdp"))
            if step < before:
                for optimizer in optimizers:
                    optimizer.step()
        old = [full(param).clone() for param in net.parameters()]
        # The host of a GPU waits for the first tag alone.
        later = before > 0 and device() == "cuda"
        if later:
            torch.cuda.synchronize()  # ranks find the tag in the same step: none sends a message more
        with pytest.raises(ValueError, match="create and step optimizers in the same order on all ranks"):
            for _ in range(4 if later else 1):
                optimizers[rank % 2].step()
                if later:
                    torch.cuda.synchronize()
        for param, value in zip(net.parameters(), old):
            assert later or torch.equal(full(param), value), (make, options, before)


def losses_of_optimizers_in_other_orders() -> None:
    """The mean loss of one was decided from those of another; so was it where one rank has no loss."""
    rank = dist.get_rank()
    for layout, make in (("fsdp", LAYOUTS["fsdp"][0]), (None, lambda: DDP(plain()))):
        net = make()
        params = list(net.parameters())
        optimizers = [tilestep.SGD(part, lr=0.1, skip_above=tilestep.Sigma()) for part in (params[::2], params[1::2])]
        backward(net, batch(0, layout))
        with pytest.raises(ValueError, match="create and step optimizers in the same order"):
            optimizers[rank % 2].step(loss=float(rank))
    net = LAYOUTS["fsdp"][0]()
    optimizer = tilestep.SGD(net.parameters(), skip_above=tilestep.Sigma())
    backward(net, batch(0, "fsdp"))
    with pytest.raises(ValueError, match="pass a loss on all ranks or on none"):
        optimizer.step(loss=None if rank else 1.0)


def copies_of_optimizers_are_numbered() -> None:
    """So is an optimizer whose first DTensor is added later."""
    mesh = init_device_mesh(device(), (dist.get_world_size(),))
    weight, other = (
        torch.nn.Parameter(distribute_tensor(torch.ones(8, device=device()), mesh, [Shard(0)])) for _ in range(2)
    )
    optimizer = tilestep.SGD([weight], lr=0.1, max_grad_norm=1.0)
    copied = copy.deepcopy(optimizer)
    late = tilestep.SGD([torch.nn.Parameter(torch.zeros(1, device=device()))], lr=0.1, max_grad_norm=1.0)
    late.add_param_group({"params": [other]})
    for one in (optimizer, copied, late):
        param = one.param_groups[-1]["params"][0]
        param.grad = torch.ones_like(param)
        one.step()
    numbers = [one.control.number for one in (optimizer, copied, late)]
    assert None not in numbers and len(set(numbers)) == 3


def steps_without_gradients_and_with_other_seeds() -> None:
    """A rank without any gradient takes part, and what ranks draw may be their own."""
    rank = dist.get_rank()
    mesh = init_device_mesh(device(), (dist.get_world_size(),))
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(8, device=device()), mesh, [Shard(0)]))
    optimizer = tilestep.SGD([weight], lr=0.5, rounding="stochastic", seed=rank)
    if rank:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert set(weight.to_local().tolist()) == {0.5 if rank else 1.0}
    # Plain tensors may be those of other trainings.
    alone = torch.nn.Parameter(torch.ones(2, device=device()))
    optimizer = tilestep.SGD([alone], lr=0.5 + rank)
    alone.grad = torch.ones_like(alone)
    optimizer.step()
    assert alone.tolist() == [0.5 - rank] * 2


def says_why_others_may_not_take_part() -> None:
    """A clip that one rank has set since the first step ended in an error of the backend's alone."""
    net = LAYOUTS["fsdp"][0]()
    optimizer = tilestep.AdamW(net.parameters())
    backward(net, batch(0, "fsdp"))
    optimizer.step()
    optimizer.param_groups[0]["max_grad_norm"] = 1.0

    def never(*_: Any, **__: Any) -> None:
        raise RuntimeError("Timed out waiting")

    before, dist.all_reduce = dist.all_reduce, never
    try:
        ranks = re.escape(str([*range(dist.get_world_size())]))
        with pytest.raises(RuntimeError, match=rf"ranks {ranks} decide steps .*same max_grad_norm.*\(Timed out"):
            optimizer.step()
    finally:
        dist.all_reduce = before


CHECKS = {
    check.__name__: check
    for check in (
        norms_of_all_orders,
        norms_of_partial_sums,
        clips_gradients,
        updates_complex_parameters,
        refuses_complex_shards_beside_plain_ones,
        sees_what_one_rank_has,
        skips_on_every_rank,
        scalers_agree,
        agrees_over_meshes,
        says_why_others_may_not_take_part,
        steps_without_gradients_and_with_other_seeds,
        optimizers_that_send_nothing_step_in_any_order,
        optimizers_that_send_step_in_one_order,
        losses_of_optimizers_in_other_orders,
        copies_of_optimizers_are_numbered,
    )
}


test_on_four_ranks = each_passes(CHECKS, 4)
