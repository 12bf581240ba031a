"""Gradients that go to the host while backward runs, and are added up there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offloaded_pairs import on_host
from torch import nn

import tilestep
from tilestep.memory.host import HostState
from tilestep.memory.offload import move_state
from tilestep.memory.offloaded import Bandwidths, plan_for
from tilestep.memory.streaming import StreamedState

Kept = Callable[[Any], Any]


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Linear(300, 90), nn.LayerNorm(90), nn.Linear(90, 1))
    made[0].bias.requires_grad_(False)
    return made.to(dtype)


def kept_on_host(optimizer: Any) -> Any:
    """Updated on the CPU."""
    device = optimizer.param_groups[0]["params"][0].device
    return move_state(optimizer, HostState(device, 20_000, keeps_gradients=True), "cpu", "for a test")


def kept_and_streamed(optimizer: Any) -> Any:
    """Updated where the parameters are, from gradients on the host."""
    device = optimizer.param_groups[0]["params"][0].device
    return move_state(optimizer, StreamedState(device, 20_000, 3, keeps_gradients=True), "gpu", "for a test")


@pytest.fixture(params=[kept_on_host, kept_and_streamed], ids=["on the CPU", "streamed"])
def kept(request: pytest.FixtureRequest) -> Kept:
    return request.param


class Training:
    """The same model twice, one with its gradients on the host."""

    def __init__(self, kept: Kept, dtype: torch.dtype = torch.float32, **given: Any) -> None:
        self.plain, self.moved = model(dtype), model(dtype)
        self.reference = tilestep.AdamW(self.plain.parameters(), lr=1e-2, **given)
        self.optimizer = kept(tilestep.AdamW(self.moved.parameters(), lr=1e-2, **given))
        self.generator = torch.Generator().manual_seed(1)

    def backward(self, scale: Any = lambda optimizer, loss: loss) -> None:
        dtype = self.plain[0].weight.dtype
        data = torch.randn(5, 7, generator=self.generator).to(dtype)
        for net, optimizer in ((self.plain, self.reference), (self.moved, self.optimizer)):
            scale(optimizer, net(data).square().mean()).backward()

    def compare(self) -> None:
        for left, right in zip(self.plain.parameters(), self.moved.parameters()):
            assert torch.equal(left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_leave_the_device_and_are_added_up(dtype: torch.dtype, kept: Kept) -> None:
    training = Training(kept, dtype, max_grad_norm=0.5)
    for step in range(6):
        for _ in range(1 + step % 3):
            training.backward()
            assert all(param.grad is None for param in training.moved.parameters())
        training.reference.step()
        training.optimizer.step()
        training.reference.zero_grad()
        assert torch.equal(training.reference.grad_norm, training.optimizer.grad_norm)
        training.compare()


def test_a_step_uses_them_up_and_zero_grad_drops_them(kept: Kept) -> None:
    training = Training(kept)
    training.backward()
    training.optimizer.zero_grad()
    training.reference.zero_grad()
    before = [param.detach().clone() for param in training.moved.parameters()]
    training.optimizer.step()
    assert all(map(torch.equal, before, training.moved.parameters()))
    training.backward()
    for _ in range(2):
        training.optimizer.step()
    training.reference.step()
    training.compare()


def test_gradients_set_by_hand_count(kept: Kept) -> None:
    training = Training(kept)
    for net in (training.plain, training.moved):
        net[2].weight.grad = torch.ones(90, 300)
    training.reference.step()
    training.optimizer.step()
    training.compare()
    assert training.moved[2].weight.grad is None


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_, step"])
def test_a_scaler(unscale: bool, kept: Kept) -> None:
    training = Training(kept, max_grad_norm=0.5)
    scalers = {
        id(optimizer): tilestep.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        for optimizer in (training.reference, training.optimizer)
    }
    for step in range(6):
        factor = float("inf") if step == 3 else 1.0
        training.backward(lambda optimizer, loss, factor=factor: scalers[id(optimizer)].scale(loss * factor))
        for optimizer in (training.reference, training.optimizer):
            scaler = scalers[id(optimizer)]
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        training.compare()
    scales = {scaler.get_scale() for scaler in scalers.values()}
    assert len(scales) == 1 and scales != {2.0**8}


def test_a_gradient_of_another_kind_is_an_error(kept: Kept) -> None:
    weight = nn.Parameter(torch.ones(50, 4))
    optimizer = kept(tilestep.SGD([weight], lr=1.0))
    torch.nn.functional.embedding(torch.tensor([1, 2]), weight, sparse=True).sum().backward()
    with pytest.raises(tilestep.GradientError, match="the gradient of parameter 0 of group 0 is sparse"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(50, 4))


def test_parameters_thaw_and_groups_are_added(kept: Kept) -> None:
    training = Training(kept)
    training.backward()
    for net, optimizer in ((training.plain, training.reference), (training.moved, training.optimizer)):
        net[0].bias.requires_grad_(True)
        optimizer.step()
        optimizer.zero_grad()
        net.extra = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [net.extra]})
    for _ in range(3):
        training.backward()
        for net in (training.plain, training.moved):
            (net.extra * 2).sum().backward()
        for optimizer in (training.reference, training.optimizer):
            optimizer.step()
            optimizer.zero_grad()
    training.compare()


def test_hooks_end_with_the_optimizer(kept: Kept) -> None:
    net = model()
    optimizer = kept(tilestep.AdamW(net.parameters()))
    gone = weakref.ref(optimizer.memory)
    del optimizer
    gc.collect()
    assert gone() is None
    net(torch.ones(2, 7)).sum().backward()
    assert net[0].weight.grad is not None


@pytest.mark.parametrize("rule", ["LAMB", "Adafactor", "Prodigy", "Muon", "SOAP"])
def test_rules_that_look_at_gradients_more_than_once(rule: str) -> None:
    """Passes over tensors, rows and columns read them where they are; matrix operations have them brought back."""
    plain, moved = model(), model()
    for net in (plain, moved):
        for param in net.parameters():
            param.requires_grad_(param.dim() == 2)
    reference = tilestep.Optimizer([p for p in plain.parameters() if p.requires_grad], rule)
    optimizer = kept_and_streamed(tilestep.Optimizer([p for p in moved.parameters() if p.requires_grad], rule))
    for step in range(4):
        for net, each in ((plain, reference), (moved, optimizer)):
            net(torch.full((3, 7), 0.1 * (step + 1))).square().mean().backward()
            each.step()
            each.zero_grad()
    for left, right in zip(plain.parameters(), moved.parameters()):
        assert torch.equal(left, right)


def test_an_exception_in_backward_leaves_what_zero_grad_drops(kept: Kept) -> None:
    training = Training(kept, max_grad_norm=0.5)
    for step in range(4):
        training.backward()
        if step % 2:
            for net in (training.plain, training.moved):
                handle = net[2].register_full_backward_hook(_fail)
                with pytest.raises(RuntimeError, match="interrupted"):
                    net(torch.ones(2, 7)).sum().backward()
                handle.remove()
            for optimizer in (training.reference, training.optimizer):
                optimizer.zero_grad()
            training.backward()
        for optimizer in (training.reference, training.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        training.compare()


def _fail(*_: Any) -> None:
    raise RuntimeError("interrupted")


def test_gradients_of_another_type(kept: Kept) -> None:
    weights = [nn.Parameter(torch.ones(300, dtype=torch.bfloat16)) for _ in range(2)]
    for weight in weights:
        weight.grad_dtype = torch.float32
    reference = tilestep.AdamW([weights[0]], max_grad_norm=1.0)
    optimizer = kept(tilestep.AdamW([weights[1]], max_grad_norm=1.0))
    for step in range(3):
        for weight, each in zip(weights, (reference, optimizer)):
            for _ in range(2):
                (weight.float() * torch.linspace(-1, 1 + step, 300)).square().sum().backward()
            assert step or weight.grad is None or weight.grad.dtype is torch.float32
            each.step()
            each.zero_grad()
    assert torch.equal(*weights)


def test_what_is_refused() -> None:
    net = model()
    optimizer = kept_and_streamed(tilestep.AdamW(net.parameters()))
    with pytest.raises(ValueError, match="offload it without gradients=True"):
        tilestep.overlap(optimizer, net)
    optimizer = tilestep.offload(tilestep.AdamW(model().parameters()), gradients=True)
    assert optimizer.offload_report().where == "here"


def test_what_is_chosen_counts_gradients() -> None:
    """They come in for an update on the device, and are there already for one on the host."""
    plan = plan_for(tilestep.AdamW(model().parameters()))
    known = Bandwidths(inward=1e9, outward=1e9, both=1e9, host=1e9)
    elements = plan.gradients // 4
    assert plan.on_device(known) == pytest.approx(8e-9 * elements)
    assert plan.on_device(known, kept=True) == pytest.approx(12e-9 * elements)
    assert plan.on_host(known) - plan.on_host(known, kept=True) == pytest.approx(4e-9 * elements)


def test_without_it_gradients_stay() -> None:
    net = model()
    optimizer = on_host(20_000)(tilestep.AdamW(net.parameters()))
    net(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    assert net[0].weight.grad is not None
