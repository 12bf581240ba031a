"""Loss scaling and skipped steps on GPUs: the checks of tests/amp, several devices, and what a sequence launches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_scaler_orders as orders
import torch
from amp_runs import ORDERS, OVERFLOWS, Order, parameters, run, scaled_backward
from interpreted_decide import compare_decisions, compare_limits, skip_what_is_no_norm
from synchronization import no_synchronization
from test_grad_scaler import test_a_scaled_step_is_the_unscaled_one
from test_scaler_orders import (
    test_gradients_are_left_as_torch_fused_leaves_them,
    test_training_is_that_of_plain_torch,
)
from test_skipping import test_nonfinite_gradients_change_nothing, test_skip_above_a_norm

import tilestep

__all__ = [
    "test_a_scaled_step_is_the_unscaled_one",
    "test_gradients_are_left_as_torch_fused_leaves_them",
    "test_nonfinite_gradients_change_nothing",
    "test_skip_above_a_norm",
    "test_training_is_that_of_plain_torch",
]


@pytest.mark.parametrize("check", [compare_decisions, compare_limits, skip_what_is_no_norm])
def test_a_gpu_decides_as_the_host(check: Callable[[], None]) -> None:
    check()


@pytest.fixture
def device() -> str:
    """Where the checks of tests/amp run here."""
    return "cuda"


def assert_trained_as_on_one_cpu(order: Order, scaler: str, overflown: str, *devices: str) -> None:
    overflows = orders.overflow_on(*orders.ON_DEVICES[overflown])
    mine = run(orders.ours, orders.SCALERS[scaler], order, overflows, *devices)
    reference = run(orders.plain, torch.amp.GradScaler, order.without_optimizer_clip(), overflows)
    for param in mine.params:
        param.data = param.data.cpu()
    mine.state = [{key: value.cpu() for key, value in state.items()} for state in mine.state]
    orders.assert_same_training(mine, reference)


@pytest.mark.parametrize("overflown", orders.ON_DEVICES)
@pytest.mark.parametrize("order", [each for each in ORDERS if each.name in ("step", "max_grad_norm: step")])
def test_an_overflow_beside_the_cpu(order: Order, overflown: str) -> None:
    """Without `unscale_` and with our scaler: torch's own copies to the CPU may be read before they have arrived."""
    assert_trained_as_on_one_cpu(order, "tilestep", overflown, "cuda", "cpu")


@pytest.mark.two_gpus
@pytest.mark.parametrize("overflown", orders.ON_DEVICES)
@pytest.mark.parametrize("scaler", orders.SCALERS)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_an_overflow_on_any_of_two_gpus(order: Order, scaler: str, overflown: str) -> None:
    assert_trained_as_on_one_cpu(order, scaler, overflown, "cuda:0", "cuda:1")


def test_the_memory_of_limits_is_on_the_states_device_and_equal_on_all() -> None:
    def made(*devices: str) -> tilestep.Optimizer:
        weights = [torch.nn.Parameter(torch.ones(3, device=device)) for device in devices]
        return tilestep.Adagrad(weights, skip_above=tilestep.Sigma(6))

    def step(optimizer: tilestep.Optimizer) -> None:
        for weight in optimizer.param_groups[0]["params"]:
            weight.grad = torch.ones_like(weight)
        optimizer.step()

    def saved(optimizer: tilestep.Optimizer) -> torch.Tensor:
        return optimizer.state_dict()["param_groups"][0]["limits"]["Sigma"]

    first = made("cuda")
    assert saved(first).is_cuda  # its state begins in the constructor
    step(first)
    checkpoint = first.state_dict()
    checkpoint["param_groups"][0]["limits"] = {"Sigma": saved(first).cpu()}
    again = made("cuda")
    again.load_state_dict(checkpoint)
    step(again)
    assert saved(first)[0] == 1 and saved(again)[0] == 2
    both = made("cuda", "cpu")
    step(both)
    numbers = [numbers.cpu() for numbers in both.control.history.numbers]
    assert len(numbers) == 2
    torch.testing.assert_close(*numbers, rtol=1e-12, atol=0)


@pytest.mark.parametrize("overflow", ["none", "inf"])
def test_a_sequence_never_waits_and_launches_five_kernels(overflow: str) -> None:
    params = [param for _ in range(50) for param in parameters("cuda")]
    optimizer = tilestep.AdamW(params, max_grad_norm=1.0, skip_above=tilestep.TimesMean(3.0))
    scaler = tilestep.GradScaler("cuda")

    def finish() -> None:
        scaler.step(optimizer)
        scaler.update()

    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        scaled_backward(scaler, params, step)
        if overflow == "inf":
            OVERFLOWS["inf"][2](params)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            if step:
                with no_synchronization():
                    finish()
            else:
                finish()
            torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type is torch.autograd.DeviceType.CUDA]
    # Norm, the decision (which adds up the tiles' sums), the scalar pass, the update, and torch's update of the scale.
    assert len(kernels) <= 5, kernels
    assert int(optimizer.skipped_steps) == (3 if overflow == "inf" else 0)
