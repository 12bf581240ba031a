"""Misuse of scalers: a clear error, and nothing changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from amp_runs import parameters, scaled_backward

import tilestep

BAD_SCALES = [0.0, float("inf"), float("nan"), -2.0]
INF = float("inf")


def trained() -> tuple[list[torch.nn.Parameter], tilestep.Optimizer, tilestep.GradScaler]:
    """An optimizer that has taken a step through a scaler."""
    params = parameters()
    optimizer = tilestep.AdamW(params, lr=0.1, max_grad_norm=1.0)
    scaler = tilestep.GradScaler("cpu", 256.0)
    scaled_backward(scaler, params, 0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return params, optimizer, scaler


@contextmanager
def unchanged(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    before = copy.deepcopy([*params, optimizer.state_dict()["state"], [param.grad for param in params]])
    yield
    after = [*params, optimizer.state_dict()["state"], [param.grad for param in params]]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", BAD_SCALES)
def test_bad_scales_are_refused_by_our_scaler(scale: float) -> None:
    with pytest.raises(ValueError, match="Invalid loss scale"):
        tilestep.GradScaler("cpu", init_scale=scale)
    params, optimizer, scaler = trained()
    scaled_backward(scaler, params, 1)
    scaler.step(optimizer)
    saved = scaler.state_dict()
    with unchanged(params, optimizer):
        with pytest.raises(ValueError, match="Invalid loss scale"):
            scaler.update(scale)
        with pytest.raises(ValueError, match="Invalid loss scale"):
            scaler.update(torch.tensor(scale))
        with pytest.raises(ValueError, match="Invalid loss scale"):
            scaler.load_state_dict({**saved, "scale": scale, "growth_interval": 7})
    assert scaler.state_dict() == saved
    scaler.update(32)
    assert scaler.get_scale() == 32


@pytest.mark.parametrize("scale", BAD_SCALES)
def test_bad_scales_of_torchs_scaler_stop_the_step(scale: float) -> None:
    params, optimizer, _ = trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    for param in params:
        param.grad = torch.ones_like(param)
    with unchanged(params, optimizer), pytest.raises(tilestep.GradientError, match=r"loss scale is .* nothing was"):
        scaler.step(optimizer)
    # What the scaler had set for that step is gone: the next one is an ordinary step.
    reference, other, _ = trained()
    for param in reference:
        param.grad = torch.ones_like(param)
    other.step()
    optimizer.step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(params, reference))


def test_step_called_directly() -> None:
    params, optimizer, scaler = trained()
    scaled_backward(scaler, params, 1)
    with unchanged(params, optimizer), pytest.raises(tilestep.GradientError, match=r"call scaler\.step\(optimizer\)"):
        optimizer.step()
    scaler.step(optimizer)
    scaler.update()
    optimizer.step()


def test_step_called_directly_after_unscale_or_without_scale_is_allowed() -> None:
    params, optimizer, scaler = trained()
    scaled_backward(scaler, params, 1)
    scaler.unscale_(optimizer)
    scaler.scale(torch.ones(()))
    optimizer.step()
    scaler.update()
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert float(optimizer.state[params[0]]["step"]) == 3


def test_first_step_called_directly_is_told_at_update() -> None:
    params = parameters()
    scaler = tilestep.GradScaler("cpu")
    optimizer = tilestep.SGD(params, lr=0.1)
    scaled_backward(scaler, params, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"call scaler\.step\(optimizer\), not optimizer\.step\(\)"):
        scaler.update()


def test_unscale_twice_and_out_of_order() -> None:
    params, optimizer, scaler = trained()
    scaled_backward(scaler, params, 1)
    scaler.unscale_(optimizer)
    with unchanged(params, optimizer), pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with unchanged(params, optimizer):
        with pytest.raises(RuntimeError, match="after step"):
            scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.step(optimizer)


def test_closures_are_refused() -> None:
    params, optimizer, scaler = trained()
    scaled_backward(scaler, params, 1)
    with unchanged(params, optimizer):
        with pytest.raises(RuntimeError, match="Closure"):
            scaler.step(optimizer, closure=lambda: None)
        with pytest.raises(RuntimeError, match="Closure"):
            scaler.step(optimizer, lambda: None)


def test_a_step_that_fails_can_be_repeated() -> None:
    """A bad gradient under a scaler: corrected, the step divides by the scale once, not twice."""
    for scaler_class in (torch.amp.GradScaler, tilestep.GradScaler):
        params, optimizer, _ = trained()
        scaler = scaler_class("cpu", 4.0)
        scaled_backward(scaler, params, 1)
        dense = params[0].grad
        params[0].grad = dense.to_sparse()
        with unchanged(params[1:], optimizer), pytest.raises(tilestep.GradientError, match="sparse"):
            scaler.step(optimizer)
        params[0].grad = dense
        scaler.step(optimizer)
        wanted, other, _ = trained()
        scaled_backward(torch.amp.GradScaler("cpu", 1.0), wanted, 1)
        other.step()
        for mine, theirs in zip(params, wanted):
            torch.testing.assert_close(mine, theirs)


def test_without_any_gradient() -> None:
    """As in torch: the step does nothing, and the update says that nothing was checked."""
    for scaler, error in ((torch.amp.GradScaler("cpu"), AssertionError), (tilestep.GradScaler("cpu"), RuntimeError)):
        params = parameters()
        optimizer = tilestep.AdamW(params, max_grad_norm=1.0)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()  # state begins with the first step
        optimizer.zero_grad()
        scaler.scale(torch.ones(()))
        with unchanged(params, optimizer):
            scaler.step(optimizer)
        with pytest.raises(error, match="No "):
            scaler.update()


def test_step_before_scale() -> None:
    with pytest.raises(AssertionError, match="_scale is None"):
        tilestep.GradScaler("cpu").step(tilestep.SGD(parameters(), lr=0.1))


def test_a_parameter_that_is_listed_twice_is_not_unscaled_by_a_step() -> None:
    """Each of its updates would divide the gradient again."""
    weight = torch.nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = tilestep.SGD([{"params": [weight, weight]}], lr=0.1)
    scaler = tilestep.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    with pytest.raises(tilestep.GradientError, match="list it once"):
        scaler.step(optimizer)
    assert weight.tolist() == [1.0, 1.0, 1.0]
