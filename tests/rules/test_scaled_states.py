"""States of 16 bits with a scale for each parameter, against the same rules with states of the computation's type."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import tilestep
from tilestep.errors import RuleError
from tilestep.rules import Rule, State, registry
from tilestep.rules.compose import ema, scaled_states

LARGEST = 2.0**15


def trained(rule: Rule, steps: int = 20, dtype: torch.dtype = torch.float32, **options: Any) -> tilestep.Optimizer:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    params = [torch.nn.Parameter(drawn(*shape)) for shape in ((40, 30), (9,), (3, 4, 5, 2))]
    optimizer = tilestep.Optimizer(params, rule, **options)
    for step in range(steps):
        for param in params:
            # Of sizes whose squares float16 alone cannot hold.
            param.grad = drawn(*param.shape) * 10.0 ** (3 * (step % 3) - 3)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "options"),
    [("Adam", {"amsgrad": True}), ("AdamW", {}), ("Lion", {}), ("LAMB", {}), ("SGD", {"momentum": 0.9})],
)
def test_training_is_nearly_the_same(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    scaled = trained(scaled_states(registry[name]), dtype=dtype, lr=1e-3, **options)
    whole = trained(registry[name], dtype=dtype, lr=1e-3, **options)
    for mine, theirs in zip(scaled.param_groups[0]["params"], whole.param_groups[0]["params"], strict=True):
        # Lion moves by lr or not at all: an element whose sign was a tie of roundings is two of them off.
        room = 2.1e-3 if name == "Lion" else 0.01 * float(theirs.detach().abs().amax())
        torch.testing.assert_close(mine, theirs, rtol=0, atol=room)
        for key in set(whole.state[theirs]) - {"step"}:
            kept, scale = scaled.state[mine][key], scaled.state[mine][f"{key}_scale"]
            assert kept.dtype is torch.float16 and kept.abs().amax() == LARGEST
            value, exact = kept.double() * scale.double(), whole.state[theirs][key].double()
            torch.testing.assert_close(value, exact, rtol=0.02, atol=2e-3 * float(exact.abs().amax()))


def test_equations() -> None:
    """Two steps of momentum, written out; the largest element is kept exactly, and zeros have a scale of one."""
    rule = scaled_states(registry["SGD"])
    param, grad = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64), torch.tensor([4.0, -1.0, 0.0]).double()
    options = {**registry["SGD"].hyperparameters, "lr": 0.5, "momentum": 0.5}
    kept, scale = torch.zeros(3, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    momenta = [grad, 0.5 * grad + grad]
    for momentum in momenta:
        param, kept, scale = rule(param, grad, kept, scale, **options, step=1)
        assert float(scale) == float(momentum.abs().amax()) / LARGEST
        torch.testing.assert_close(kept * scale, momentum, rtol=1e-15, atol=0)
    torch.testing.assert_close(param, torch.tensor([1.0, 2.0, 0.0]).double() - 0.5 * sum(momenta), rtol=1e-15, atol=0)
    _, kept, scale = rule(param, torch.zeros(3).double(), torch.zeros(3).double(), scale, **options, step=1)
    assert float(scale) == 1 and not kept.any()


def test_what_a_rule_does_not_use_is_not_kept() -> None:
    plain = trained(scaled_states(registry["Adam"]), steps=1)
    kept = plain.state[plain.param_groups[0]["params"][0]]
    assert set(kept) == {"step", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"}
    still = trained(scaled_states(registry["SGD"]), steps=1)
    assert set(still.state[still.param_groups[0]["params"][0]]) == {"step"}


def in_place(param: Any, grad: Any, velocity: Any, *, lr: Any = 0.1) -> tuple[Any, ...]:
    """A rule that writes into its state."""
    velocity.mul_(0.5).add_(grad)
    param.sub_(lr * velocity)
    return param, velocity


def test_rules_that_work_in_place_and_rules_of_rules() -> None:
    optimizer = trained(ema(scaled_states(tilestep.rule(in_place)), 0.5), steps=3)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert state["velocity"].dtype is torch.float16 and state["velocity"].any()
    assert state["ema"].dtype is torch.float32
    assert trained(scaled_states(ema(registry["Lion"], 0.5)), steps=3).state


def test_masters_have_states_of_16_bits_too() -> None:
    optimizer = trained(scaled_states(registry["AdamW"]), dtype=torch.bfloat16, master_weights=True)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert state["master_param"].dtype is torch.float32 and state["exp_avg"].dtype is torch.float16


def test_training_goes_on_from_a_checkpoint_to_the_same_bits() -> None:
    first = trained(scaled_states(registry["AdamW"]), steps=3)
    params = [torch.nn.Parameter(param.detach().clone()) for param in first.param_groups[0]["params"]]
    second = tilestep.Optimizer(params, scaled_states(registry["AdamW"]))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for optimizer in (first, second):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        optimizer.step()
    for mine, other in zip(first.param_groups[0]["params"], params, strict=True):
        assert torch.equal(mine, other)
        assert second.state[other]["exp_avg"].dtype is torch.float16
        assert all(torch.equal(value, second.state[other][key]) for key, value in first.state[mine].items())
    assert pickle.loads(pickle.dumps(first._rule)).states["exp_avg"].dtype is torch.float16


def test_refusals() -> None:
    with pytest.raises(RuleError, match=r"no state .* initialized with zeros"):
        scaled_states(tilestep.rule(lambda param, grad, *, lr=0.1: (param - lr * grad,)))
    with pytest.raises(RuleError, match="requires a rule"):
        scaled_states("AdamW")  # type: ignore[arg-type]
    with pytest.raises(RuleError, match=r"dtype=torch.float16 of a state: shape='scalar' supports float32 and float64"):
        State(shape="scalar", dtype=torch.float16)
    with pytest.raises(RuleError, match="floating point"):
        State(dtype=torch.int8)


@pytest.mark.parametrize("target", [None, "scaled_float16", "int8"])
def test_its_checkpoints_load_by_value_into_other_formats(target: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(80, 64, generator=generator)) for _ in range(2)]
    scaled = tilestep.Optimizer(weights[:1], scaled_states(registry["AdamW"]))
    weights[0].grad = torch.randn(80, 64, generator=generator) * 1e-6
    scaled.step()
    state = scaled.state[weights[0]]
    wanted = {name: state[name].float() * state[f"{name}_scale"] for name in ("exp_avg", "exp_avg_sq")}
    wide = tilestep.full_precision(scaled.state_dict())["state"][0]
    assert set(wide) == {"step", *wanted} and all(torch.equal(wide[name], value) for name, value in wanted.items())
    plain: Any = tilestep.AdamW(weights[1:], state_dtype=target)
    saved = scaled.state_dict()
    plain.load_state_dict(saved)
    unscaled = tilestep.full_precision(plain.state_dict())["state"][0]
    room = {None: 0.0, "scaled_float16": 1e-7, "int8": 5e-4}[target]
    for name, value in wanted.items():
        assert float((unscaled[name] - value).square().sum()) <= room * float(value.square().sum())
