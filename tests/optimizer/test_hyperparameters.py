"""Numbers change at every step without building anything; flags and branches that change build once and keep state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from twins import assert_close, make_params, set_gradients, train

import tilestep
from tilestep.optimizer import Optimizer


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Optimizer]:
    """Every optimizer whose tables are built, in order."""
    built: list[Optimizer] = []
    make = Optimizer._make_plan

    def counted(self: Optimizer, *, ahead: bool) -> Any:
        if self.plan is not None:
            built.append(self)
        return make(self, ahead=ahead)

    monkeypatch.setattr(Optimizer, "_make_plan", counted)
    return built


CHANGES: dict[str, list[tuple[str, Any]]] = {
    "AdamW": [("lr", 0.02), ("betas", (0.5, 0.9)), ("weight_decay", 0.5), ("eps", 1e-3), ("lr", 0.03)],
    "SGD": [("momentum", 0.5), ("lr", 0.2), ("weight_decay", 0.1), ("dampening", 0.3), ("momentum", 0.6)],
    "RMSprop": [("alpha", 0.5), ("lr", 0.02), ("weight_decay", 0.1), ("eps", 1e-2), ("lr", 0.0)],
}


@pytest.mark.parametrize("name", CHANGES)
def test_numbers_change_every_step_without_a_build(name: str, builds: list[Optimizer]) -> None:
    kwargs: dict[str, Any] = {"lr": 0.1, **({"momentum": 0.9, "weight_decay": 0.01} if name == "SGD" else {})}
    mine, theirs = make_params(), make_params()
    ours, torchs = getattr(tilestep, name)(mine, **kwargs), getattr(torch.optim, name)(theirs, **kwargs)
    train([(ours, mine), (torchs, theirs)], range(1))
    compiled = tilestep.compile_count()
    builds.clear()
    for step, (key, value) in enumerate(CHANGES[name], start=1):
        for optimizer in (ours, torchs):
            optimizer.param_groups[0][key] = value
        train([(ours, mine), (torchs, theirs)], range(step, step + 1))
        assert_close(mine, theirs)
    assert builds == [] and tilestep.compile_count() == compiled


def test_a_rate_that_is_a_tensor_is_read_at_every_step(builds: list[Optimizer]) -> None:
    rate, other = torch.tensor(0.1), torch.tensor(0.1)
    mine, theirs = make_params(), make_params()
    ours, torchs = tilestep.AdamW(mine, lr=rate), torch.optim.AdamW(theirs, lr=other, foreach=False)
    builds.clear()
    for step in range(4):
        train([(ours, mine), (torchs, theirs)], range(step, step + 1))
        assert_close(mine, theirs)
        rate.mul_(0.5)
        other.mul_(0.5)
    ours.param_groups[0]["lr"], torchs.param_groups[0]["lr"] = 0.3, 0.3
    train([(ours, mine), (torchs, theirs)], range(4, 5))
    ours.param_groups[0]["lr"], torchs.param_groups[0]["lr"] = torch.tensor([0.2]), torch.tensor(0.2)
    train([(ours, mine), (torchs, theirs)], range(5, 6))
    assert_close(mine, theirs)
    assert builds == []


def test_a_list_changed_in_place_takes_effect() -> None:
    mine, theirs = make_params(), make_params()
    ours, torchs = tilestep.AdamW(mine, betas=[0.9, 0.99]), torch.optim.AdamW(theirs, betas=[0.9, 0.99])
    train([(ours, mine), (torchs, theirs)], range(2))
    ours.param_groups[0]["betas"][0] = 0.5
    torchs.param_groups[0]["betas"] = (0.5, 0.99)
    train([(ours, mine), (torchs, theirs)], range(2, 4))
    assert_close(mine, theirs)


def test_a_branch_on_a_tensor_the_host_can_read() -> None:
    mine, theirs = make_params(), make_params()
    ours = tilestep.SGD(mine, lr=0.1, momentum=torch.tensor(0.9))
    torchs = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    train([(ours, mine), (torchs, theirs)], range(3))
    assert_close(mine, theirs)


def test_a_branch_on_sizes_and_a_number(builds: list[Optimizer]) -> None:
    @tilestep.rule
    def small_ones_faster(param: Any, grad: Any, *, lr: Any = 0.1, limit: Any = 6) -> Any:
        if param.numel() > limit:
            return param - lr * grad
        return param - 2 * lr * grad

    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in [(2,), (2, 3), (7,), (2, 5)]]
    optimizer = tilestep.Optimizer(params, small_ones_faster, lr=0.5)
    builds.clear()
    for limit, factors in ((6, [2, 2, 1, 1]), (5, [2, 1, 1, 1]), (5.5, [2, 1, 1, 1]), (9, [2, 2, 2, 1])):
        optimizer.param_groups[0]["limit"] = limit
        before = [param.detach().clone() for param in params]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        moved = [(start - param.detach()).unique().item() for start, param in zip(before, params)]
        assert moved == [0.5 * factor for factor in factors], limit
    assert len(builds) == 2  # between 5 and 5.5 no tensor goes another way


def test_momentum_that_begins_late_and_ends(builds: list[Optimizer]) -> None:
    mine, theirs = make_params(), make_params()
    ours, torchs = tilestep.SGD(mine, lr=0.1), torch.optim.SGD(theirs, lr=0.1)
    builds.clear()
    for index, momentum in enumerate([0.0, 0.9, 0.5, 0.0, 0.9]):
        for optimizer in (ours, torchs):
            optimizer.param_groups[0]["momentum"] = momentum
        if momentum == 0.0:
            # torch keeps a buffer it does not use; ours is gone.
            for param in theirs:
                torchs.state[param].pop("momentum_buffer", None)
        train([(ours, mine), (torchs, theirs)], range(2 * index, 2 * index + 2))
        assert_close(mine, theirs)
        assert ("momentum_buffer" in ours.state[mine[0]]) == (momentum != 0)
    assert len(builds) == 3


def test_amsgrad_that_begins_late_keeps_the_moments(builds: list[Optimizer]) -> None:
    mine, theirs = make_params(), make_params()
    ours, torchs = tilestep.Adam(mine), torch.optim.Adam(theirs)
    train([(ours, mine), (torchs, theirs)], range(3))
    builds.clear()
    for optimizer in (ours, torchs):
        optimizer.param_groups[0]["amsgrad"] = True
    for param in theirs:
        torchs.state[param]["max_exp_avg_sq"] = torch.zeros_like(param)
    train([(ours, mine), (torchs, theirs)], range(3, 6))
    assert_close(mine, theirs)
    assert len(builds) == 1 and float(ours.state[mine[0]]["step"]) == 6


def test_maximize_flipped_by_hand_turns_the_step() -> None:
    mine, theirs = make_params(), make_params()
    ours, torchs = tilestep.SGD(mine, lr=0.1), torch.optim.SGD(theirs, lr=0.1)
    train([(ours, mine), (torchs, theirs)], range(2))
    for optimizer in (ours, torchs):
        optimizer.param_groups[0]["maximize"] = True
    train([(ours, mine), (torchs, theirs)], range(2, 4))
    assert_close(mine, theirs)


def test_only_the_flipped_group_changes() -> None:
    mine, theirs = make_params(), make_params()

    def groups(params: list[Any]) -> list[dict[str, Any]]:
        return [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.3, "momentum": 0.9}]

    ours, torchs = tilestep.SGD(groups(mine), weight_decay=0.1), torch.optim.SGD(groups(theirs), weight_decay=0.1)
    train([(ours, mine), (torchs, theirs)], range(2))
    for optimizer in (ours, torchs):
        optimizer.param_groups[1]["nesterov"] = True
        optimizer.param_groups[0]["lr"] = 0.05
    train([(ours, mine), (torchs, theirs)], range(2, 4))
    assert_close(mine, theirs)
    assert len(ours.param_groups) == 2


def test_clipping_can_begin_and_end_and_groups_can_differ() -> None:
    mine, theirs = make_params(), make_params()
    ours, torchs = tilestep.SGD(mine, lr=0.1), torch.optim.SGD(theirs, lr=0.1)
    for step, limit in enumerate([None, 0.5, None, torch.tensor(0.25), 1e6]):
        ours.param_groups[0]["max_grad_norm"] = limit
        set_gradients(mine, theirs, step=step)
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(theirs, float(limit))
        ours.step()
        torchs.step()
        assert_close(mine, theirs)


def test_unused_keys_of_a_group_are_nobodys_business(builds: list[Optimizer]) -> None:
    params = make_params()
    optimizer = tilestep.AdamW([{"params": params, "name": "all"}])
    train([(optimizer, params)], range(1))
    builds.clear()
    optimizer.param_groups[0]["initial_lr"] = 1.0
    optimizer.param_groups[0]["name"] = "every"
    train([(optimizer, params)], range(1, 2))
    assert builds == []
    assert optimizer.state_dict()["param_groups"][0]["name"] == "every"


def test_a_step_in_steady_state_allocates_no_tensor() -> None:
    params = [torch.nn.Parameter(torch.randn(1000)) for _ in range(50)]
    optimizer = tilestep.AdamW(params, max_grad_norm=1.0)
    train([(optimizer, params)], range(2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        optimizer.step()
    allocated = sum(max(event.cpu_memory_usage, 0) for event in profile.events() if event.name == "[memory]")
    assert allocated < 1024


@pytest.mark.parametrize(("name", "key"), [("ADOPT", "clip_exponent"), ("Tiger", "shrink_ratio")])
def test_a_number_that_a_rule_can_do_without_may_be_none(name: str, key: str) -> None:
    rule = tilestep.registry[name]
    start, gradients = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4), torch.tensor([3.0, -40.0, 0.5, 7.0])
    param = torch.nn.Parameter(start.clone())
    optimizer = getattr(tilestep, name)([param], lr=0.1, **{key: None})
    wanted, states = start, [torch.zeros_like(start) for _ in rule.states]
    for step, gradient in enumerate(gradients, start=1):
        if step == 4:
            optimizer.param_groups[0][key] = rule.hyperparameters[key]
        param.grad = gradient.double() * start
        numbers = {**rule.hyperparameters, "lr": 0.1, key: optimizer.param_groups[0][key]}
        wanted, *states = rule(wanted, param.grad.clone(), *states, **numbers, step=step)
        optimizer.step()
        torch.testing.assert_close(param.detach(), wanted, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match="Invalid lr: None; it must be a number"):
        getattr(tilestep, name)([param], lr=None)


REFUSED = {
    "differentiable": ("Adam", True, "differentiable=True is not supported"),
    "decoupled_weight_decay": ("AdamW", False, "decoupled_weight_decay=False is not supported by AdamW"),
    "max_grad_norm": ("Lion", -1.0, "Invalid max_grad_norm.* -1.0"),
    "master_weights": ("SGD", "sixteen", "Invalid master_weights"),
    "state_dtype": ("Adagrad", "sixteen", "Invalid state_dtype"),
    "rule": ("Adafactor", "Lion", "no group of the optimizer was created with"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_the_constructor_refuses_is_refused_when_a_group_is_given_it_later(key: str) -> None:
    name, value, message = REFUSED[key]
    params = make_params()
    optimizer = getattr(tilestep, name)(params, **({"max_grad_norm": 1.0} if key == "max_grad_norm" else {}))
    for stepped in (False, True):
        set_gradients(params)
        if stepped:
            optimizer.step()
        before, group = [param.detach().clone() for param in params], optimizer.param_groups[0]
        original = dict(group)
        group[key] = value
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                optimizer.step()
        assert_close(params, before)
        group.clear()
        group.update(original)
    optimizer.step()
    assert any(not torch.equal(param, old) for param, old in zip(params, before))
    if key == "rule":
        return
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": make_params(), key: value})
    saved = optimizer.state_dict()
    saved["param_groups"][0][key] = value
    if key not in ("master_weights", "state_dtype"):
        with pytest.raises((ValueError, tilestep.StateError), match=key):
            optimizer.load_state_dict(saved)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_beside_foreach_is_refused_as_by_torch(name: str) -> None:
    for module in (torch.optim, tilestep):
        with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
            getattr(module, name)(make_params(), fused=True, foreach=True)
