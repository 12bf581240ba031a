"""The classes made from named rules: signatures, groups with rules of their own, copies and pickles."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re
from typing import Any

import pytest
import torch
from twins import assert_close, make_params, set_gradients, train, twins

import tilestep
from tilestep.rules.compose import ema


@pytest.mark.parametrize("name", sorted(tilestep.registry))
def test_a_class_for_every_rule(name: str) -> None:
    made = getattr(tilestep, name)
    assert name in tilestep.__all__ and made.__name__ == name and issubclass(made, tilestep.Optimizer)
    signature = inspect.signature(made)
    assert next(iter(signature.parameters)) == "params"
    rule = tilestep.registry[name]
    for key, value in {**rule.hyperparameters, **rule.options}.items():
        assert signature.parameters[key].default == value
    common = {"max_grad_norm", "master_weights", "skip_nonfinite"}
    assert common <= {key for key, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert "Args:" in made.__doc__ and made.__doc__.startswith(inspect.cleandoc(rule.__doc__ or "")[:20])


def test_arguments_by_position() -> None:
    group = tilestep.AdamW(make_params(), 0.1, (0.5, 0.6), 1e-3, 0.2, True).param_groups[0]
    wanted = torch.optim.AdamW(make_params(), 0.1, (0.5, 0.6), 1e-3, 0.2, True).param_groups[0]
    assert {key: group[key] for key in wanted if key != "params"} == {k: v for k, v in wanted.items() if k != "params"}
    with pytest.raises(TypeError, match=re.escape("Lion() too many positional arguments")):
        tilestep.Lion(make_params(), 0.1, (0.9, 0.99), 0.0, False, "extra", "more", "and more")
    with pytest.raises(TypeError, match=re.escape("AdamW() missing a required argument: 'params'")):
        tilestep.AdamW()  # type: ignore[call-arg]


def test_hyperparameters_of_groups() -> None:
    def groups(params: list[Any]) -> list[dict[str, Any]]:
        return [
            {"params": params[:2], "lr": 0.1},
            {"params": params[2:4], "betas": (0.5, 0.6), "weight_decay": 0.0},
            {"params": params[4:], "amsgrad": True, "eps": 1e-4},
        ]

    mine, theirs = make_params(), make_params()
    ours, torchs = tilestep.AdamW(groups(mine), lr=0.01), torch.optim.AdamW(groups(theirs), lr=0.01)
    train([(ours, mine), (torchs, theirs)], range(4))
    assert_close(mine, theirs)


def test_a_group_with_another_rule_takes_that_rule_s_defaults_and_says_so(recwarn: Any) -> None:
    """Muon's learning rate is ten times AdamW's, and its weight decay is another."""
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8))

    def numbers(optimizer: Any) -> list[tuple[float, float]]:
        return [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]

    optimizer = tilestep.Optimizer(tilestep.muon_groups(model), "Muon", lr=0.02, weight_decay=0.5)
    assert numbers(optimizer) == [(0.02, 0.5), (1e-3, 0.01)]
    (said,) = [str(one.message) for one in recwarn]
    assert said == (
        "a param group of rule AdamW takes that rule's defaults, lr=0.001, weight_decay=0.01, and not the optimizer's "
        "lr=0.02, weight_decay=0.5 for Muon; set them in the group"
    )
    recwarn.clear()
    told = tilestep.muon_groups(model, others={"lr": 3e-4, "weight_decay": 0.5})
    assert numbers(tilestep.Optimizer(told, "Muon", lr=0.02, weight_decay=0.5)) == [(0.02, 0.5), (3e-4, 0.5)]
    assert numbers(tilestep.Optimizer(tilestep.muon_groups(model), "Muon")) == [(1e-3, 0.1), (1e-3, 0.01)]
    assert numbers(tilestep.Optimizer(tilestep.muon_groups(model), "Muon", lr=1e-3)) == [(1e-3, 0.1), (1e-3, 0.01)]
    # Rules derived from the optimizer's, or from the same rule, take its arguments.
    careful = tilestep.cautious(tilestep.registry["AdamW"])
    first, second, third = make_params()[:3]
    groups = [{"params": [first]}, {"params": [second], "rule": careful}, {"params": [third], "max_grad_norm": None}]
    assert numbers(tilestep.AdamW(groups, lr=0.5, max_grad_norm=tilestep.AdaGC())) == [(0.5, 0.01)] * 3
    assert numbers(tilestep.Optimizer([{"params": [first], "rule": "AdamW"}], careful, lr=0.5)) == [(0.5, 0.01)]
    assert not list(recwarn)


def test_groups_with_rules_of_their_own() -> None:
    @tilestep.rule
    def sign_descent(param: Any, grad: Any, *, lr: Any = 0.5, scale: Any = 1.0) -> Any:
        return param - lr * scale * grad.sign()

    params = make_params()
    optimizer = tilestep.AdamW(
        [
            {"params": params[:2]},
            {"params": params[2:4], "rule": "SGD", "momentum": 0.9, "lr": 0.1},
            {"params": params[4:], "rule": sign_descent, "lr": 0.25},
        ],
        lr=0.1,
        weight_decay=0.0,
    )
    first, second, third = optimizer.param_groups
    # What the optimizer was given is for groups of its rule; others have their rule's defaults.
    assert (second["lr"], second["weight_decay"], second["dampening"]) == (0.1, 0.0, 0.0)
    assert (third["lr"], third["scale"]) == (0.25, 1.0)
    assert "betas" in first and "betas" not in second and "betas" not in third and "weight_decay" not in third
    assert [group.get("rule") for group in optimizer.param_groups] == [None, "SGD", "sign_descent"]
    assert [optimizer.rule_of(group).name for group in optimizer.param_groups] == ["AdamW", "SGD", "sign_descent"]

    theirs = twins(params)
    adam = torch.optim.AdamW(theirs[:2], lr=0.1, weight_decay=0.0)
    sgd = torch.optim.SGD(theirs[2:4], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(other, 0.5) for other in (adam, sgd)]
    rate = 0.25
    for step in range(3):
        set_gradients(params, theirs, step=step)
        for other in (optimizer, adam, sgd):
            other.step()
        with torch.no_grad():
            for param in theirs[4:]:
                param -= rate * param.grad.sign()
        rate *= 0.5
        for other in (schedule, *schedules):
            other.step()
    assert_close(params, theirs)
    assert set(optimizer.state[params[2]]) == {"step", "momentum_buffer"} and set(optimizer.state[params[5]]) == {
        "step"
    }
    checkpoint = optimizer.state_dict()
    optimizer.load_state_dict(checkpoint)
    checkpoint["param_groups"][1]["rule"] = "Lion"
    with pytest.raises(tilestep.StateError, match=r"group 1 of the checkpoint is of rule Lion, this .* of SGD"):
        optimizer.load_state_dict(checkpoint)


def test_a_group_added_in_the_middle_of_a_training() -> None:
    mine, theirs = make_params(), make_params()
    ours, torchs = tilestep.AdamW(mine[:2], lr=0.1), torch.optim.AdamW(theirs[:2], lr=0.1)
    train([(ours, mine[:2]), (torchs, theirs[:2])], range(2))
    group = {"params": iter(mine[2:]), "lr": 0.3}
    ours.add_param_group(group)
    assert set(group) == {"params", "lr"}, "the caller's dict is left alone"
    torchs.add_param_group({"params": theirs[2:], "lr": 0.3})
    train([(ours, mine), (torchs, theirs)], range(2, 4))
    assert_close(mine, theirs)
    with pytest.raises(TypeError, match="param_group must be a dict"):
        ours.add_param_group(mine)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="some parameters appear in more than one"):
        ours.add_param_group({"params": mine[:1]})
    assert len(ours.param_groups) == 2


def test_any_rule_by_name_or_itself() -> None:
    by_name, by_rule = make_params(), make_params()
    train(
        [
            (tilestep.Optimizer(by_name, "Lion", lr=0.1), by_name),
            (tilestep.Optimizer(by_rule, tilestep.registry["Lion"], lr=0.1), by_rule),
        ],
        range(2),
    )
    assert all(map(torch.equal, by_name, by_rule))


def test_subclasses_keep_the_step() -> None:
    class Halved(tilestep.AdamW):  # type: ignore[name-defined,misc]
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr=lr / 2)

    mine, theirs = make_params(), make_params()
    train([(Halved(mine, 0.2), mine), (torch.optim.AdamW(theirs, lr=0.1), theirs)], range(2))
    assert_close(mine, theirs)


def pickled(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


def saved(pair: Any) -> Any:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("rule", ["AdamW", "NAdam", "composed"])
def test_copies_continue_alike_and_apart(copied: Any, rule: str) -> None:
    chosen = ema(tilestep.registry["SGD"], 0.9) if rule == "composed" else rule
    params = make_params()
    optimizer = tilestep.Optimizer(params, chosen, max_grad_norm=1.0)
    train([(optimizer, params)], range(2))
    twin_params, twin = copied((params, optimizer))
    start = twins(params)
    train([(optimizer, params)], range(2, 4))
    assert all(map(torch.equal, twin_params, start)), "the copy shares memory"
    train([(twin, twin_params)], range(2, 4))
    assert all(map(torch.equal, params, twin_params))
    assert twin.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_a_copied_optimizer_of_a_rule_in_a_function() -> None:
    @tilestep.rule
    def local(param: Any, grad: Any, *, lr: Any = 0.5) -> Any:
        return param - lr * grad

    params = make_params()
    optimizer = tilestep.Optimizer(params, local)
    twin_params, twin = copy.deepcopy((params, optimizer))
    train([(optimizer, params), (twin, twin_params)], range(2))
    assert all(map(torch.equal, params, twin_params))


def test_the_text_form_shows_the_hyperparameters() -> None:
    assert re.search(
        r"AdamW \(\nParameter Group 0\n(.*\n)*    lr: 0.125\n", repr(tilestep.AdamW(make_params(), lr=0.125))
    )
