"""Wrappers of frameworks, whose class is derived from the optimizer's: all that is asked of them is the optimizer's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tilestep


class Wrapper:
    """As Lightning and Fabric wrap optimizers: of their class, without their attributes."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self.steps = optimizer, 0
        self.__class__ = type("Wrapped" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 3))


def make(model: nn.Module, **options: Any) -> Any:
    return tilestep.AdamW(model.parameters(), lr=0.01, **options)


def loss(model: nn.Module, step: int) -> torch.Tensor:
    batch = torch.randn(6, 64, generator=torch.Generator().manual_seed(step))
    return model(batch).square().mean()


def backward(model: nn.Module, step: int) -> None:
    loss(model, step).backward()


KINDS: dict[str, Any] = {
    "plain": make,
    "int8": lambda model: make(model, state_dtype="int8", max_grad_norm=0.1),
    "overlap in forward": lambda model: tilestep.overlap(make(model), model, during="forward"),
    "overlap in backward": lambda model: tilestep.overlap(make(model), model, during="backward"),
    "offload": lambda model: tilestep.offload(make(model, track_grad_norm=True)),
    "stats": lambda model: make(model, stats=tilestep.Stats(), track_changes=True),
    "averages": lambda model: tilestep.Optimizer(model.parameters(), tilestep.ema(tilestep.registry["SGD"], 0.5)),
}


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return bool(torch.equal(left.float(), right.float()))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    return left == right  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapper_is_used_as_the_optimizer(kind: str) -> None:
    plain_model, model = network(), network()
    plain, wrapper = KINDS[kind](plain_model), Wrapper(KINDS[kind](model))
    assert isinstance(wrapper, type(plain)) and isinstance(wrapper, torch.optim.Optimizer)
    for each, weights in ((plain, plain_model), (wrapper, model)):
        for step in range(4):
            each.zero_grad()
            backward(weights, step)
            each.step()
            if step == 1:
                # A gradient that is dropped, and groups and states of before.
                backward(weights, 9)
                each.zero_grad() if kind != "overlap in backward" else each.step()
                saved = each.state_dict()
                backward(weights, 8)
                each.step()
                each.load_state_dict(saved)
                each.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5})
                each.param_groups[0]["lr"] = 0.02
    assert wrapper.steps >= 5 and "param_groups" not in vars(wrapper) and "state" not in vars(wrapper)
    assert all(map(torch.equal, plain_model.parameters(), model.parameters()))
    assert equal(wrapper.state_dict(), plain.state_dict())
    assert int(wrapper.skipped_steps) == 0 and wrapper.plan is not None and wrapper.execution is not None
    assert wrapper.rule_of(wrapper.param_groups[0]).name == plain.rule_of(plain.param_groups[0]).name
    assert repr(wrapper).endswith(repr(plain).partition(" ")[2])
    if kind == "stats":
        assert wrapper.stats.read().keys() == plain.stats.read().keys() and len(list(wrapper.changes())) == 4
    if kind == "averages":
        with wrapper.averaged(), plain.averaged():
            assert all(map(torch.equal, plain_model.parameters(), model.parameters()))
    if kind == "int8":
        assert torch.equal(wrapper.grad_norm, plain.grad_norm)
    if kind.startswith("overlap"):
        assert wrapper.applied_groups == plain.applied_groups
    wrapper.state = {}
    assert not wrapper.state and not wrapper._optimizer.state


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, tilestep.GradScaler])
def test_scalers_scale_the_steps_of_a_wrapped_optimizer(kind: Any) -> None:
    models, ends = [network(), network()], []
    for model, wrap in zip(models, (lambda optimizer: optimizer, Wrapper)):
        optimizer: Any = wrap(make(model))
        scaler = kind("cpu", init_scale=1024.0, growth_interval=2)
        for step, factor in enumerate((1.0, float("inf"), 1.0, 1.0)):
            optimizer.zero_grad()
            scaler.scale(loss(model, step) * factor).backward()
            if step == 3:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        ends.append((scaler.get_scale(), int(optimizer.skipped_steps)))
        assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    assert ends[0] == ends[1] == (1024.0, 1)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    # torch's optimizer, without scales.
    model = network()
    theirs = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in (0, 2, 3):
        theirs.zero_grad()
        backward(model, step)
        theirs.step()
    for mine, wanted in zip(models[1].parameters(), model.parameters()):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_what_is_attached_to_optimizers_refuses_their_wrappers(one_rank: None) -> None:
    model = network()
    wrapper: Any = Wrapper(make(model))
    for attach in (
        lambda: tilestep.shard(wrapper, model),
        lambda: tilestep.overlap(wrapper, model),
        lambda: tilestep.offload(wrapper),
        lambda: tilestep.capture(wrapper),
        lambda: tilestep.joint_norm([wrapper, make(network())]),
    ):
        with pytest.raises((ValueError, tilestep.CaptureError), match="this is a framework's wrapper, as Lightning's"):
            attach()
    backward(model, 0)
    wrapper.step()


def test_a_class_with_methods_of_its_own_is_no_wrapper() -> None:
    class Counting:
        """Asked for what is not there."""

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    class Mine(Counting, tilestep.AdamW):  # type: ignore[misc, name-defined]
        def step(self, closure: Any = None, **options: Any) -> Any:
            self.count = getattr(self, "count", 0) + 1
            return super().step(closure, **options)

    model = network()
    optimizer = Mine(model.parameters(), lr=0.1)
    backward(model, 0)
    optimizer.step()
    assert optimizer.count == 1 and len(optimizer.state) == 4
