"""Clips, loss scales and skips of a sharded optimizer: one decision on all ranks."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import each_passes
from sharded_twins import TINY, Elementwise, Pair, inputs, train, two_groups
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tilestep

BAD = [math.inf, -math.inf, math.nan]


def adam(params: Any) -> tilestep.Optimizer:
    return tilestep.Adam(params, lr=0.1, eps=0.1, max_grad_norm=2.0)  # type: ignore[attr-defined]


def unclipped(params: Any) -> tilestep.Optimizer:
    return tilestep.Adam(params, lr=0.1, eps=0.1)  # type: ignore[attr-defined]


def loss_of(data: torch.Tensor) -> Callable[[nn.Module], torch.Tensor]:
    return lambda model: (model(data) * data).sum()


Clip = Callable[[Pair], object]


def clip_all(pair: Pair) -> None:
    mine = pair.optimizer.clip_grad_norm_(0.5)
    theirs = torch.nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.5)
    torch.testing.assert_close(mine, theirs, equal_nan=True)


class Scaled:
    """A pair with a scaler each; the twin's is torch's own, on summed gradients."""

    def __init__(self, pair: Pair, kind: type[torch.amp.GradScaler] = tilestep.GradScaler) -> None:
        self.pair = pair
        device = torch.get_default_device().type
        self.mine = kind(device, init_scale=256.0, growth_interval=2)
        self.theirs = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=2)

    def step(
        self,
        loss: Callable[[nn.Module], torch.Tensor],
        spoil: float | None,
        unscale: bool = False,
        clip: Clip | None = None,
        clip_scaled: bool = False,
    ) -> None:
        pair = self.pair
        spoiled = list(pair.model.parameters())[3], list(pair.twin.parameters())[3]
        handles = []
        if spoil is not None and dist.get_rank() == 1:
            place = torch.tensor([2])
            handles = [param.register_hook(lambda gradient: gradient.index_fill(1, place, spoil)) for param in spoiled]
        self.mine.scale(loss(pair.model)).backward()
        self.theirs.scale(loss(pair.twin)).backward()
        for handle in handles:
            handle.remove()
        pair.sum_twin()
        if clip is not None and clip_scaled:
            clip(pair)
        if unscale:
            self.mine.unscale_(pair.optimizer)
            self.theirs.unscale_(pair.twin_optimizer)
        if clip is not None and not clip_scaled:
            clip(pair)
        for scaler, optimizer in ((self.mine, pair.optimizer), (self.theirs, pair.twin_optimizer)):
            scaler.step(optimizer)
            scaler.update()
        pair.twin_optimizer.zero_grad()
        assert self.mine.get_scale() == self.theirs.get_scale()
        assert self.mine.state_dict()["_growth_tracker"] == self.theirs.state_dict()["_growth_tracker"]
        scales: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(scales, self.mine.get_scale())
        assert len(set(scales)) == 1


ORDERS: list[dict[str, Any]] = [
    {},
    {"unscale": True},
    {"unscale": True, "clip": clip_all},
    {"clip": clip_all, "clip_scaled": True},
    {"unscale": True, "clip": clip_all, "clip_scaled": True},
]
SPOILS = (None, math.inf, None, math.nan, -math.inf, None, None, None)


def scalers_in_any_order(kind: type[torch.amp.GradScaler]) -> None:
    for make in (adam, unclipped):
        for order in ORDERS:
            scaled = Scaled(Pair(Elementwise(), make, two_groups, bucket_cap_mb=TINY), kind)
            exact = make is unclipped and "clip" not in order
            for spoil in SPOILS:
                scaled.step(loss_of(inputs(5, 7)), spoil, **order)
                # Only the clip's coefficient depends on the order in which the norm was summed up.
                scaled.pair.compare(**({} if exact else {"rtol": 1e-5, "atol": 1e-6}))
            assert int(scaled.pair.optimizer.skipped_steps) == 3
            if exact:
                scaled.pair.compare_states()


def a_scaler_in_any_order() -> None:
    scalers_in_any_order(tilestep.GradScaler)


def torch_s_own_scaler_in_any_order() -> None:
    scalers_in_any_order(torch.amp.GradScaler)


def a_scaler_of_many_optimizers() -> None:
    """One scaler for a sharded optimizer, one of tilestep's that is not, and one of torch's."""
    for kind in (tilestep.GradScaler, torch.amp.GradScaler):
        pair = Pair(Elementwise(), unclipped, bucket_cap_mb=TINY)
        scaled = Scaled(pair, kind)
        others = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        beside = [unclipped(others[:1]), torch.optim.SGD(others[1:], lr=1.0)]
        for spoil in (None, math.inf, None):
            for param in others:
                param.grad = torch.full_like(param, 256.0)
            scaled.mine.scale(torch.ones(()))
            for optimizer in beside:
                scaled.mine.step(optimizer)
            scaled.step(loss_of(inputs(5, 7)), spoil)
            pair.compare()
        assert float(others[1][0].detach()) != 1.0


def torch_s_scaler_with_parameters_of_one_rank_alone() -> None:
    """A rank that has no piece of what has gradients asks and answers as the others do."""

    def make(params: Any) -> Any:
        return tilestep.Muon(params, lr=0.02)  # type: ignore[attr-defined]

    for kind in (tilestep.GradScaler, torch.amp.GradScaler):
        model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        model.append(frozen)
        pair = Pair(model, make)
        scaler = kind(torch.get_default_device().type, init_scale=4.0)
        for unscale in (False, True):
            for used in range(2):
                data = inputs(3, 4)
                scaler.scale(pair.model[used](data).square().sum()).backward()
                pair.twin[used](data).square().sum().backward()
                if unscale:
                    scaler.unscale_(pair.optimizer)
                scaler.step(pair.optimizer)
                scaler.update()
                pair.sum_twin()
                pair.twin_optimizer.step()
                pair.twin_optimizer.zero_grad()
                pair.compare(rtol=1e-3, atol=1e-4)


def unscaling_of_fp16_gradients_is_refused_on_all() -> None:
    """As in torch; also where one rank alone has float16 pieces."""
    model = nn.Module()
    model.small = nn.Parameter(torch.ones(3, dtype=torch.float16))
    model.whole = nn.Parameter(torch.ones(500))
    pair = Pair(model, unclipped)
    for kind in (tilestep.GradScaler, torch.amp.GradScaler):
        scaler = kind(torch.get_default_device().type, init_scale=4.0)
        scaler.scale(pair.model.small.float().sum() + pair.model.whole.sum()).backward()
        with pytest.raises(ValueError, match="FP16"):
            scaler.unscale_(pair.optimizer)
        pair.optimizer.zero_grad()


def a_scaler_of_fp16_parameters() -> None:
    scaled = Scaled(Pair(Elementwise().half(), unclipped, bucket_cap_mb=TINY))
    for spoil in (None, math.inf, None, None):
        data = inputs(5, 7, dtype=torch.float16) / 64
        loss = loss_of(data)
        pair = scaled.pair
        scaled.mine.scale(loss(pair.model).float()).backward()
        if spoil is not None:
            pair.optimizer.zero_grad()
            for param in pair.model.parameters():
                param.grad = torch.full_like(param, spoil if dist.get_rank() == 1 else 1.0)
        before = [param.clone() for param in pair.model.parameters()]
        scaled.mine.step(pair.optimizer)
        scaled.mine.update()
        pair.optimizer.wait()
        moved = [not torch.equal(old, new) for old, new in zip(before, pair.model.parameters())]
        assert all(moved) if spoil is None else not any(moved)
    assert scaled.mine.get_scale() == 256.0


def a_scaler_that_asks_one_rank_alone_is_refused() -> None:
    pair = Pair(Elementwise(), adam, bucket_cap_mb=TINY)
    before = [param.clone() for param in pair.model.parameters()]
    for param in pair.model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(tilestep.GradientError, match=r"tilestep\.GradScaler"):
        _step_with_flag(pair.optimizer)
    assert all(map(torch.equal, before, pair.model.parameters()))
    pair.optimizer.zero_grad()
    pair.twin_optimizer.zero_grad()
    train(pair, [loss_of(inputs(5, 7))])
    pair.compare(rtol=1e-6, atol=1e-7)


def a_scaler_without_gradients_says_so() -> None:
    pair = Pair(Elementwise(), unclipped, bucket_cap_mb=TINY)
    for kind in (tilestep.GradScaler, torch.amp.GradScaler):
        scaler = kind(torch.get_default_device().type, init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.step(pair.optimizer)
        with pytest.raises((RuntimeError, AssertionError), match=r"inf checks|No gradients"):
            scaler.update()


def _step_with_flag(optimizer: tilestep.Optimizer) -> None:
    """What a scaler does that has looked at this rank's gradients."""
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        optimizer.__dict__.pop("found_inf", None)


def a_scaled_step_without_its_scaler_is_refused() -> None:
    pair = Pair(Elementwise(), adam, bucket_cap_mb=TINY)
    scaled = Scaled(pair)
    scaled.step(loss_of(inputs(5, 7)), None)
    scaled.mine.scale(loss_of(inputs(5, 7))(pair.model)).backward()
    with pytest.raises(tilestep.GradientError, match="still carry a loss scale"):
        pair.optimizer.step()
    scaled.mine.step(pair.optimizer)
    scaled.mine.update()


def a_nonfinite_value_on_one_rank_skips_on_all() -> None:
    def make(params: Any) -> Any:
        return tilestep.AdamW(params, lr=0.1, skip_nonfinite=True)  # type: ignore[attr-defined]

    for rank in (0, 1):
        pair = Pair(Elementwise(), make, bucket_cap_mb=TINY)
        skipped = 0
        for bad in [None, *BAD, None]:
            for mine, theirs in zip(pair.model.parameters(), pair.twin.parameters()):
                mine.grad = inputs(*mine.shape)
                theirs.grad = mine.grad.clone()
            if bad is not None and dist.get_rank() == rank:
                place = int(torch.randint(7, (), device="cpu"))
                for model in (pair.model, pair.twin):
                    model.weights[6].grad[0, place] = bad
            elif bad is not None:
                torch.randint(7, (), device="cpu")
            skipped += bad is not None
            pair.step()
            pair.compare()
            assert int(pair.optimizer.skipped_steps) == skipped
        pair.compare_states()


def a_spike_skips_on_all() -> None:
    def make(params: Any) -> Any:
        return tilestep.SGD(params, lr=0.01, skip_above=tilestep.TimesMean(3.0, warmup=2))  # type: ignore[attr-defined]

    pair = Pair(Elementwise(), make, bucket_cap_mb=TINY)
    for step in range(6):
        for mine, theirs in zip(pair.model.parameters(), pair.twin.parameters()):
            mine.grad = inputs(*mine.shape) * (50.0 if step == 4 and dist.get_rank() == 0 else 1.0)
            theirs.grad = mine.grad.clone()
        pair.step()
        pair.compare()
    assert int(pair.optimizer.skipped_steps) == 1
    saved, theirs = pair.optimizer.full_state_dict(), pair.twin_optimizer.state_dict()
    remembered = saved["param_groups"][0]["limits"]
    torch.testing.assert_close(remembered, theirs["param_groups"][0]["limits"])
    pair.optimizer.load_state_dict(saved)
    again = pair.optimizer.state_dict()["param_groups"][0]["limits"]
    torch.testing.assert_close(again, remembered, rtol=0, atol=0)
    # A checkpoint in pieces has it too, also for an optimizer that has not stepped.
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save({"optimizer": pair.optimizer.state_dict()}, checkpoint_id=folder[0])
    for planner in (None, tilestep.LoadPlanner()):
        model = Elementwise()
        fresh = tilestep.shard(make(model.parameters()), model, bucket_cap_mb=TINY)
        state = {"optimizer": fresh.state_dict()}
        dcp.load(state, checkpoint_id=folder[0], planner=planner)
        fresh.load_state_dict(state["optimizer"])
        assert fresh.state_dict()["param_groups"][0]["limits"].keys() == remembered.keys()
        torch.testing.assert_close(fresh.state_dict()["param_groups"][0]["limits"], remembered, rtol=0, atol=0)


def means_of_norms_before_are_the_first_rank_s() -> None:
    """Each rank went on with its own, and one skipped a step that the other took."""
    model = Elementwise()
    limit = tilestep.TimesMean(3.0, decay=0.5, warmup=1)
    optimizer = tilestep.SGD(model.parameters(), lr=0.01, skip_above=limit)  # type: ignore[attr-defined]
    for param in model.parameters():
        param.grad = torch.full_like(param, 1.0 + 99 * dist.get_rank())
    optimizer.step()
    own = optimizer.state_dict()["param_groups"][0]["limits"]["TimesMean"].tolist()
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    assert of_ranks[0][0] < of_ranks[1][0] / 50
    tilestep.shard(optimizer, model, bucket_cap_mb=TINY)
    assert optimizer.state_dict()["param_groups"][0]["limits"]["TimesMean"].tolist() == of_ranks[0]
    for param in model.parameters():
        param.grad = torch.full_like(param, 20.0)
    optimizer.step()
    assert int(optimizer.skipped_steps) == 1


def limits_that_change_and_groups_without() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first, second = two_groups(model)
        return [{**first, "max_grad_norm": 0.25}, second]

    pair = Pair(Elementwise(), unclipped, groups, bucket_cap_mb=TINY)
    for limit in (0.25, 1.0, None, 1e9):
        for optimizer in (pair.optimizer, pair.twin_optimizer):
            optimizer.param_groups[0]["max_grad_norm"] = limit
        train(pair, [loss_of(inputs(5, 7))])
        pair.compare(rtol=1e-6, atol=1e-7)
        if limit is not None:
            torch.testing.assert_close(pair.optimizer.grad_norm, pair.twin_optimizer.grad_norm)  # type: ignore[attr-defined]


def norms_of_some_parameters() -> None:
    pair = Pair(Elementwise(), unclipped, bucket_cap_mb=TINY)
    for options in ((0, 1, 5), (10,), tuple(range(11)), ()):
        loss = loss_of(inputs(5, 7))
        pair.backward(loss)
        params = list(pair.model.parameters())
        measured = pair.optimizer.grad_norm_of(params[place] for place in options)
        again = pair.optimizer.grad_norm_of([params[place] for place in options])
        pair.sum_twin()
        twins = list(pair.twin.parameters())
        wanted = torch.cat([twins[place].grad.flatten() for place in options] or [torch.zeros(1)]).norm()
        torch.testing.assert_close(measured, wanted)
        assert torch.equal(measured, again) and measured.dtype == torch.float32 and measured.shape == ()
        pair.optimizer.step()
        pair.twin_optimizer.step()
        pair.twin_optimizer.zero_grad()
        pair.compare()
    loss_of(inputs(5, 7))(pair.model).backward()
    torch.testing.assert_close(pair.optimizer.grad_norm_of(params[0]), pair.optimizer.grad_norm_of([params[0]]))
    with pytest.raises(ValueError, match="parameters of this optimizer"):
        pair.optimizer.grad_norm_of([torch.zeros(1)])
    pair.optimizer.zero_grad()
    assert float(pair.optimizer.grad_norm_of(params)) == 0


def clips_of_some_parameters() -> None:
    pair = Pair(Elementwise(), unclipped, bucket_cap_mb=TINY)
    for places in ((0, 1, 5), (10,), tuple(range(11)), ()):
        pair.backward(loss_of(inputs(5, 7)))
        mine, theirs = ([list(model.parameters())[place] for place in places] for model in (pair.model, pair.twin))
        norm = pair.optimizer.clip_grad_norm_(0.25, mine)
        pair.sum_twin()
        if places:
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.25))
        pair.optimizer.step()
        pair.twin_optimizer.step()
        pair.twin_optimizer.zero_grad()
        pair.compare(rtol=1e-5, atol=1e-6)
        pair.optimizer.load_state_dict(pair.twin_optimizer.state_dict())
    with pytest.raises(ValueError, match="parameters of this optimizer"):
        pair.optimizer.clip_grad_norm_(1.0, [torch.zeros(1)])


def a_mean_loss_decides_where_ranks_have_copies() -> None:
    """Of the state, and of the model under DistributedDataParallel, which may come around it after the first steps."""
    limit = tilestep.Sigma(2, window=4, warmup=3)
    for way in ("copies", "ddp", "wrapped later", "forward"):
        model = Elementwise()
        used: nn.Module = model
        optimizer = tilestep.SGD(model.parameters(), lr=0.01, skip_above=limit)
        alone = tilestep.SGD([nn.Parameter(torch.ones(1))], lr=0.0, skip_above=limit)
        if way == "copies":
            mesh = init_device_mesh(torch.get_default_device().type, (2, 1), mesh_dim_names=("replicate", "shard"))
            tilestep.shard(optimizer, model, mesh)
        elif way != "wrapped later":
            used = nn.parallel.DistributedDataParallel(model)
        if way == "forward":
            tilestep.overlap(optimizer, used, during="forward")
        for step in range(8):
            if way == "wrapped later" and step == 2:
                used = nn.parallel.DistributedDataParallel(model)
            used(torch.ones(1, 7)).sum().backward()
            # A spike on the second rank alone.
            loss = torch.tensor(1.0 + step % 2 / 10 + (50 * dist.get_rank() if step == 5 else 0), dtype=torch.float64)
            losses = loss.clone()
            dist.all_reduce(losses)
            before = loss.clone()
            optimizer.step(loss=loss)
            optimizer.zero_grad()
            assert torch.equal(loss, before)
            alone.param_groups[0]["params"][0].grad = torch.ones(1)
            alone.step(loss=losses / 2)
            assert int(optimizer.skipped_steps) == int(alone.skipped_steps) == (step >= 5), (way, step)
        weights = torch.cat([param.detach().flatten() for param in model.parameters()])
        others = [torch.empty_like(weights) for _ in range(2)]
        dist.all_gather(others, weights)
        assert torch.equal(*others), way


CHECKS = [
    a_mean_loss_decides_where_ranks_have_copies,
    a_scaler_in_any_order,
    a_scaler_of_fp16_parameters,
    torch_s_own_scaler_in_any_order,
    a_scaler_of_many_optimizers,
    torch_s_scaler_with_parameters_of_one_rank_alone,
    unscaling_of_fp16_gradients_is_refused_on_all,
    a_scaler_that_asks_one_rank_alone_is_refused,
    a_scaler_without_gradients_says_so,
    a_scaled_step_without_its_scaler_is_refused,
    a_nonfinite_value_on_one_rank_skips_on_all,
    a_spike_skips_on_all,
    means_of_norms_before_are_the_first_rank_s,
    limits_that_change_and_groups_without,
    norms_of_some_parameters,
    clips_of_some_parameters,
]


test_two_ranks = each_passes(CHECKS, 2)
