"""Wrappers that come around a model before or after, gradients that were taken, and hooks that come late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import each_passes
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tilestep
from tilestep.memory.host import HostState
from tilestep.memory.offload import move_state


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def adamw(model: nn.Module, **options: Any) -> Any:
    return tilestep.AdamW(model.parameters(), lr=0.05, **options)  # type: ignore[attr-defined]


def loss(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 10 + (dist.get_rank() if dist.is_initialized() else 0))
    return model(torch.randn(6, 4, generator=generator)).square().mean()


def trained(steps: int) -> nn.Module:
    """By torch's optimizer under DistributedDataParallel."""
    model = network()
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(steps):
        loss(wrapped, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def same(model: nn.Module, wanted: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), wanted.parameters()):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


def refuses_clips(params: list[Any]) -> None:
    before = [param.detach().clone() for param in params]
    for clip in (
        lambda: torch.nn.utils.clip_grad_norm_(params, 1.0),
        lambda: torch.nn.utils.clip_grad_norm_(iter(params), 1.0),
        lambda: torch.nn.utils.clip_grads_with_norm_(params, 1.0, torch.ones(())),
        lambda: torch.nn.utils.clip_grad_value_(params, 1.0),
        lambda: tilestep.clip_grad_norm_(params, 1.0),
    ):
        with pytest.raises(tilestep.GradientError, match="set max_grad_norm on the optimizer"):
            clip()
    assert all(map(torch.equal, params, before))


def data_parallel_comes_later() -> None:
    """As frameworks wrap: the optimizer is made and overlapped before."""
    model = network()
    optimizer = tilestep.overlap(adamw(model), model, during="backward")
    wrapped = DistributedDataParallel(model)
    for step in range(3):
        loss(wrapped, step).backward()
        refuses_clips(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0
    same(model, trained(3))


def data_parallel_is_around_the_model_that_is_given() -> None:
    model = network()
    wrapped = DistributedDataParallel(model)
    optimizer = tilestep.overlap(adamw(model), model, during="backward")
    for step in range(3):
        loss(wrapped, step).backward()
        optimizer.step()
    same(model, trained(3))


def data_parallel_that_is_called_otherwise() -> None:
    """Without its own forward there is no sum, and no wait for one."""
    model = network()
    optimizer = tilestep.overlap(adamw(model), model, during="backward")
    wrapped = DistributedDataParallel(model)
    loss(wrapped.module, 0).backward()
    optimizer.step()
    assert all(param.grad is None for param in model.parameters())


def data_parallel_that_says_too_late() -> None:
    model = network()
    optimizer = tilestep.overlap(adamw(model), model, during="backward")
    before = [param.detach().clone() for param in model.parameters()]
    wrapped = DistributedDataParallel(model, static_graph=True)
    with pytest.raises(ValueError, match=r'static_graph=True .* use during="forward"'):
        loss(wrapped, 0)
    assert all(map(torch.equal, model.parameters(), before))
    del optimizer


def data_parallel_around_shard() -> None:
    model = network()
    optimizer = tilestep.shard(adamw(model), model)
    for around in (model, nn.Sequential(model), model[0]):  # type: ignore[index]
        with pytest.raises(
            ValueError,
            match="the model's new wrapper is a DistributedDataParallel, which reduces gradients: do not wrap",
        ):
            DistributedDataParallel(around)
    for step in range(2):
        loss(model, step).backward()
        refuses_clips(list(model.parameters()))
        optimizer.step()
    optimizer.wait()
    same(model, trained(2))
    # Nobody holds it any more.
    del optimizer
    DistributedDataParallel(model)


def shard_inside_of_data_parallel() -> None:
    model = network()
    wrapped = DistributedDataParallel(model)
    with pytest.raises(ValueError, match="the model's wrapper is a DistributedDataParallel"):
        tilestep.shard(adamw(model), model)
    del wrapped
    tilestep.shard(adamw(model), model)


def gradients_on_the_host() -> None:
    """They go there before a DistributedDataParallel has reduced them."""
    model = network()
    home = HostState(torch.device("cpu"), 1 << 20, keeps_gradients=True)
    optimizer = move_state(adamw(model), home, "cpu", "for a test")
    with pytest.raises(tilestep.OffloadError, match="DistributedDataParallel, which reduces gradients after"):
        DistributedDataParallel(model)
    loss(model, 0).backward()
    refuses_clips(list(model.parameters()))
    optimizer.step()
    wrapped = DistributedDataParallel(network())
    with pytest.raises(tilestep.OffloadError, match="DistributedDataParallel, which reduces gradients after"):
        tilestep.offload(adamw(wrapped), gradients=True)


def flat_parameters() -> None:
    for original in (True, False):
        options = {"use_orig_params": original, "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(network(), **options)
        for during in ("backward", "forward", None):
            with pytest.raises(ValueError, match=r"FullyShardedDataParallel.*fully_shard"):
                tilestep.overlap(adamw(model), model.module, during=during)  # type: ignore[arg-type]
        for kind in (tilestep.LAMB, tilestep.Adafactor):  # type: ignore[attr-defined]
            with pytest.raises(tilestep.GradientError, match=r"FullyShardedDataParallel.*its rule reduces"):
                optimizer = kind(model.parameters())
                loss(model, 0).backward()
                optimizer.step()
        optimizer = adamw(model, max_grad_norm=1.0)
        loss(model, 0).backward()
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(tilestep.GradientError, match=r"FullyShardedDataParallel.*clip_grad_norm_\(\)"):
            optimizer.step()
        assert all(map(torch.equal, model.parameters(), before))
        optimizer.param_groups[0]["max_grad_norm"] = None
        optimizer.step()
        scaler = tilestep.GradScaler("cpu")
        scaler.scale(loss(model, 1)).backward()
        with pytest.raises(tilestep.GradientError, match="ShardedGradScaler"):
            scaler.step(optimizer)
    model = network()
    overlapped = tilestep.overlap(adamw(model), model, during="forward")
    with pytest.raises(ValueError, match="the model's new wrapper is a FullyShardedDataParallel"):
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    del overlapped


def hooks_of_sharded_parameters_that_come_late() -> None:
    late_hooks(lambda model: tilestep.shard(adamw(model), model))


CHECKS = [
    data_parallel_comes_later,
    data_parallel_is_around_the_model_that_is_given,
    data_parallel_that_is_called_otherwise,
    data_parallel_that_says_too_late,
    data_parallel_around_shard,
    shard_inside_of_data_parallel,
    gradients_on_the_host,
    flat_parameters,
    hooks_of_sharded_parameters_that_come_late,
]

test_two_ranks = each_passes(CHECKS, 2)


def late_hooks(make: Callable[[nn.Module], Any]) -> None:
    """Hooks that are registered when backward has run before, and change gradients that are to be used."""
    model, wanted = network(), network()
    optimizer, reference = make(model), torch.optim.AdamW(wanted.parameters(), lr=0.05)

    def turn(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(-1)

    for step in range(4):
        if step == 2:
            for param in (*model.parameters(), *wanted.parameters()):
                param.register_post_accumulate_grad_hook(turn)
        for net in (model, wanted):
            loss(net, step).backward()
        if dist.is_initialized():
            for param in wanted.parameters():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        optimizer.step()
        reference.step()
        reference.zero_grad()
    same(model, wanted)


def test_hooks_that_come_after_overlap() -> None:
    late_hooks(lambda model: tilestep.overlap(adamw(model), model, during="backward"))


def test_hooks_that_come_after_offload_of_gradients() -> None:
    home = HostState(torch.device("cpu"), 1 << 20, keeps_gradients=True)
    late_hooks(lambda model: move_state(adamw(model), home, "cpu", "for a test"))


def test_dropping_a_model_s_gradients_waits_for_no_update() -> None:
    model = network()
    optimizer = tilestep.overlap(adamw(model), model, during="forward")
    loss(model, 0).backward()
    held = model[2].weight  # type: ignore[index]
    before = held.detach().clone()
    optimizer.step()
    model.zero_grad()
    assert torch.equal(held, before)
    assert not torch.equal(model[2].weight, before)  # type: ignore[index]


def test_a_clip_without_updates_in_backward_is_as_it_was() -> None:
    model = network()
    optimizer = tilestep.overlap(adamw(model), model, during="backward")
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    assert torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0) > 1
    loss(model, 0).backward()
    assert torch.nn.utils.clip_grad_norm_(other.parameters(), 2.0) <= 1
    refuses_clips(list(model.parameters()))
    optimizer.step()


@pytest.mark.parametrize("way", ["shard", "backward", "forward", "backward with a clip"])
def test_a_part_of_the_model_that_is_sharded_later_is_refused(way: str, one_rank: None) -> None:
    """`fully_shard` gives it other parameters: no step changed these, and nothing said so."""
    model = network()
    optimizer = adamw(model, max_grad_norm=1.0 if "clip" in way else None)
    tilestep.shard(optimizer, model) if way == "shard" else tilestep.overlap(optimizer, model, way.split()[0])
    loss(model, 0).backward()
    optimizer.step()
    # Parts that are taken out of a model are its trainer's choice.
    model[2].bias = None
    loss(model, 1).backward()
    optimizer.step()
    fully_shard(model[2])
    loss(model, 2).backward()
    with pytest.raises(RuntimeError, match="not all of the optimizer's parameters belong to the model any more"):
        optimizer.step()
