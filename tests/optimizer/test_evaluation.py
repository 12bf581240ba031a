"""Weights to evaluate: put in, taken out bit for bit, saved and loaded in either state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from twins import assert_unchanged, everything, make_params, train, twins

import tilestep
import tilestep.optimizer.optimizer as optimizer_module
from tilestep.rules.compose import ema, lookahead

RULES: dict[str, Any] = {
    "ScheduleFreeSGD": tilestep.registry["ScheduleFreeSGD"],
    "ScheduleFreeAdamW": tilestep.registry["ScheduleFreeAdamW"],
    "ema": ema(tilestep.registry["AdamW"], 0.9),
    "lookahead": lookahead(tilestep.registry["SGD"], k=2),
}


def trained(rule: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> tuple[Any, list[Any]]:
    params = make_params(dtype=dtype)
    optimizer = tilestep.Optimizer(params, rule, lr=0.1, **kwargs)
    train([(optimizer, params)], range(5))
    return optimizer, params


def wanted(name: str, state: Any, param: torch.Tensor) -> torch.Tensor:
    if name == "ema":
        return state["ema"]
    return state["slow"] if name == "lookahead" else param + (1 - 1 / 0.9) * (state["z"] - param)


@pytest.mark.parametrize("name", RULES)
def test_in_and_out(name: str) -> None:
    optimizer, params = trained(RULES[name])
    control, twin = trained(RULES[name])
    before = everything(optimizer)
    averages = [wanted(name, optimizer.state[param], param.detach()) for param in params]
    optimizer.eval()
    for param, average in zip(params, averages):
        torch.testing.assert_close(param.detach(), average)
    assert not torch.equal(params[1], before["params"][1])
    optimizer.eval()
    with pytest.raises(RuntimeError, match="call train"):
        optimizer.step()
    optimizer.train()
    assert_unchanged(optimizer, before)
    train([(optimizer, params), (control, twin)], range(5, 8))
    assert all(map(torch.equal, params, twin))


def test_a_block_of_evaluation() -> None:
    optimizer, params = trained(RULES["ema"])
    before = everything(optimizer)
    with pytest.raises(KeyError), optimizer.averaged():
        assert torch.equal(params[1], optimizer.state[params[1]]["ema"])
        with optimizer.averaged():
            pass
        assert torch.equal(params[1], optimizer.state[params[1]]["ema"]), "the inner block must not end the outer one"
        raise KeyError
    assert_unchanged(optimizer, before)
    optimizer.train(False)
    assert torch.equal(params[1], optimizer.state[params[1]]["ema"])
    optimizer.train()
    assert_unchanged(optimizer, before)


def test_what_is_loaded_is_evaluated_in_inference_mode_and_trains_on() -> None:
    (saved, params), (control, twin) = trained(RULES["ema"]), trained(RULES["ema"])
    optimizer = tilestep.Optimizer(params, RULES["ema"], lr=0.1)
    optimizer.load_state_dict(saved.state_dict())
    with torch.inference_mode(), optimizer.averaged():
        assert torch.equal(params[1], optimizer.state[params[1]]["ema"])
    train([(optimizer, params), (control, twin)], range(5, 8))
    assert all(map(torch.equal, params, twin))


def test_rules_without_averages_have_nothing_to_do() -> None:
    optimizer, params = trained("AdamW")
    before = everything(optimizer)
    optimizer.eval()
    assert_unchanged(optimizer, before)
    optimizer.step()
    optimizer.train()
    mixed = [{"params": params[:2]}, {"params": params[2:], "rule": "AdamW"}]
    both = tilestep.Optimizer(mixed, RULES["ema"], lr=0.1)
    train([(both, params)], range(3))
    copies = twins(params)
    with both.averaged():
        assert not torch.equal(params[1], copies[1])
        assert all(map(torch.equal, params[2:], copies[2:]))


@pytest.mark.parametrize("name", RULES)
def test_a_checkpoint_of_the_evaluated_model_trains_on(name: str) -> None:
    """As one saves a model for use: evaluation mode, both state_dicts; and continues from them."""
    optimizer, params = trained(RULES[name])
    optimizer.eval()
    saved, weights = copy.deepcopy(optimizer.state_dict()), twins(params)
    optimizer.train()
    other = tilestep.Optimizer(weights, RULES[name], lr=0.5)
    other.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="call train"):
        other.step()
    other.train()
    assert all(map(torch.equal, params, weights))
    train([(optimizer, params), (other, weights)], range(5, 8))
    assert all(map(torch.equal, params, weights))


def test_a_checkpoint_of_training_ends_the_evaluation() -> None:
    optimizer, params = trained(RULES["ema"])
    saved, weights = copy.deepcopy(optimizer.state_dict()), twins(params)
    optimizer.eval()
    with torch.no_grad():
        for param, weight in zip(params, weights):
            param.copy_(weight)
    optimizer.load_state_dict(saved)
    train([(optimizer, params)], range(5, 6))
    assert all("training_param" not in state for state in optimizer.state.values())


@pytest.mark.parametrize("order", ["optimizer", "optimizer, model", "model, optimizer"])
@pytest.mark.parametrize("copies", [False, True])
def test_a_checkpoint_that_comes_while_averages_are_held_trains_from_weights(order: str, copies: bool) -> None:
    """Not from the averages that stood for the training weights."""
    optimizer, params = trained(RULES["ema"])
    saved, weights = copy.deepcopy(optimizer.state_dict()), twins(params)
    control, twin = copy.deepcopy((optimizer, params))
    if "model" in order:
        train([(optimizer, params)], range(5, 7))
    optimizer.eval()
    if copies:
        optimizer, params = copy.deepcopy((optimizer, params))
    for what in order.split(", "):
        if what == "optimizer":
            optimizer.load_state_dict(saved)
        else:
            with torch.no_grad():
                for param, weight in zip(params, weights):
                    param.copy_(weight)
    assert all(map(torch.equal, params, twin))
    train([(optimizer, params), (control, twin)], range(5, 8))
    assert all(map(torch.equal, params, twin))


@pytest.mark.parametrize("puts_in", [True, False])
def test_an_exchange_of_weights_that_is_interrupted(puts_in: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not half of them stay exchanged, and none are lost."""
    optimizer, _ = trained(RULES["ema"])
    before = everything(optimizer)
    if not puts_in:
        optimizer.eval()
    left = [2]
    name = "exact_values" if puts_in else "copy_into"
    original = getattr(optimizer_module, name)

    def interrupted(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(optimizer_module, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.train(not puts_in)
    optimizer.train()
    assert_unchanged(optimizer, before)


def test_a_copy_made_while_evaluating_is_evaluating() -> None:
    optimizer, params = trained(RULES["ema"])
    optimizer.eval()
    twin_params, twin = copy.deepcopy((params, optimizer))
    with pytest.raises(RuntimeError, match="call train"):
        twin.step()
    optimizer.train()
    twin.train()
    assert all(map(torch.equal, params, twin_params))


def test_masters_are_averaged_in_float32() -> None:
    optimizer, params = trained(RULES["ema"], torch.bfloat16, master_weights=True)
    before = everything(optimizer)
    with optimizer.averaged():
        for param in params:
            assert torch.equal(param, optimizer.state[param]["ema"].bfloat16())
    assert_unchanged(optimizer, before)
    train([(optimizer, params)], range(5, 6))
    assert float(optimizer.state[params[0]]["step"]) == 6
