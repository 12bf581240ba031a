"""`reset_state`: an optimizer goes on as a new optimizer of the same parameters does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from matrix_rules import MATRIX_RULES
from twins import make_params, set_gradients, train, twins

import tilestep

SHAPES = [(5, 3), (4, 6)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def same_states(left: Any, right: Any, mine: list[Any], other: list[Any]) -> None:
    for one, two in zip(mine, other, strict=True):
        assert left.state[one].keys() == right.state[two].keys()
        for key, value in left.state[one].items():
            assert torch.equal(bits(value), bits(right.state[two][key])), key


@pytest.mark.parametrize("name", sorted(tilestep.registry))
def test_every_rule_begins_anew(name: str) -> None:
    params = make_params(SHAPES if name in MATRIX_RULES else [*SHAPES, (), (0,)])
    optimizer = getattr(tilestep, name)(params, lr=0.01)
    train([(optimizer, params)], range(3))
    addresses = [value.data_ptr() for param in params for value in optimizer.state[param].values()]
    optimizer.reset_state()
    assert all(optimizer.state[param]["step"] == 0 for param in params)
    other = twins(params)
    new = getattr(tilestep, name)(other, lr=0.01)
    train([(optimizer, params), (new, other)], range(3, 6))
    assert all(map(torch.equal, params, other))
    same_states(optimizer, new, params, other)
    assert addresses == [value.data_ptr() for param in params for value in optimizer.state[param].values()]


@pytest.mark.parametrize("format", ["bfloat16", "int8", "float8_e4m3", "int4"])
@pytest.mark.parametrize("rule", ["AdamW", "Prodigy"])
def test_states_of_few_bits(rule: str, format: str) -> None:
    params = make_params([(64, 128), (7,)])
    optimizer = getattr(tilestep, rule)(params, state_dtype=format, skip_nonfinite=True)
    train([(optimizer, params)], range(3))
    optimizer.reset_state()
    other = twins(params)
    new = getattr(tilestep, rule)(other, state_dtype=format, skip_nonfinite=True)
    train([(optimizer, params), (new, other)], range(2))
    assert all(map(torch.equal, params, other))
    same_states(optimizer, new, params, other)


@pytest.mark.parametrize("master_weights", [True, "remainder", "kahan", "int8"])
@pytest.mark.parametrize("rule", ["AdamW", "ScheduleFreeAdamW"])
def test_masters_stay(rule: str, master_weights: Any) -> None:
    params = make_params([(64, 128), (7,)], torch.bfloat16)
    optimizer = getattr(tilestep, rule)(params, lr=0.01, master_weights=master_weights)
    train([(optimizer, params)], range(3))
    exact = [tilestep.optimizer.masters.exact_values(param, optimizer.state[param]) for param in params]
    before = [{key: value.clone() for key, value in optimizer.state[param].items()} for param in params]
    masters = tilestep.optimizer.masters.MASTER_KEYS
    assert not all(torch.equal(value, param.float()) for value, param in zip(exact, params))
    optimizer.reset_state()
    for param, old, value in zip(params, before, exact):
        state = optimizer.state[param]
        for key in state:
            if key in masters:
                assert torch.equal(state[key], old[key])
            elif key == "z":
                assert torch.equal(state[key], value)
            else:
                start = 0.0 if key == "step" else tilestep.registry[rule].states[key].init
                assert (state[key] == start).all() and not torch.equal(state[key], old[key])
    # The masters' low bits count in the next step, as those of a checkpoint do.
    saved = copy.deepcopy(optimizer.state_dict())
    train([(optimizer, params)], range(3, 5))
    assert all(optimizer.state[param]["step"] == 2 for param in params)
    if rule == "AdamW":
        other = [torch.nn.Parameter(value.bfloat16()) for value in exact]
        resumed = tilestep.AdamW(other, lr=0.01, master_weights=master_weights)
        resumed.load_state_dict(saved)
        train([(resumed, other)], range(3, 5))
        assert all(map(torch.equal, params, other))
        same_states(optimizer, resumed, params, other)


def test_what_stays_and_what_is_refused() -> None:
    params = make_params()
    optimizer = tilestep.ScheduleFreeAdamW(params, lr=0.1, skip_above=tilestep.TimesMean(3.0))
    optimizer.reset_state()  # before any step there is nothing to do
    assert not optimizer.state
    train([(optimizer, params)], range(2))
    limits = optimizer.state_dict()["param_groups"][0]["limits"]
    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.eval()
    with pytest.raises(RuntimeError, match=r"call train\(\) before reset_state"):
        optimizer.reset_state()
    optimizer.train()
    optimizer.reset_state()
    assert optimizer.param_groups[0]["lr"] == 0.05
    after = optimizer.state_dict()["param_groups"][0]["limits"]
    assert str(after) == str(limits)


def test_state_that_was_loaded_and_functions_of_the_step() -> None:
    params = make_params()
    optimizer = tilestep.SGD(params, lr=lambda step: 0.1 / step, momentum=0.9)
    train([(optimizer, params)], range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    other = twins(params)
    again = tilestep.SGD(other, lr=lambda step: 0.1 / step, momentum=0.9)
    again.load_state_dict(saved)
    again.reset_state()  # before there is a plan
    optimizer.reset_state()
    for model in (params, other):
        set_gradients(model)
    optimizer.step()
    again.step()
    assert optimizer.current("lr") == 0.1
    assert all(map(torch.equal, params, other))
