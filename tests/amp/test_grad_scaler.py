"""tilestep.GradScaler: what it shares with torch's, and what it does without."""

from __future__ import annotations

import copy
import math
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from amp_runs import OVERFLOWS, parameters, scaled_backward
from torch.utils._python_dispatch import TorchDispatchMode

import tilestep
from tilestep.optimizer.control import DeviceControl
from tilestep.runtime import GradNorm

RULES = ["AdamW", "SGD", "Lion", "LAMB", "Prodigy", "LARS"]


def make(rule: str, params: Any, **options: Any) -> tilestep.Optimizer:
    return tilestep.Optimizer(params, rule, lr=0.01, **options)


@pytest.mark.parametrize("rule", RULES)
def test_a_scaled_step_is_the_unscaled_one(rule: str, device: str) -> None:
    """To the bit in the gradients, as the scale is a power of two; rules of several passes too."""
    scaled, plain = parameters(device), parameters(device)
    scaler, unit = tilestep.GradScaler(device, 4096.0), torch.amp.GradScaler(device, 1.0)
    optimizers = make(rule, scaled, max_grad_norm=0.5), make(rule, plain, max_grad_norm=0.5)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaled_backward(scaler, scaled, step)
        scaled_backward(unit, plain, step)
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[1].step()
        torch.testing.assert_close(optimizers[0].grad_norm, optimizers[1].grad_norm, rtol=1e-6, atol=0)
        for mine, other in zip(scaled, plain):
            assert torch.equal(mine.grad, other.grad)
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """float16 gradients too, which torch's unscale_ refuses: they are widened before they are divided."""
    scaled, plain = parameters(dtype=dtype), parameters(dtype=dtype)
    optimizers = [make("AdamW", params, master_weights=dtype is not torch.float64) for params in (scaled, plain)]
    scaler = tilestep.GradScaler("cpu", 2.0**9)
    scaled_backward(scaler, scaled, 0)
    scaled_backward(torch.amp.GradScaler("cpu", 1.0), plain, 0)
    scaler.step(optimizers[0])
    optimizers[1].step()
    for mine, other in zip(scaled, plain):
        torch.testing.assert_close(mine, other)
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("kind", ["itself", "turned"])
def test_a_gradient_that_is_its_own_parameter_is_not_unscaled(kind: str) -> None:
    """That would divide by the scale what the step has written."""
    for scaler in (tilestep.GradScaler("cpu", 8.0), torch.amp.GradScaler("cpu", 8.0)):
        scaler.scale(torch.ones(()))
        start = torch.arange(1.0, 17.0).view(4, 4)
        param = torch.nn.Parameter(start.clone())
        gradient = start.t() if kind == "turned" else start
        param.grad = param.data.t() if kind == "turned" else param.data
        scaler.step(make("SGD", [param]))
        torch.testing.assert_close(param.detach(), start - 0.01 * gradient / 8, rtol=1e-6, atol=0)


def test_strided_gradients_are_unscaled_in_place() -> None:
    """Channels-last, transposed and sliced ones; an expanded one has no place for it."""
    shapes = {"last": (2, 3, 4, 5), "transposed": (6, 7), "sliced": (4, 5), "expanded": (3, 2)}
    params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    values["expanded"] = torch.ones(2).expand(3, 2)
    scaler = tilestep.GradScaler("cpu", 8.0)
    scaler.scale(torch.ones(()))
    grads = {name: value * 8 for name, value in values.items()}
    params["last"].grad = grads["last"].to(memory_format=torch.channels_last)
    params["transposed"].grad = grads["transposed"].t().contiguous().t()
    params["sliced"].grad = torch.zeros(8, 9)[1:5, 2:7].copy_(grads["sliced"])
    params["expanded"].grad = torch.full((2,), 8.0).expand(3, 2)
    optimizer = make("SGD", params.values())
    scaler.step(optimizer)
    for name, param in params.items():
        torch.testing.assert_close(param.detach(), -0.01 * values[name])
        torch.testing.assert_close(param.grad, grads[name] if name == "expanded" else values[name])


def test_state_dict_is_interchangeable() -> None:
    ours, plain = tilestep.GradScaler("cpu", 512.0, growth_interval=3), torch.amp.GradScaler("cpu")
    params = parameters()
    scaled_backward(ours, params, 0)
    ours.step(make("SGD", params))
    ours.update()
    plain.load_state_dict(ours.state_dict())
    assert plain.state_dict() == ours.state_dict()
    assert ours.state_dict()["_growth_tracker"] == 1
    back = tilestep.GradScaler("cpu")
    back.load_state_dict(plain.state_dict())
    for clone in (back, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert clone.state_dict() == ours.state_dict()
        scaled_backward(clone, parameters(), 0)


def test_other_optimizers_go_torchs_way() -> None:
    """One that is not ours, and both through one scaler: the flags of all decide about the scale."""
    params, others = parameters(), parameters()
    scaler, reference = tilestep.GradScaler("cpu", 64.0), torch.amp.GradScaler("cpu", 64.0)
    optimizers = [make("SGD", params), torch.optim.SGD(others, lr=0.01)]
    wanted = [parameters(), parameters()]
    references = [torch.optim.SGD(wanted[0], lr=0.01), torch.optim.SGD(wanted[1], lr=0.01)]
    for step, overflown in enumerate([None, 0, 1, None]):
        for used, lists, steps in ((scaler, [params, others], optimizers), (reference, wanted, references)):
            for index, (members, optimizer) in enumerate(zip(lists, steps)):
                optimizer.zero_grad()
                scaled_backward(used, members, step)
                if index == overflown:
                    OVERFLOWS["inf"][2](members)
            for optimizer in steps:
                used.step(optimizer)
            used.update()
        assert scaler.state_dict() == reference.state_dict()
    for mine, other in zip([*params, *others], [*wanted[0], *wanted[1]]):
        torch.testing.assert_close(mine, other)
    assert float(optimizers[0].skipped_steps) == 1


def test_disabled_is_a_plain_step() -> None:
    params = parameters()
    optimizer = make("SGD", params)
    scaler = tilestep.GradScaler("cpu", enabled=False)
    scaled_backward(scaler, params, 0)
    before, gradient = params[0].detach().clone(), params[0].grad.clone()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(params[0].detach(), before - 0.01 * gradient)


@pytest.mark.parametrize("value", [3e38, -1e30, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_finite_gradients_are_no_overflow(value: float, dtype: torch.dtype) -> None:
    """Their squares do not fit in float32."""
    param = torch.nn.Parameter(torch.ones(20_000, dtype=dtype))
    optimizer = make("SGD", [param], max_grad_norm=1.0)
    scaler = tilestep.GradScaler("cpu", 1024.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.full_like(param, value)
    scaler.step(optimizer)
    scaler.update()
    assert float(optimizer.skipped_steps) == 0 and scaler.get_scale() == 1024
    length = param.grad.double().norm()
    torch.testing.assert_close(optimizer.grad_norm.double(), length, rtol=1e-3, atol=0)
    assert param[0].item() == pytest.approx(1 - 0.01 * value / abs(value) / 20_000**0.5, rel=1e-2)


def test_large_finite_float64_gradients_are_no_overflow() -> None:
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = make("Lion", [param])
    scaler = tilestep.GradScaler("cpu", 1024.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.tensor([1e300, -1e300, 0.0], dtype=torch.float64)
    scaler.step(optimizer)
    assert float(optimizer.skipped_steps) == 0
    assert param.tolist() == [0.99, 1.01, 1.0]


@pytest.mark.parametrize("kind", [tilestep.GradScaler, torch.amp.GradScaler])
def test_a_plain_step_after_one_that_a_scaler_has_skipped_is_taken(kind: Any) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = tilestep.SGD([param], lr=0.5), kind("cpu", init_scale=4.0)
    for step in range(1, 3):
        optimizer.zero_grad()
        scaler.scale((param * math.inf).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert int(optimizer.skipped_steps) == step and param.tolist() == [1.5 - step / 2] * 2
        param.grad = torch.ones(2)
        optimizer.step()
        assert int(optimizer.skipped_steps) == step and param.tolist() == [1 - step / 2] * 2


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do; refuses to read a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "equal", "is_nonzero", "_to_copy"), name
        if not name.startswith("_record_function"):
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


def test_nothing_is_read_and_torch_launches_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own passes aside (they are not torch operations), all that is left is the update of the scale."""
    monkeypatch.setattr(DeviceControl, "update", lambda control, inputs, captured: None)
    monkeypatch.setattr(GradNorm, "sum_squares", lambda norm: norm.power_sum)
    params = parameters()
    optimizer = make("AdamW", params, max_grad_norm=1.0, skip_above=tilestep.TimesMean(3.0))
    scaler = tilestep.GradScaler("cpu")
    for step in range(2):
        scaled_backward(scaler, params, step)
        with Operations() as operations:
            scaler.step(optimizer)
            scaler.update()
    assert operations.seen == {"_amp_update_scale_": 1}
