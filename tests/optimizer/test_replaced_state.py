"""Tensors in `optimizer.state[param]` that other code replaces: the next step works with the new ones, as in torch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_files import saved_and_loaded
from twins import assert_close, make_params, train

import tilestep
from tilestep.optimizer import Optimizer
from tilestep.optimizer.checkpoint import unchanged_on_error

Change = Callable[[dict[str, Any]], Any]

CHANGES: dict[str, Change] = {
    "set": lambda state: state.__setitem__("exp_avg", torch.full_like(state["exp_avg"], 0.5)),
    "update": lambda state: state.update(exp_avg=state["exp_avg"] * 2, exp_avg_sq=state["exp_avg_sq"] + 1),
    "in place or": lambda state: state.__ior__({"exp_avg_sq": state["exp_avg_sq"] + 0.25}),
    "step": lambda state: state.__setitem__("step", torch.tensor(40.0)),
    "in place": lambda state: state["exp_avg"].zero_(),
}


@pytest.mark.parametrize("keeps_gradients", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_new_tensors_in_a_parameters_state_are_taken_up(change: str, keeps_gradients: bool) -> None:
    """Also where nothing else has changed since the last step: the gradients are the same tensors."""
    mine, theirs = make_params(), make_params()
    ours, torchs = tilestep.AdamW(mine, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    train([(ours, mine), (torchs, theirs)], range(3))
    for optimizer, params in ((ours, mine), (torchs, theirs)):
        for _ in range(2 * keeps_gradients):
            optimizer.step()
        for param in params[1:3]:
            CHANGES[change](optimizer.state[param])
        for _ in range(2 * keeps_gradients):
            optimizer.step()
    train([(ours, mine), (torchs, theirs)], range(3, 6))
    assert_close(mine, theirs)


@pytest.mark.parametrize("take", ["del", "pop"])
def test_a_tensor_that_is_taken_away_begins_anew(take: str) -> None:
    params, others = make_params(), make_params()
    optimizer, other = tilestep.SGD(params, lr=0.1, momentum=0.9), tilestep.SGD(others, lr=0.1, momentum=0.9)
    train([(optimizer, params), (other, others)], range(3))
    if take == "del":
        del optimizer.state[params[1]]["momentum_buffer"]
    else:
        optimizer.state[params[1]].pop("momentum_buffer")
    other.state[others[1]]["momentum_buffer"].zero_()
    train([(optimizer, params), (other, others)], range(3, 5))
    assert all(map(torch.equal, params, others))


def test_sophias_estimate_may_be_assigned() -> None:
    param = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = tilestep.SophiaG([param], lr=0.5, bs=1, rho=1.0, weight_decay=0.0)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert (param == 0.5).all()
    optimizer.state[param]["hessian"] = torch.tensor([1e6, 1e6, 0.0, 0.0], dtype=torch.float64)
    optimizer.step()
    assert param.tolist() == [0.5, 0.5, 0.0, 0.0]
    optimizer.state[param]["hessian"] = torch.ones(3)
    with pytest.raises(
        tilestep.StateError, match=r"'hessian' of parameter 0 of group 0 has shape \(3,\), it needs \(4,\)"
    ):
        optimizer.step()
    assert param.tolist() == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("choice", ["int8", "int4", "float8_e4m3", "scaled_float16", lambda name: "int8"])
def test_sophias_estimate_may_be_written_in_place_whatever_states_are_kept_in(choice: Any) -> None:
    params = [torch.nn.Parameter(torch.ones(64, 128)) for _ in range(2)]
    kept = [tilestep.SophiaG([params[0]], bs=1, state_dtype=choice), tilestep.SophiaG([params[1]], bs=1)]
    train([(one, [param]) for one, param in zip(kept, params)], range(1))
    for one, param in zip(kept, params):
        estimate = one.state[param]["hessian"]
        assert estimate.dtype is torch.float32
        estimate.mul_(0.5).add_(2e3)
        estimate[0].copy_(torch.linspace(0.1, 300.5, 128))
    assert len(kept[0].state[params[0]]) == 4
    train([(one, [param]) for one, param in zip(kept, params)], range(1, 2))
    torch.testing.assert_close(*params, rtol=0, atol=4e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("choice", ["int8", "int4", "float8_e4m3"])
def test_numbers_of_any_dtype_in_the_place_of_codes_are_numbers(choice: str, dtype: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.ones(64, 128))
    optimizer = tilestep.AdamW([param], state_dtype=choice)
    train([(optimizer, [param])], range(1))
    optimizer.state[param]["exp_avg"] = torch.full((64, 128), 0.5, dtype=dtype)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    average = tilestep.full_precision(optimizer.state_dict())["state"][0]["exp_avg"]
    torch.testing.assert_close(average, torch.full_like(average, 0.45), rtol=4e-3, atol=0)


def test_parts_of_a_state_in_blocks_that_do_not_fit_are_refused() -> None:
    """The state began anew without an error."""
    param = torch.nn.Parameter(torch.ones(64, 130))
    optimizer = tilestep.AdamW([param], state_dtype="int8")
    train([(optimizer, [param])], range(2))
    state = optimizer.state[param]
    for name in ("exp_avg_codes", "exp_avg_scales"):
        for change in (lambda: state.__setitem__(name, torch.zeros(3)), lambda: state.__delitem__(name)):  # noqa: B023
            kept, before = state[name], param.detach().clone()
            change()
            with pytest.raises(
                tilestep.StateError, match="'exp_avg_codes' and 'exp_avg_scales' of parameter 0 of group 0"
            ):
                optimizer.step()
            state[name] = kept
            assert torch.equal(param, before)
    train([(optimizer, [param])], range(2, 3))
    del state["exp_avg_codes"], state["exp_avg_scales"]
    optimizer.step()


def test_blocks_for_sophias_estimate_are_refused_by_name() -> None:
    with pytest.raises(tilestep.StateError, match="parameter 0 of group 0: SophiaG only reads the state 'hessian'"):
        tilestep.SophiaG([torch.nn.Parameter(torch.ones(64, 128))], state_dtype={"hessian": "int8"})


def test_what_no_kernel_reads_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params()
    optimizer = tilestep.Optimizer(params, tilestep.ema(tilestep.registry["AdamW"]))
    train([(optimizer, params)], range(2))
    monkeypatch.setattr(Optimizer, "_make_plan", lambda self, **_: pytest.fail("nothing was replaced"))
    state = optimizer.state[params[0]]
    state["note"] = "mine"
    state["exp_avg"] = state["exp_avg"]
    state.setdefault("exp_avg", torch.ones(3))
    with optimizer.averaged():
        pass
    train([(optimizer, params)], range(2, 4))


def test_checkpoints_and_copies_hold_plain_dicts() -> None:
    params = make_params()
    optimizer = tilestep.AdamW(params)
    train([(optimizer, params)], range(2))
    saved = optimizer.state_dict()
    assert {type(entry) for entry in saved["state"].values()} == {dict}
    assert saved["state"][0]["exp_avg"] is optimizer.state[params[0]]["exp_avg"]
    assert saved_and_loaded(saved)["state"].keys() == saved["state"].keys()
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        group = copied.param_groups[0]["params"]
        assert torch.equal(copied.state[group[0]]["exp_avg"], optimizer.state[params[0]]["exp_avg"])
        train([(copied, group)], range(2, 3))
    # As libraries move states: a mapping of the same type from an iterable of pairs.
    entry = optimizer.state[params[0]]
    optimizer.state[params[0]] = type(entry)({key: value * 1 for key, value in entry.items()})
    train([(optimizer, params)], range(2, 3))
    assert torch.equal(group[0], params[0])


def test_a_change_that_fails_leaves_the_plan() -> None:
    params = make_params()
    optimizer = tilestep.AdamW(params, lr=0.1)
    train([(optimizer, params)], range(3))
    plan = optimizer.plan
    with pytest.raises(ZeroDivisionError), unchanged_on_error(optimizer):
        optimizer.state.clear()
        raise ZeroDivisionError
    assert plan is not None and optimizer.fitting_plan() is plan
