"""State begins when it is first needed: with the weights and hyperparameters of the first step, for what is there."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilestep
from optimizer.twins import make_params, set_gradients, train, twins
from tilestep.rules.compose import ema, lookahead

# Not Adagrad, whose sums torch makes at once: here they are made for checkpoints, and when a step needs them.
NAMES = ["Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]

RULES: dict[str, Callable[[list[Any]], Any]] = {
    "ScheduleFreeSGD": lambda params: tilestep.ScheduleFreeSGD(params, lr=0.1),
    "ScheduleFreeAdamW": lambda params: tilestep.ScheduleFreeAdamW(params, lr=0.1),
    "Prodigy": lambda params: tilestep.Prodigy(params),
    "lookahead": lambda params: tilestep.Optimizer(params, lookahead(tilestep.registry["SGD"]), lr=0.1),
    "ema": lambda params: tilestep.Optimizer(params, ema(tilestep.registry["SGD"], 0.75), lr=0.1),
    "masters": lambda params: tilestep.AdamW(params, lr=0.1, master_weights=True),
    "remainders": lambda params: tilestep.AdamW(params, lr=0.1, master_weights="remainder"),
}


@pytest.fixture(params=["native", "without"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.setenv("TILESTEP_NATIVE", "0")


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("rule", RULES)
def test_weights_loaded_after_construction_are_what_state_begins_from(rule: str) -> None:
    dtype = torch.bfloat16 if rule in ("masters", "remainders") else torch.float32
    late, early = make_params(dtype=dtype), make_params(dtype=dtype)
    with torch.no_grad():
        for param in late:
            param.fill_(0.0)
    optimizer = RULES[rule](late)
    assert not optimizer.state and optimizer.state_dict()["state"] == {}
    with torch.no_grad():
        for param, other in zip(late, early):
            param.copy_(other)
    reference = RULES[rule](early)
    train([(optimizer, late), (reference, early)], range(4))
    assert all(map(torch.equal, late, early))
    for param, other in zip(late, early):
        for name, value in reference.state[other].items():
            assert torch.equal(optimizer.state[param][name], value), name
    with optimizer.averaged(), reference.averaged():
        assert all(map(torch.equal, late, early))


@pytest.mark.parametrize("name", ["Rprop", "ASGD"])
def test_a_state_that_begins_at_the_rate_takes_that_of_the_first_step(name: str) -> None:
    mine, theirs = make_params(), make_params()
    ours, torchs = getattr(tilestep, name)(mine), getattr(torch.optim, name)(theirs)
    for optimizer in (ours, torchs):
        optimizer.param_groups[0]["lr"] = 1e-3
    train([(ours, mine), (torchs, theirs)], range(4))
    for param, other in zip(mine, theirs):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_before_a_step_there_is_what_torch_has_then(name: str) -> None:
    ours, torchs = getattr(tilestep, name)(make_params()), getattr(torch.optim, name)(make_params())
    for optimizer in (ours, torchs):
        optimizer.zero_grad()
        assert len(optimizer.state) == 0 and optimizer.state_dict()["state"] == {}
    assert ours.state_dict()["param_groups"][0].keys() == torchs.state_dict()["param_groups"][0].keys()
    assert ours.skipped_steps == 0 and not ours.state
    again = pickle.loads(pickle.dumps(ours))
    assert not again.state


TORCHS = [*NAMES, "Adagrad", "Adafactor", "Muon"]


def shapes(optimizer: Any, uncounted: bool) -> dict[int, dict[str, Any]]:
    """What a checkpoint has of each parameter, without step counts that torch's optimizer does not keep."""
    states = {
        key: {name: (value.shape, value.dtype) for name, value in state.items() if not (uncounted and name == "step")}
        for key, state in optimizer.state_dict()["state"].items()
    }
    return {key: state for key, state in states.items() if state}


@pytest.mark.parametrize("which", [None, [], [1], [0, 1, 2]], ids=["no step", "no gradients", "one", "all"])
@pytest.mark.parametrize("name", TORCHS)
def test_states_are_there_for_the_parameters_that_have_them_in_torch(name: str, which: list[int] | None) -> None:
    kwargs = {"momentum": 0.9} if name == "SGD" else {}
    mine, theirs = make_params([(3, 2)] * 3), make_params([(3, 2)] * 3)
    ours, torchs = getattr(tilestep, name)(mine, **kwargs), getattr(torch.optim, name)(theirs, **kwargs)
    for optimizer, params in ((ours, mine), (torchs, theirs)):
        if which is None:
            continue
        for _ in range(2):
            set_gradients([params[place] for place in which])
            optimizer.step()
    uncounted = name in ("SGD", "Muon")
    assert shapes(ours, uncounted) == shapes(torchs, uncounted)
    # And they go both ways, with gradients for all from then on.
    others = twins(theirs), twins(mine)
    resumed = getattr(tilestep, name)(others[0], **kwargs), getattr(torch.optim, name)(others[1], **kwargs)
    resumed[0].load_state_dict(torchs.state_dict())
    # torch's keeps the tensors that it is given.
    resumed[1].load_state_dict(copy.deepcopy(ours.state_dict()))
    assert shapes(resumed[0], uncounted) == shapes(torchs, uncounted)
    pairs = [(torchs, theirs), (ours, mine), *zip(resumed, others)]
    train(pairs, range(5, 8))
    for params in (mine, *others):
        torch.testing.assert_close(params, theirs, rtol=1e-5, atol=1e-6)


def test_a_parameter_without_a_gradient_is_in_no_graph_that_would_leave_it_out() -> None:
    params = make_params([(3,), (4,)])
    optimizer = tilestep.AdamW(params)
    set_gradients(params[:1])
    optimizer.step()
    assert set(optimizer.state) == {params[0]}
    assert optimizer.fitting_plan(ahead=True).engines[0].holders == params
    assert optimizer.state_dict()["state"].keys() == {0, 1}
    params[1].data.fill_(7.0)
    set_gradients(params)
    optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in params] == [2, 1]


def test_a_parameter_that_gets_its_first_gradient_late_begins_then() -> None:
    mine = make_params([(3,), (4,)])
    optimizer = tilestep.ScheduleFreeSGD(mine, lr=0.1)
    set_gradients(mine[:1])
    optimizer.step()
    mine[1].data.fill_(5.0)
    mine[0].grad, mine[1].grad = None, torch.zeros(4)
    optimizer.step()
    assert optimizer.state[mine[1]]["z"].tolist() == [5.0] * 4 and mine[1].tolist() == [5.0] * 4


@pytest.mark.parametrize("reads", [False, True], ids=["built in the step", "built ahead"])
def test_state_that_was_made_ahead_begins_with_the_first_step(reads: bool) -> None:
    late, early = make_params(), make_params()
    with torch.no_grad():
        for param in late:
            param.zero_()
    optimizer, reference = RULES["lookahead"](late), RULES["lookahead"](early)
    if reads:
        # As for a capture.
        optimizer.fitting_plan(ahead=True)
        assert optimizer.state
    with torch.no_grad():
        for param, other in zip(late, early):
            param.copy_(other)
    train([(optimizer, late), (reference, early)], range(7))
    assert all(map(torch.equal, late, early))


def test_numbers_that_were_made_ahead_begin_in_their_own_precision() -> None:
    late, early = make_params(dtype=torch.float64), make_params(dtype=torch.float64)
    optimizer, reference = tilestep.Prodigy(late), tilestep.Prodigy(early)
    optimizer.fitting_plan(ahead=True)
    train([(optimizer, late), (reference, early)], range(4))
    assert all(map(torch.equal, late, early))
    for param, other in zip(late, early):
        assert torch.equal(optimizer.state[param]["d"], reference.state[other]["d"])


def test_parameters_that_are_replaced_before_a_step_leave_nothing_behind() -> None:
    params = make_params()
    optimizer = tilestep.AdamW(params)
    optimizer.fitting_plan(ahead=True)
    others = twins(params)
    optimizer.param_groups[0]["params"] = list(others)
    gone = [weakref.ref(param) for param in params]
    set_gradients(others)
    optimizer.step()
    assert set(optimizer.state) == set(others)
    assert set(optimizer.state_dict()["state"]) == set(range(len(others)))
    del params
    gc.collect()
    assert not any(reference() for reference in gone)


def test_a_popped_group_is_not_saved() -> None:
    params = make_params()
    optimizer = tilestep.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    train([(optimizer, params)], range(2))
    optimizer.param_groups.pop()
    assert set(optimizer.state) == set(params)
    saved = optimizer.state_dict()
    assert set(saved["state"]) == {0, 1}
    train([(optimizer, params[:2])], range(2, 3))
    other = twins(params[:2])
    resumed = tilestep.AdamW(other)
    resumed.load_state_dict(optimizer.state_dict())
    train([(optimizer, params[:2]), (resumed, other)], range(3, 5))
    assert all(map(torch.equal, params[:2], other))


def test_a_step_that_is_refused_leaves_no_state() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = tilestep.AdamW([param])
    param.grad = torch.ones(3).to_sparse()
    with pytest.raises(tilestep.GradientError):
        optimizer.step()
    assert not optimizer.state and param.tolist() == [1.0] * 3


def test_averages_before_a_step_are_the_weights() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = tilestep.ScheduleFreeSGD([param], lr=0.5)
    optimizer.eval()
    param.data.fill_(3.0)
    param.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="call train"):
        optimizer.step()
    optimizer.train()
    optimizer.step()
    assert optimizer.state[param]["z"].tolist() == [2.5] * 2


@pytest.mark.parametrize("name", ["ScheduleFreeSGD", "lookahead", "ema", "masters"])
def test_states_that_were_made_ahead_are_read_with_the_weights_that_are_there(name: str) -> None:
    """As a capture, `offload` and `overlap` make them, before a checkpoint is loaded into the model."""
    params, others = make_params(), make_params()
    optimizer, plain = RULES[name](params), RULES[name](others)
    optimizer.fitting_plan(ahead=True)
    for place, (param, other) in enumerate(zip(params, others)):
        param.data.fill_(place + 3.0)
        other.data.fill_(place + 3.0)
        for key, value in optimizer.state_dict()["state"][place].items():
            if key in ("z", "ema", "slow", "master_param"):
                assert torch.equal(value, param.detach().to(value.dtype))
    with optimizer.averaged():
        assert all(map(torch.equal, params, others))
    for param, other in zip(params, others):
        param.data.neg_()
        other.data.neg_()
    train([(optimizer, params), (plain, others)], range(2))
    assert all(map(torch.equal, params, others))


def test_states_are_exchanged_and_what_was_handed_out_stays() -> None:
    first, second = make_params(), make_params()
    one, two = tilestep.AdamW(first, amsgrad=True), tilestep.AdamW(second, amsgrad=True)
    train([(one, first)], range(3))
    train([(two, second)], range(3, 7))
    saved = [one.state_dict(), two.state_dict()]
    before = [{key: value.clone() for key, value in state["state"][0].items()} for state in saved]
    one.load_state_dict(saved[1])
    two.load_state_dict(saved[0])
    for params, optimizer, wanted, state in zip((first, second), (one, two), reversed(before), saved):
        for key, value in wanted.items():
            assert torch.equal(optimizer.state[params[0]][key], value)
        assert all(torch.equal(state["state"][0][key], value) for key, value in before[saved.index(state)].items())
    assert not {value.data_ptr() for value in one.state[first[1]].values()} & {
        value.data_ptr() for value in two.state[second[1]].values()
    }


def test_a_buffer_that_is_loaded_into_itself_stays() -> None:
    params = make_params()
    optimizer = tilestep.AdamW(params)
    train([(optimizer, params)], range(2))
    places = [optimizer.state[param]["exp_avg"].data_ptr() for param in params]
    optimizer.load_state_dict(optimizer.state_dict())
    assert places == [optimizer.state[param]["exp_avg"].data_ptr() for param in params]


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("step", lambda values: values.pop("step"), "no step count .*parameter 3 .*AdamW"),
        ("exp_avg", lambda values: values.update(exp_avg=None), "no state 'exp_avg' for parameter 3"),
        ("exp_avg_sq", lambda values: values.pop("exp_avg_sq"), "no state 'exp_avg_sq' for parameter 3"),
        ("shape", lambda values: values.update(exp_avg=torch.ones(2, 2)), r"parameter 3 .*has shape \(2, 2\)"),
    ],
)
def test_a_checkpoint_that_fails_late_changes_nothing(key: str, change: Callable[[Any], Any], message: str) -> None:
    params, others = make_params(), make_params()
    optimizer, source = tilestep.AdamW(params), tilestep.AdamW(others)
    train([(optimizer, params)], range(2))
    train([(source, others)], range(5, 8))
    saved = source.state_dict()
    change(saved["state"][3])
    held = {param: dict(optimizer.state[param]) for param in params}
    values = {param: {name: value.clone() for name, value in state.items()} for param, state in held.items()}
    with pytest.raises(tilestep.StateError, match=message):
        optimizer.load_state_dict(saved)
    for param in params:
        for name, value in values[param].items():
            assert optimizer.state[param][name] is held[param][name] and torch.equal(held[param][name], value)


def test_state_that_never_began_in_torch_begins_anew() -> None:
    mine, theirs = make_params([(3,)]), make_params([(3,)])
    ours, torchs = tilestep.SGD(mine, lr=0.1, momentum=0.9), torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    saved = torchs.state_dict()
    saved["state"] = {0: {"momentum_buffer": None}}
    ours.load_state_dict(saved)
    torchs.load_state_dict(saved)
    train([(ours, mine), (torchs, theirs)], range(3))
    torch.testing.assert_close(mine, theirs)


def test_constructor_and_load_do_their_work_once() -> None:
    import sys

    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]
    tilestep.AdamW(params).step()
    source = tilestep.AdamW(params)
    for param in params:
        param.grad = torch.ones(3)
    source.step()
    saved, place = source.state_dict(), tilestep.__path__[0]

    def calls(work: Callable[[], Any]) -> int:
        count = 0

        def note(frame: Any, event: str, _: Any) -> None:
            nonlocal count
            code = frame.f_code
            count += event == "call" and code.co_filename.startswith(place) and not code.co_name.startswith("<")

        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(None)
        return count

    assert calls(lambda: tilestep.AdamW(params)) <= 156
    other = tilestep.AdamW(params)
    other.load_state_dict(saved)
    assert calls(lambda: other.load_state_dict(saved)) <= 173
    fresh = tilestep.AdamW(params)
    assert calls(lambda: fresh.load_state_dict(saved)) <= 173


def test_an_optimizer_of_a_rule_that_is_not_registered_is_unpickled_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = pickle.dumps(tilestep.Lion(make_params([(3,)])))
    monkeypatch.delitem(tilestep.registry, "Lion")
    with pytest.raises(tilestep.RuleError, match=r"no rule is registered as 'Lion'.*@tilestep.rule\(name='Lion'\)"):
        pickle.loads(saved)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_checkpoint_from_before_the_first_step_takes_the_weights_that_come_later(is_ahead: bool) -> None:
    """An average that was saved with its first weights stayed at these, though no step had been taken."""
    models = [torch.nn.Linear(3, 2) for _ in range(3)]
    optimizers = [tilestep.ScheduleFreeAdamW(model.parameters(), lr=0.1) for model in models]
    tilestep.overlap(optimizers[0], models[0], during="forward")
    if is_ahead:
        tilestep.overlap(optimizers[1], models[1], during="forward")
    saved = optimizers[0].state_dict()
    assert saved["state"][0]["step"] == 0
    optimizers[1].load_state_dict(saved)
    models[1].load_state_dict(models[2].state_dict())
    for _ in range(2):
        for model, optimizer in zip(models[1:], optimizers[1:]):
            model(torch.ones(3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, wanted in zip(models[1].parameters(), models[2].parameters()):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0)
