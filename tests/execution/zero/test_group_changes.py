"""Param groups and states of a sharded optimizer that other code changes: taken over, or refused before a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tilestep


def made(sharded: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    groups = [{"params": list(layer.parameters()), "lr": lr} for layer, lr in zip(model, (0.5, 0.01))]
    optimizer: Any = tilestep.SGD(groups, lr=0.1, momentum=0.9)  # type: ignore[attr-defined]
    return model, tilestep.shard(optimizer, model) if sharded else optimizer


def train(model: nn.Module, optimizer: Any, keeps_gradients: bool = False) -> None:
    model(torch.arange(12.0).view(3, 4) / 8).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=not keeps_gradients)


def move(optimizer: Any) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


def exchange(optimizer: Any) -> None:
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]


def replace(optimizer: Any) -> None:
    params = optimizer.param_groups[0]["params"]
    params[0] = nn.Parameter(params[0].detach().clone())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a parameter removed": lambda optimizer: optimizer.param_groups[0]["params"].pop(),
    "a group removed": lambda optimizer: optimizer.param_groups.pop(0),
    "groups in another order": lambda optimizer: optimizer.param_groups.reverse(),
    "a parameter moved": move,
    "parameters exchanged": exchange,
    "a parameter replaced": replace,
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_parameters_in_the_groups_are_refused(change: str, one_rank: None) -> None:
    """They were updated as before, with the hyperparameters of whichever group was at that place."""
    model, optimizer = made(True)
    for _ in range(2):
        train(model, optimizer)
    saved = optimizer.full_state_dict()
    CHANGES[change](optimizer)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match="other parameters than shard"):
        train(model, optimizer)
    assert all(map(torch.equal, model.parameters(), before))
    for call in (optimizer.state_dict, optimizer.full_state_dict, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(RuntimeError, match="other parameters than shard"):
            call()


def test_a_group_that_was_refused_comes_back_with_its_state(one_rank: None) -> None:
    pairs = [made(True), made(False)]
    for model, optimizer in pairs:
        for step in range(5):
            if step == 3 and optimizer is pairs[0][1]:
                left = optimizer.param_groups.pop()
                with pytest.raises(RuntimeError, match="other parameters than shard"):
                    train(model, optimizer)
                optimizer.param_groups.append(left)
                optimizer.step()  # the gradients are there still
                optimizer.zero_grad()
            else:
                train(model, optimizer)
    for (mine, ours), (theirs, reference) in zip(*(zip(m.parameters(), [o] * 4) for m, o in pairs)):
        torch.testing.assert_close(mine, theirs)
        assert ours.state[mine]["step"] == reference.state[theirs]["step"] == 5


def test_another_rule_of_a_group_is_refused(one_rank: None) -> None:
    """Its parameters were updated by the rule before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    groups = [{"params": list(model[0].parameters()), "rule": "Lion"}, {"params": list(model[1].parameters())}]
    optimizer: Any = tilestep.shard(tilestep.SGD(groups, lr=0.1), model)  # type: ignore[attr-defined]
    train(model, optimizer)
    first, second = optimizer.param_groups
    second.update({key: value for key, value in first.items() if key != "params"})
    with pytest.raises(RuntimeError, match="rule of a param group"):
        train(model, optimizer)


def test_another_order_within_a_group_changes_nothing(one_rank: None) -> None:
    pairs = [made(True), made(False)]
    for model, optimizer in pairs:
        for step in range(4):
            if step == 2:
                optimizer.param_groups[0]["params"].reverse()
            train(model, optimizer)
    for param, expected in zip(*(model.parameters() for model, _ in pairs)):
        torch.testing.assert_close(param, expected)


STATES: dict[str, Callable[[Any, Any], Any]] = {
    "one removed": lambda optimizer, param: optimizer.state.pop(param),
    "all removed": lambda optimizer, param: optimizer.state.clear(),
    "all replaced": lambda optimizer, param: setattr(optimizer, "state", {}),
    "a tensor replaced": lambda optimizer, param: optimizer.state[param].update(
        momentum_buffer=torch.full_like(optimizer.state[param]["momentum_buffer"], 0.5)
    ),
    "a tensor removed": lambda optimizer, param: optimizer.state[param].pop("momentum_buffer"),
    "one set": lambda optimizer, param: optimizer.state.update(
        {param: {"momentum_buffer": torch.ones_like(optimizer.state[param]["momentum_buffer"])}}
    ),
}


@pytest.mark.parametrize("keeps_gradients", [False, True])
@pytest.mark.parametrize("change", STATES)
def test_states_that_are_removed_or_set_are_taken_over(change: str, keeps_gradients: bool, one_rank: None) -> None:
    """Steps went on with the states that they had; also where gradients stay where they were."""
    pairs = [made(True), made(False)]
    for model, optimizer in pairs:
        for step in range(7):
            if step in (2, 6):  # at first, and where steps have repeated themselves
                STATES[change](optimizer, model[0].weight)
            train(model, optimizer, keeps_gradients)
    for param, expected in zip(*(model.parameters() for model, _ in pairs)):
        torch.testing.assert_close(param, expected)


def test_what_users_keep_in_the_state_stays(one_rank: None) -> None:
    model, optimizer = made(True)
    optimizer.state["epoch"] = 3
    for _ in range(2):
        train(model, optimizer)
    assert optimizer.state["epoch"] == 3 and len(optimizer.state) == 5


def test_a_checkpoint_of_weights_to_evaluate_is_loaded_while_training(one_rank: None) -> None:
    """The optimizer said that it was training, and its step that it was not."""
    model = nn.Linear(4, 2)
    optimizer: Any = tilestep.ScheduleFreeSGD(model.parameters(), lr=0.1)  # type: ignore[attr-defined]
    optimizer = tilestep.shard(optimizer, model)
    train(model, optimizer)
    with optimizer.averaged():
        saved = optimizer.full_state_dict()
    assert not optimizer.is_evaluating
    optimizer.load_state_dict(saved)
    assert optimizer.is_evaluating
    optimizer.train()
    train(model, optimizer)
