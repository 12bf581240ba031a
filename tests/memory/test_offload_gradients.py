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


def test_a_gradient_of_another_kind_is_an_error(kept: Kept) -> None:
    weight = nn.Parameter(torch.ones(50, 4))
    optimizer = kept(tilestep.SGD([weight], lr=1.0))
    torch.nn.functional.embedding(torch.tensor([1, 2]), weight, sparse=True).sum().backward()
    with pytest.raises(tilestep.GradientError, match="the gradient of parameter 0 of group 0 is sparse"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(50, 4))


def test_hooks_end_with_the_optimizer(kept: Kept) -> None:
    net = model()
    optimizer = kept(tilestep.AdamW(net.parameters()))
    gone = weakref.ref(optimizer.memory)
    del optimizer
    gc.collect()
    assert gone() is None
    net(torch.ones(2, 7)).sum().backward()
    assert net[0].weight.grad is not None


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


def test_a_gradient_of_a_group_that_leaves_goes_back_to_its_parameter(kept: Kept) -> None:
    """And is used when the group has come back, as torch's on the parameter would be."""
    training = Training(kept)
    for optimizer, net in ((training.reference, training.plain), (training.optimizer, training.moved)):
        optimizer.param_groups[0]["params"] = list(net[0].parameters())
        optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.1})
    for _ in range(2):
        training.backward()
        left = [optimizer.param_groups.pop() for optimizer in (training.reference, training.optimizer)]
        for optimizer, net in ((training.reference, training.plain), (training.optimizer, training.moved)):
            optimizer.step()
            net[0].zero_grad()
        training.compare()
        for plain, moved in zip(training.plain[2].parameters(), training.moved[2].parameters()):
            assert torch.equal(plain.grad, moved.grad)
        for optimizer, group in zip((training.reference, training.optimizer), left):
            optimizer.param_groups.append(group)
            optimizer.step()
            optimizer.zero_grad()
        training.compare()


def test_gradients_of_a_new_group_go_to_the_host_before_any_step(kept: Kept) -> None:
    net = model()
    optimizer = kept(tilestep.AdamW(net[0].parameters()))
    optimizer.add_param_group({"params": net[2].parameters()})
    net(torch.ones(2, 7)).sum().backward()
    assert [param.grad for param in (net[0].weight, net[2].weight, net[2].bias)] == [None] * 3


def _fail(*_: Any) -> None:
    raise RuntimeError("interrupted")


def test_what_is_refused() -> None:
    net = model()
    optimizer = kept_and_streamed(tilestep.AdamW(net.parameters()))
    with pytest.raises(ValueError, match="offload it without gradients=True"):
        tilestep.overlap(optimizer, net)
    optimizer = tilestep.offload(tilestep.AdamW(model().parameters()), gradients=True)
    assert optimizer.offload_report().where == "here"


def test_without_it_gradients_stay() -> None:
    net = model()
    optimizer = on_host(20_000)(tilestep.AdamW(net.parameters()))
    net(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    assert net[0].weight.grad is not None
