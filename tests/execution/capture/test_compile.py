"""Optimizer steps inside functions that torch compiles: one opaque call, compiled around once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import tilestep


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def frames() -> int:
    """Frames that Dynamo has translated."""
    return counters["frames"]["ok"]


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def trained(decorate: Callable[[Any], Any], settled: list[int] | None = None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and parameters of a run whose learning rate, clip and weight decay change at every step."""
    net = model()
    optimizer = tilestep.AdamW(net.parameters(), lr=0.1, max_grad_norm=0.5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=12)

    @decorate
    def train(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = []
    for step in range(10):
        losses.append(float(train(batch(step)).detach()))
        scheduler.step()
        optimizer.param_groups[0]["max_grad_norm"] = 0.5 + 0.1 * step
        optimizer.param_groups[0]["weight_decay"] = 0.01 * step
        if settled is not None:
            settled.append(frames())
    assert optimizer.state[net[0].weight]["step"] == 10
    return losses, [param.detach() for param in net.parameters()]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_inside_a_compiled_function(backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    settled: list[int] = []
    losses, params = trained(lambda function: torch.compile(function, backend=counter), settled)
    assert counter.frame_count >= 1
    assert settled[0] == settled[-1] > 0, "something was compiled again after the first step"
    expected_losses, expected = trained(lambda function: function)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for mine, other in zip(params, expected):
        torch.testing.assert_close(mine, other)


def test_nothing_of_the_step_itself_is_compiled() -> None:
    net = model()
    optimizer = tilestep.AdamW(net.parameters(), lr=0.1)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    counter = CompileCounterWithBackend("eager")
    step = torch.compile(lambda: optimizer.step(), backend=counter)
    for _ in range(4):
        step()
        optimizer.param_groups[0]["lr"] *= 0.5
    assert counter.frame_count == 0
    breaks = " ".join(counters["graph_break"])
    assert "an optimizer's step is one opaque call" in breaks
    assert optimizer.state[net[0].weight]["step"] == 4


def test_the_step_method_itself_compiled() -> None:
    net = model()
    optimizer = tilestep.SGD(net.parameters(), lr=0.5)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    before = net[0].weight.detach().clone()
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        step()
    torch.testing.assert_close(net[0].weight.detach(), before - 1.0)


def test_a_whole_graph_is_refused_with_the_reason() -> None:
    net = model()
    optimizer = tilestep.SGD(net.parameters(), lr=0.5)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    before = net[0].weight.detach().clone()
    with pytest.raises(Exception, match="one opaque call"):
        torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)()
    assert torch.equal(net[0].weight, before)


def test_hooks_and_closures_run_inside_compiled_functions() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = tilestep.SGD([weight], lr=0.5)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss

    loss = torch.compile(lambda: optimizer.step(closure), backend="eager")()
    assert seen == ["before", "after"] and loss == 2 and weight.tolist() == [0.5, 0.5]


def test_compiled_models_around_eager_steps() -> None:
    net = model()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, backend=counter)
    optimizer = tilestep.AdamW(compiled.parameters(), lr=0.1, max_grad_norm=1.0)
    settled = []
    for step in range(5):
        compiled(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9
        settled.append(frames())
    assert settled[0] == settled[-1] == 1
    assert optimizer.state[net[0].weight]["step"] == 5


def test_a_scaler_inside_a_compiled_function() -> None:
    net = model()
    optimizer = tilestep.AdamW(net.parameters(), lr=0.1)
    scaler = tilestep.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    def train(x: torch.Tensor, overflow: bool) -> None:
        scaler.scale(net(x).square().mean()).backward()
        if overflow:
            net[0].weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    compiled = torch.compile(train, backend="eager")
    settled = []
    for step in range(8):
        compiled(batch(step), step == 5)
        settled.append(frames())
    # The step that overflows takes another branch of `train`.
    assert settled[0] == settled[4] and settled[6] == settled[7]
    assert optimizer.state[net[0].weight]["step"] == 7 and optimizer.skipped_steps == 1


CLIPS = {"none": None, "torch": torch.nn.utils.clip_grad_norm_, "tilestep": tilestep.clip_grad_norm_}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("kind", [tilestep.GradScaler, torch.amp.GradScaler], ids=["tilestep", "torch"])
def test_every_order_of_a_scaler_compiles_once(kind: Any, unscale: bool, clip: str, enabled: bool) -> None:
    """The scale grows in between; parameters and scale are those of steps without compilation."""

    def run(decorate: Callable[[Any], Any]) -> tuple[list[torch.Tensor], float, list[int]]:
        net = model()
        optimizer = tilestep.AdamW(net.parameters(), lr=0.1, max_grad_norm=0.5)
        scaler = kind("cpu", init_scale=8.0, growth_interval=2, enabled=enabled)

        @decorate
        def train(x: torch.Tensor) -> None:
            scaler.scale(net(x).square().mean()).backward()
            if unscale:
                scaler.unscale_(optimizer)
            if CLIPS[clip] is not None:
                CLIPS[clip](net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        settled = []
        for step in range(6):
            train(batch(step))
            settled.append(frames())
        return [param.detach() for param in net.parameters()], scaler.get_scale(), settled

    mine, scale, settled = run(lambda function: torch.compile(function, backend="eager"))
    assert settled[0] == settled[-1] > 0
    expected, other_scale, _ = run(lambda function: function)
    assert scale == other_scale == (64.0 if enabled else 1.0)
    for left, right in zip(mine, expected):
        torch.testing.assert_close(left, right)


def test_norms_are_opaque_calls() -> None:
    tensors = [torch.full((3,), 2.0), torch.full((2, 2), 1.0)]
    counter = CompileCounterWithBackend("eager")
    twice = torch.compile(lambda: tilestep.total_norm(tensors) * 2, backend=counter)
    assert [float(twice()) for _ in range(3)] == [8.0] * 3
    assert counter.frame_count == 1, "the product is compiled, once, and nothing of the norm"
