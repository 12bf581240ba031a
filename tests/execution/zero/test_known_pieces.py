"""Steps that take the pieces for what they were at the last one: only while they are, and with the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tilestep
from tilestep import native
from tilestep.memory.offload import move_state
from tilestep.memory.offloaded import OffloadedState
from tilestep.optimizer.plan import StepPlan
from tilestep.rules.compose import ema


@pytest.fixture(autouse=True)
def with_the_native_module(one_rank: None) -> None:
    if not native.wait():
        pytest.skip("no C++ compiler, or TILESTEP_NATIVE=0")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What steps do before they update, one after the other."""
    looks: list[str] = []
    refresh = StepPlan.refresh

    def looking(self: StepPlan, **given: Any) -> bool:
        looks.append("look")
        is_known = refresh(self, **given)
        looks[-1] = "known" if is_known else "not as known" if given.get("unmoved") else "look"
        return is_known

    monkeypatch.setattr(StepPlan, "refresh", looking)
    return looks


def adamw(params: Any) -> Any:
    return tilestep.AdamW(params, lr=0.1, max_grad_norm=1.0, master_weights=True)  # type: ignore[attr-defined]


class Twins:
    """A model in bfloat16 with masters and one with an ordinary optimizer; only the first one's is sharded."""

    def __init__(self, make: Callable[[Any], Any] = adamw) -> None:
        torch.manual_seed(0)
        self.models = [nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))).bfloat16() for _ in range(2)]
        self.models[1].load_state_dict(self.models[0].state_dict())
        self.optimizers = [make(model.parameters()) for model in self.models]
        tilestep.shard(self.optimizers[0], self.models[0])

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            data = torch.randn(3, 5, dtype=torch.bfloat16)
            for model, optimizer in zip(self.models, self.optimizers):
                model(data).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    def both(self, change: Callable[[nn.Module, Any], Any]) -> None:
        for model, optimizer in zip(self.models, self.optimizers):
            change(model, optimizer)

    def compare(self) -> None:
        for mine, theirs in zip(self.models[0].parameters(), self.models[1].parameters(), strict=True):
            assert torch.equal(mine, theirs)
        mine, theirs = self.optimizers[0].full_state_dict()["state"], self.optimizers[1].state_dict()["state"]
        assert mine.keys() == theirs.keys()
        for number, values in theirs.items():
            for name, value in values.items():
                assert torch.equal(mine[number][name], value), name


def test_pieces_are_looked_at_until_they_are_known(looks: list[str]) -> None:
    twins = Twins()
    twins.train(3)
    looks.clear()
    twins.train(4)
    # The plain optimizer looks at every step.
    assert looks == ["known", "look"] * 4
    twins.compare()


@torch.no_grad()
def write(model: nn.Module, optimizer: Any) -> None:
    model[1].weight.mul_(0.5)


def give_memory(model: nn.Module, optimizer: Any) -> None:
    model[0].bias.data = model[0].bias.data + 1


def give_state_memory(model: nn.Module, optimizer: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            before, value.data = value.data, value.data.clone()
            before.fill_(1e30)


def set_rate(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.01


def set_flag(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["maximize"] = True


def freeze(model: nn.Module, optimizer: Any) -> None:
    model[0].requires_grad_(not model[0].weight.requires_grad)


def load(model: nn.Module, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def load_model(model: nn.Module, optimizer: Any) -> None:
    model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})


def clip_by_hand(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["max_grad_norm"] = None


def write_state(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model[2].weight]["exp_avg"].zero_()


CHANGES = [
    write,
    give_memory,
    give_state_memory,
    set_rate,
    set_flag,
    freeze,
    load,
    load_model,
    clip_by_hand,
    write_state,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_is_changed_counts_at_the_next_step(change: Callable[[nn.Module, Any], Any], looks: list[str]) -> None:
    twins = Twins()
    twins.train(4)
    for _ in range(2):
        twins.both(change)
        twins.train(1)
        twins.compare()
        twins.train(4)
        assert looks[-2] == "known"
        twins.compare()


def test_pieces_are_looked_at_after_weights_to_evaluate(looks: list[str]) -> None:
    twins = Twins(lambda params: tilestep.Optimizer(params, ema(tilestep.registry["AdamW"], 0.9), lr=0.1))
    twins.train(4)
    twins.both(lambda model, optimizer: optimizer.eval())
    for mine, theirs in zip(twins.models[0].parameters(), twins.models[1].parameters()):
        assert torch.equal(mine, theirs)
    twins.both(lambda model, optimizer: optimizer.train())
    looks.clear()
    twins.train(1)
    assert "known" not in looks
    twins.train(3)
    assert looks[-2] == "known"
    twins.compare()


def test_gradients_that_are_asked_for_before_the_step(looks: list[str]) -> None:
    twins = Twins()
    twins.train(4)
    for _ in range(3):
        frozen = [param for param in twins.models[0][0].parameters()]
        twins.both(freeze)
        data = torch.randn(3, 5, dtype=torch.bfloat16)
        for model in twins.models:
            model(data).square().sum().backward()
        # The pieces are made ready twice before the step, which has not seen the first time.
        assert float(twins.optimizers[0].grad_norm_of([p for p in twins.models[0].parameters() if p.requires_grad])) > 0
        twins.both(lambda model, optimizer: optimizer.step())
        twins.both(lambda model, optimizer: optimizer.zero_grad())
        twins.compare()
        assert all(param.requires_grad == frozen[0].requires_grad for param in frozen)


class Elsewhere(OffloadedState):
    """Has to see every step."""


def test_states_that_live_elsewhere_are_looked_at(looks: list[str]) -> None:
    twins = Twins()
    twins.train(4)
    move_state(twins.optimizers[0], Elsewhere(), "elsewhere", "as a test asks for it")
    twins.train(4)
    looks.clear()
    twins.train(1)
    assert "known" not in looks
    twins.compare()


def test_a_step_that_fails_leaves_nothing_known(looks: list[str]) -> None:
    twins = Twins()
    twins.train(4)
    twins.models[0](torch.ones(3, 5, dtype=torch.bfloat16)).sum().backward()
    group = twins.optimizers[0].param_groups[0]
    rate, group["lr"] = group["lr"], float("nan")
    with pytest.raises(ValueError, match="lr"):
        twins.optimizers[0].step()
    group["lr"] = rate
    twins.optimizers[0].zero_grad()
    looks.clear()
    twins.train(1)
    assert looks[0] == "look"
    twins.compare()
