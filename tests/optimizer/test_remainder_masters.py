"""Masters of bfloat16 parameters as 16-bit remainders: training as with float32 masters, in half their memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from remainder_patterns import joined
from twins import assert_unchanged, everything, make_params, set_gradients, train, twins

import tilestep
from tilestep.errors import GradientError

SHAPES = [(), (5,), (4, 6), (0,), (3, 2, 3, 3), (2000,)]


def adamw(params: Any, master_weights: Any = "remainder", **options: Any) -> tilestep.Optimizer:
    return tilestep.AdamW(params, lr=1e-3, master_weights=master_weights, **options)


def masters(optimizer: tilestep.Optimizer, params: list[Any]) -> list[torch.Tensor]:
    return [joined(param.detach(), optimizer.state[param]["remainder_param"]) for param in params]


def units_apart(left: torch.Tensor, right: torch.Tensor) -> int:
    """The largest distance of float32 numbers of one sign in units of the last place."""
    apart = (left.view(torch.int32).long() - right.view(torch.int32).long()).abs()
    return int(apart.max()) if apart.numel() else 0


def trained(steps: int = 3, **options: Any) -> tuple[tilestep.Optimizer, list[Any]]:
    params = make_params(SHAPES, torch.bfloat16)
    optimizer = adamw(params, **options)
    train([(optimizer, params)], range(steps))
    return optimizer, params


@pytest.mark.parametrize("rule", ["AdamW", "Lion", "LAMB"])
def test_training_is_that_of_float32_masters(rule: str) -> None:
    params = make_params(SHAPES, torch.bfloat16)
    others = twins(params)
    optimizer = tilestep.Optimizer(params, rule, lr=1.7e-3, master_weights="remainder", max_grad_norm=1.0)
    reference = tilestep.Optimizer(others, rule, lr=1.7e-3, master_weights=True, max_grad_norm=1.0)
    for step in range(60):
        train([(optimizer, params), (reference, others)], range(step, step + 1))
        for param, other, master in zip(params, others, masters(optimizer, params)):
            wanted = reference.state[other]["master_param"]
            # Each tie that was rounded down to even has cost a unit of the master.
            assert units_apart(master, wanted) <= step + 1
            assert torch.equal(param, master.bfloat16())
            same = master == wanted
            assert same.float().mean() >= 0.99 or not same.numel()
            assert torch.equal(param[same], other[same])


def test_it_learns_where_bfloat16_alone_stands_still() -> None:
    """A thousandth of a unit in the last place for each step: rounded away without what remains of it."""
    updated = {}
    for kind in (False, True, "remainder"):
        weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = tilestep.SGD([weight], lr=2.0**-16, master_weights=kind)
        for _ in range(1000):
            weight.grad = torch.ones(3, dtype=torch.bfloat16)
            optimizer.step()
        updated[kind] = weight.detach().clone()
    assert torch.equal(updated[False], torch.ones(3, dtype=torch.bfloat16))
    assert torch.equal(updated["remainder"], updated[True])
    assert torch.equal(updated["remainder"], torch.full((3,), 1 - 1000 * 2.0**-16).bfloat16())


def test_the_one_value_that_does_not_fit_is_a_unit_less() -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = tilestep.SGD([weight], lr=1.0, master_weights="remainder")
    # Half of a unit of bfloat16 above an even and an odd number: the first goes down, the second up.
    weight.data.copy_(torch.tensor([1.0, 1 + 2**-7]))
    weight.grad = torch.full((2,), -(2.0**-8), dtype=torch.bfloat16)
    optimizer.step()
    assert weight.tolist() == [1.0, 1 + 2**-6]
    assert optimizer.state[weight]["remainder_param"].tolist() == [32767, -32768]
    assert masters(optimizer, [weight])[0].tolist() == [1 + 2**-8 - 2**-23, 1 + 2**-7 + 2**-8]


def test_state_is_two_bytes_less_for_each_element() -> None:
    def size(optimizer: tilestep.Optimizer, params: list[Any]) -> int:
        return sum(v.nbytes for p in params for v in optimizer.state[p].values() if v.shape == p.shape and v.dim())

    optimizer, params = trained()
    reference, others = trained(master_weights=True)
    elements = sum(param.numel() for param in params if param.dim())
    assert size(reference, others) - size(optimizer, params) == 2 * elements
    assert {key: value.dtype for key, value in optimizer.state[params[1]].items()} == {
        "step": torch.float32,
        "remainder_param": torch.int16,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    named = [("first", make_params([(3,)], torch.bfloat16)[0]), ("layer.weight", make_params([(4,)], dtype)[0])]
    with pytest.raises(GradientError, match=rf"parameter 1 of group 0 \(layer.weight\) is {str(dtype)[6:]}.*bfloat16"):
        adamw(named)
    optimizer = adamw([{"params": named[:1]}, {"params": named[1:], "master_weights": dtype is torch.float16}])
    for _, param in named:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = everything(optimizer)
    other = make_params([(4,)], dtype)[0]
    with pytest.raises(GradientError, match=r"parameter 0 of group 2 \(x\)"):
        optimizer.add_param_group({"params": [("x", other)]})
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize("choice", ["remainders", "", 2, None, torch.bfloat16])
def test_other_words_are_refused(choice: Any) -> None:
    with pytest.raises(ValueError, match=r"Invalid master_weights: .*; it must be False, True\b.* or '"):
        tilestep.SGD(make_params([(3,)], torch.bfloat16), master_weights=choice)


def test_a_group_may_change_how_it_is_kept() -> None:
    params = make_params(SHAPES, torch.bfloat16)
    others = twins(params)
    optimizer, reference = adamw(params), adamw(others, True)
    pairs = [(optimizer, params), (reference, others)]
    for turn, kind in enumerate((True, "remainder", True)):
        train(pairs, range(3 * turn, 3 * turn + 3))
        optimizer.param_groups[0]["master_weights"] = kind
    train(pairs, range(9, 12))
    for param, other in zip(params, others):
        assert "remainder_param" not in optimizer.state[param]
        assert units_apart(optimizer.state[param]["master_param"], reference.state[other]["master_param"]) <= 6
        assert float(optimizer.state[param]["step"]) == 12


@pytest.mark.parametrize("model_first", [True, False])
def test_a_checkpoint_continues_bit_for_bit_in_either_order(model_first: bool) -> None:
    optimizer, params = trained()
    saved = copy.deepcopy((optimizer.state_dict(), [param.detach() for param in params]))
    others = [torch.nn.Parameter(torch.zeros_like(param)) for param in params]
    resumed = adamw(others)

    def load_model() -> None:
        with torch.no_grad():
            for other, value in zip(others, saved[1]):
                other.copy_(value)

    loads = [load_model, lambda: resumed.load_state_dict(saved[0])]
    for load in loads if model_first else reversed(loads):
        load()
    assert saved[0]["state"][2]["remainder_param"].any()
    train([(optimizer, params), (resumed, others)], range(3, 6))
    for mine, theirs in zip(masters(optimizer, params), masters(resumed, others)):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kinds", [(True, "remainder"), ("remainder", True)], ids=["from masters", "to masters"])
def test_a_checkpoint_of_the_other_kind_is_converted(kinds: tuple[Any, Any]) -> None:
    optimizer, params = trained(master_weights=kinds[0])
    others = twins(params)
    resumed = adamw(others, kinds[1])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.param_groups[0]["master_weights"] == kinds[1]
    pairs = [(optimizer, params), (resumed, others)]
    for steps in (range(0), range(3, 5)):
        train(pairs, steps)
        kept, other = (resumed, others), (optimizer, params)
        if kinds[0] == "remainder":
            kept, other = other, kept
        for master, param in zip(masters(*kept), other[1]):
            assert units_apart(master, other[0].state[param]["master_param"]) <= len(steps) + 1
    assert all(torch.equal(param, other) for param, other in zip(params, others))


def test_a_float32_checkpoint_begins_without_remainders() -> None:
    floats = make_params(SHAPES)
    torchs = torch.optim.AdamW(floats)
    train([(torchs, floats)], range(3))
    optimizer, params = trained()
    with torch.no_grad():
        for param, wide in zip(params, floats):
            param.copy_(wide)
    optimizer.load_state_dict(torchs.state_dict())
    for param, wide in zip(params, floats):
        assert not optimizer.state[param]["remainder_param"].any()
        assert torch.equal(optimizer.state[param]["exp_avg_sq"], torchs.state[wide]["exp_avg_sq"])


def test_what_torch_has_rounded_is_no_remainder() -> None:
    optimizer, params = trained()
    theirs = twins(params)
    torchs = torch.optim.AdamW(theirs)
    torchs.load_state_dict(optimizer.state_dict())
    train([(torchs, theirs)], range(3, 5))
    other = adamw(twins(theirs))
    other.load_state_dict(torchs.state_dict())
    assert not any(state["remainder_param"].any() for state in other.state.values())
    plain = tilestep.AdamW(twins(params))
    plain.load_state_dict(optimizer.state_dict())
    assert all("remainder_param" not in state for state in plain.state.values())


def test_a_remainder_of_another_shape_is_refused_and_nothing_is_changed() -> None:
    optimizer, _ = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][2]["remainder_param"] = torch.zeros(6, 4, dtype=torch.int16)
    for kind in ("remainder", True):
        other, _ = trained(2, master_weights=kind)
        before = everything(other)
        with pytest.raises(ValueError, match="state 'remainder_param' of parameter 2 of group 0 has shape"):
            other.load_state_dict(saved)
        assert_unchanged(other, before)


def test_what_others_write_has_no_remainder() -> None:
    optimizer, params = trained()
    kept = masters(optimizer, params)
    assert optimizer.state[params[2]]["remainder_param"].any()
    with torch.no_grad():
        params[2][1, 1] = 7.0
    optimizer.param_groups[0].update(lr=0.0)
    train([(optimizer, params)], range(3, 4))
    now = masters(optimizer, params)
    assert torch.equal(now[2], params[2].float()) and params[2][1, 1] == 7.0
    # Others keep theirs.
    assert all(torch.equal(now[place], kept[place]) for place in range(len(params)) if place != 2)


def test_what_is_written_before_tables_are_built_anew_is_noticed() -> None:
    optimizer, params = trained()
    kept = masters(optimizer, params)
    with torch.no_grad():
        params[2].mul_(2)
    optimizer.add_param_group({"params": make_params([(3,)], torch.bfloat16)})
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train([(optimizer, params)], range(3, 4))
    now = masters(optimizer, params)
    assert torch.equal(now[2], params[2].float())
    assert torch.equal(now[4], kept[4]) and not torch.equal(kept[4], params[4].float())


def test_a_skipped_step_leaves_both_halves() -> None:
    optimizer, params = trained(skip_nonfinite=True)
    set_gradients(params, step=9)
    params[2].grad[0, 0] = torch.nan
    before = everything(optimizer)
    optimizer.step()
    assert int(optimizer.skipped_steps) == 1
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, tilestep.GradScaler])
def test_with_a_scaler_and_a_clip(scaler_class: Any) -> None:
    runs = []
    for kind in (True, "remainder"):
        params = make_params(SHAPES, torch.bfloat16)
        optimizer = adamw(params, kind, max_grad_norm=0.5)
        scaler = scaler_class("cpu", 1024.0)
        for step in range(6):
            set_gradients(params, step=step)
            for param in params:
                param.grad.mul_(scaler.get_scale())
            if step == 2:
                params[1].grad[0] = torch.inf
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        assert int(optimizer.skipped_steps) == 1
        runs.append(params)
    assert all(map(torch.equal, *runs))


def test_averages_come_and_go_and_leave_both_halves() -> None:
    rule = tilestep.ema(tilestep.registry["SGD"], 0.75)
    averages = []
    for kind in (True, "remainder"):
        params = make_params(SHAPES, torch.bfloat16)
        optimizer = tilestep.Optimizer(params, rule, lr=0.013, master_weights=kind)
        train([(optimizer, params)], range(4))
        before = everything(optimizer)
        with optimizer.averaged():
            assert not torch.equal(params[2], before["params"][2])
            averages.append([param.detach().clone() for param in params])
        assert_unchanged(optimizer, before)
        params[2].grad = torch.zeros_like(params[2])
        optimizer.step()
        if kind == "remainder":
            assert torch.equal(optimizer.state[params[2]]["remainder_param"], before["state"][2]["remainder_param"])
    assert all(map(torch.equal, *averages))


def test_a_copy_goes_on_as_the_original() -> None:
    optimizer, params = trained()
    other, others = copy.deepcopy((optimizer, params))
    train([(optimizer, params), (other, others)], range(3, 6))
    for mine, theirs in zip(masters(optimizer, params), masters(other, others)):
        assert torch.equal(mine, theirs)
