"""torch.distributed.checkpoint between torch's optimizers and these, in place and with torch's own planners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import tilestep
from tilestep.rules.limits import first_numbers

KINDS = {"ours": tilestep.AdamW, "torch's": torch.optim.AdamW}
PAIRS = [("torch's", "ours"), ("ours", "torch's"), ("ours", "ours")]


def trained(kind: str, steps: int = 3) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 2))
    optimizer = KINDS[kind](model.parameters(), lr=0.03, amsgrad=True)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 15).view(3, 5)).square().sum().backward()
    optimizer.step()


def follow(source: tuple[torch.nn.Module, Any], target: tuple[torch.nn.Module, Any]) -> None:
    target[0].load_state_dict(source[0].state_dict())
    for _ in range(2):
        step(*source)
        step(*target)
    for ours, theirs in zip(source[0].parameters(), target[0].parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_a_checkpoint_loads_in_place_with_torch_s_planner(saved: str, loaded: str, tmp_path: Path) -> None:
    source, target = trained(saved), trained(loaded, 1)
    target[1].param_groups[0]["lr"] = 5.0
    dcp.save({"optimizer": source[1].state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    state = {"optimizer": target[1].state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    target[1].load_state_dict(state["optimizer"])
    assert target[1].param_groups[0]["lr"] == 0.03
    follow(source, target)


@pytest.mark.parametrize("flat", [False, True], ids=["full", "flattened"])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_state_by_names_of_parameters(saved: str, loaded: str, steps: int, flat: bool, tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    source, target = trained(saved), trained(loaded, steps)
    dcp.save(get_optimizer_state_dict(*source, options=options), checkpoint_id=tmp_path, no_dist=True)
    state = get_optimizer_state_dict(*target, options=options)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(*target, state, options=options)
    follow(source, target)


def test_options_that_are_set_are_saved_and_those_at_their_defaults_are_not() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    groups = [{"params": [weight]}, {"params": [torch.nn.Parameter(torch.ones(2))], "max_grad_norm": None}]
    optimizer = tilestep.AdamW(groups, max_grad_norm=1.0)
    first, second = optimizer.state_dict()["param_groups"]
    assert first["max_grad_norm"] == 1.0 and "max_grad_norm" not in second
    assert not {"rule", "master_weights"} & {*first, *second}
    optimizer.param_groups[1]["max_grad_norm"] = 2.0
    weight.grad = torch.full((3,), 1e3)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(1e3 * 3**0.5)
    assert [group["max_grad_norm"] for group in optimizer.state_dict()["param_groups"]] == [1.0, 2.0]


def test_a_checkpoint_with_the_further_keys_that_groups_used_to_have() -> None:
    source, target = trained("ours"), trained("ours", 0)
    saved = source[1].state_dict()
    saved["param_groups"][0].update(rule="AdamW", max_grad_norm=None, master_weights=False)
    target[1].load_state_dict(saved)
    assert set(target[1].param_groups[0]) == set(torch.optim.AdamW([torch.zeros(1)]).param_groups[0])
    follow(source, target)


def test_a_hyperparameter_that_a_checkpoint_lacks_stays_the_optimizer_s() -> None:
    source, target = trained("ours"), trained("ours", 0)
    saved = source[1].state_dict()
    del saved["param_groups"][0]["lr"]
    target[1].param_groups[0]["lr"] = 0.25
    target[1].load_state_dict(saved)
    assert target[1].param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("limit", [{"skip_above": tilestep.Sigma(6)}, {"max_grad_norm": tilestep.ZClip()}])
@pytest.mark.parametrize("steps", [0, 1])
def test_the_memory_of_limits_is_loaded_and_stays_without_any(steps: int, limit: Any, tmp_path: Path) -> None:
    (name,), (numbers,) = zip(*((type(one).__name__, first_numbers(one)) for one in limit.values()))

    def stepped(number: int, options: Any) -> Any:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = tilestep.AdamW([weight], **options)
        for _ in range(number):
            weight.grad = torch.ones(3)
            optimizer.step()
        return optimizer

    def loaded(folder: str) -> Any:
        optimizer = stepped(steps, limit)
        state = {"optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / folder, planner=tilestep.LoadPlanner(), no_dist=True)
        optimizer.load_state_dict(state["optimizer"])
        assert optimizer.param_groups[0].get("max_grad_norm") == limit.get("max_grad_norm")
        return optimizer.state_dict()["param_groups"][0]["limits"][name]

    sources = {"with": stepped(3, limit), "without": stepped(3, {})}
    for folder, source in sources.items():
        dcp.save({"optimizer": source.state_dict()}, checkpoint_id=tmp_path / folder, no_dist=True)
    assert torch.equal(loaded("with"), sources["with"].state_dict()["param_groups"][0]["limits"][name])
    own = stepped(steps, limit).state_dict()["param_groups"][0].get("limits", {name: torch.tensor(numbers)})
    assert loaded("without").tolist() == own[name].tolist()
    if "max_grad_norm" in limit:
        other = stepped(1, {"max_grad_norm": 1.0})
        dcp.save({"optimizer": other.state_dict()}, checkpoint_id=tmp_path / "other", no_dist=True)
        with pytest.raises(dcp.api.CheckpointException, match=r"Missing key.*\.ZClip"):
            loaded("other")
