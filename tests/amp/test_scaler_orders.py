"""Every order of scaler calls against plain torch, overflows injected: the table of docs/gradscaler.md."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from amp_runs import (
    INF,
    NAN,
    ORDERS,
    OVERFLOWS,
    STEPS,
    Order,
    Overflows,
    Parameters,
    Run,
    parameters,
    run,
    scaled_backward,
)
from several_devices import spread_over_devices

import tilestep

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "gradscaler.md"
SCALERS = {"torch": torch.amp.GradScaler, "tilestep": tilestep.GradScaler}


def ours(params, **options):
    return tilestep.AdamW(params, lr=0.05, weight_decay=0.1, **options)


def plain(params):
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1, foreach=False, fused=False)


def fused(params):
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1, fused=True)


def assert_same_training(mine: Run, wanted: Run) -> None:
    assert (mine.scale, mine.growth) == (wanted.scale, wanted.growth)
    for param, other in zip(mine.params, wanted.params):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)
    for state, other in zip(mine.state, wanted.state):
        # Without a single step torch has no state yet; ours is there and says step 0.
        assert float(state["step"]) == float(other.get("step", 0.0))
        for name in ("exp_avg", "exp_avg_sq"):
            expected = other.get(name, torch.zeros_like(state[name]))
            torch.testing.assert_close(state[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overflows", OVERFLOWS)
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_training_is_that_of_plain_torch(order: Order, scaler: str, overflows: str, device: str) -> None:
    mine = run(ours, SCALERS[scaler], order, OVERFLOWS[overflows], device)
    reference = run(plain, torch.amp.GradScaler, order.without_optimizer_clip(), OVERFLOWS[overflows], device)
    assert_same_training(mine, reference)


def overflow_on(*devices: int, count: int = 2) -> Overflows:
    """An overflow in the second step and one in the last, on some of several devices."""

    def put(params: Parameters) -> None:
        for place, param in enumerate(params):
            if place % count in devices:
                param.grad.view(-1)[0] = (INF, NAN, -INF)[place % 3]  # type: ignore[union-attr]

    return {1: put, STEPS - 1: put}


ON_DEVICES = {"the first": (0,), "the second": (1,), "both": (0, 1)}


@pytest.mark.parametrize("overflown", ON_DEVICES)
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_an_overflow_on_any_of_several_devices_skips_the_step_on_all(
    order: Order, scaler: str, overflown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflows = overflow_on(*ON_DEVICES[overflown])
    reference = run(plain, torch.amp.GradScaler, order.without_optimizer_clip(), overflows)
    spread_over_devices(monkeypatch, 2)
    mine = run(ours, SCALERS[scaler], order, overflows)
    assert_same_training(mine, reference)
    assert all(float(state["step"]) == STEPS - 2 for state in mine.state)


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_an_optimizer_that_skips_by_itself_too_trains_alike(order: Order, scaler: str) -> None:
    overflows = OVERFLOWS["several_in_a_row"]
    mine = run(partial(ours, skip_nonfinite=True), SCALERS[scaler], order, overflows)
    assert_same_training(mine, run(plain, torch.amp.GradScaler, order.without_optimizer_clip(), overflows))


@pytest.mark.parametrize("scaler", SCALERS)
def test_gradients_that_are_accumulated_are_unscaled_once(scaler: str) -> None:
    """Several backwards under one scale; an overflow in one of them skips the step."""
    runs = []
    for make, kind in ((ours, SCALERS[scaler]), (plain, torch.amp.GradScaler)):
        params = parameters()
        optimizer, scale = make(params), kind("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(STEPS):
            for part in range(3):
                scaled_backward(scale, params, 10 * step + part)
                if (step, part) == (2, 1):
                    params[1].grad.fill_(INF)
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
        runs.append(Run(params, [dict(optimizer.state[param]) for param in params], scale.get_scale(), 0))
    assert_same_training(*runs)
    assert float(runs[0].state[0]["step"]) == STEPS - 1


@pytest.mark.parametrize("overflows", ["none", "inf", "first_step", "several_in_a_row"])
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_gradients_are_left_as_torch_fused_leaves_them(order: Order, scaler: str, overflows: str, device: str) -> None:
    """The optimizer's own clip leaves no trace in the gradients: torch's fused one runs the same order without it."""
    mine = run(ours, SCALERS[scaler], order, OVERFLOWS[overflows], device)
    reference = dataclasses.replace(order, max_grad_norm=False)
    wanted = run(fused, torch.amp.GradScaler, reference, OVERFLOWS[overflows], device)
    for gradients, others in zip(mine.gradients, wanted.gradients):
        for gradient, other in zip(gradients, others):
            torch.testing.assert_close(gradient, other, rtol=1e-6, atol=0, equal_nan=True)


def test_clip_of_scaled_gradients_clips_wrongly_as_in_torch() -> None:
    """So that the order's equality above means something: it trains otherwise than the right one."""
    wrong, right = (run(plain, torch.amp.GradScaler, order, {}) for order in (ORDERS[7], ORDERS[2]))
    assert ORDERS[7].clip_scaled and ORDERS[2].clip
    assert not torch.allclose(wrong.state[0]["exp_avg"], right.state[0]["exp_avg"], rtol=0.1)


def test_clipping_and_overflows_happen_in_these_runs() -> None:
    clipped, unclipped = (run(plain, torch.amp.GradScaler, order, {}) for order in (ORDERS[2], ORDERS[1]))
    assert not torch.allclose(clipped.state[0]["exp_avg"], unclipped.state[0]["exp_avg"], rtol=0.1)
    overflown = run(plain, torch.amp.GradScaler, ORDERS[0], OVERFLOWS["several_in_a_row"])
    assert float(overflown.state[0]["step"]) == STEPS - 3
    assert overflown.scale == 1024 / 2**3 * 2


def test_the_documented_table_has_these_orders() -> None:
    section = DOCUMENT.read_text().split("## Every order of calls")[1].split("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    named = {row[1].strip().strip("`"): [cell.strip() for cell in row[2:-1]] for row in rows}
    assert list(named) == [order.name for order in ORDERS]
    for order in ORDERS:
        clips, _, after, after_overflow = named[order.name]
        assert ("unscaled" in clips) == (order.clip or order.max_grad_norm)
        assert ("scaled, wrongly" in clips) == order.clip_scaled
        clipped_in_place = order.clip or order.clip_scaled
        assert after == ("unscaled, clipped" if clipped_in_place else "unscaled")
        assert after_overflow.startswith("unscaled" if order.unscale else "scaled")


def test_two_devices_that_overflow_count_as_one() -> None:
    """Torch adds the devices' flags: the sum of two is 2."""
    params = [torch.nn.Parameter(torch.ones(3))]
    optimizer = ours(params)
    params[0].grad = torch.ones(3)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(2.0)
    optimizer.step()
    assert torch.equal(params[0], torch.ones(3)) and float(optimizer.skipped_steps) == 1
