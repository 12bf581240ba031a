"""Matrices that one rank has alone, some of them frozen: checkpoints have what there is, on every rank alike."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import each_passes
from test_checkpoints import assert_same, shared_folder
from torch import nn

import tilestep
from tilestep.execution.zero.checkpoint import ShardedTensorPiece

RULES = {
    "Adafactor": {"lr": 0.1},
    "Muon": {"lr": 0.1},
    "SOAP": {"lr": 0.1},
}


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(7, 7, bias=False).requires_grad_(False)
        self.first = nn.Linear(7, 6, bias=False)
        self.later = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.last = nn.Linear(6, 5, bias=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.last(self.later(torch.tanh(self.first(self.frozen(given)))))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))


def training(name: str) -> tuple[Matrices, Any]:
    model = Matrices()
    kind = getattr(tilestep, name)
    return model, tilestep.shard(kind(model.parameters(), **RULES[name]), model)


def steps(model: nn.Module, optimizer: Any, which: range) -> None:
    for step in which:
        model(batch(step)).square().mean().backward()
        optimizer.step()


def _goes_around(name: str) -> None:
    model, optimizer = training(name)
    steps(model, optimizer, range(2))
    for thaws in (False, True):
        if thaws:
            model.later.weight.requires_grad_(True)
            model.first.weight.requires_grad_(False)
            steps(model, optimizer, range(2, 4))
        full = optimizer.full_state_dict()
        assert sorted(full["state"]) == ([1, 2, 3] if thaws else [1, 3]), (name, sorted(full["state"]))
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        folder = shared_folder()
        dcp.save(saved, checkpoint_id=f"{folder}/dcp")
        tilestep.save_checkpoint(saved, f"{folder}/own")
        for load in ("dcp", "own", "full"):
            other, again = training(name)
            other.later.weight.requires_grad_(thaws)
            steps(other, again, range(7, 8))
            other.first.weight.requires_grad_(not thaws)
            if load == "full":
                again.load_state_dict(full)
                other.load_state_dict(model.state_dict())
            else:
                given = {"model": other.state_dict(), "optimizer": again.state_dict()}
                if load == "dcp":
                    dcp.load(given, checkpoint_id=f"{folder}/dcp")
                else:
                    tilestep.load_checkpoint(given, f"{folder}/own")
                again.load_state_dict(given["optimizer"])
            assert_same(again.full_state_dict(), full)
            if not thaws:
                twin, optimizer_of_twin = training(name)
                steps(twin, optimizer_of_twin, range(4))
                steps(other, again, range(2, 4))
                again.wait()
                optimizer_of_twin.wait()
                for mine, wanted in zip(other.parameters(), twin.parameters()):
                    torch.testing.assert_close(mine, wanted, atol=1e-6, rtol=1e-5)


def adafactor() -> None:
    _goes_around("Adafactor")


def muon() -> None:
    _goes_around("Muon")


def soap() -> None:
    _goes_around("SOAP")


def frozen_from_the_start_before_a_step() -> None:
    for name in RULES:
        _, optimizer = training(name)
        full = optimizer.full_state_dict()
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, sorted(full["state"]))
        assert everyone[0] == everyone[1] and set(everyone[0]) <= {1, 3}
        assert set(optimizer.state_dict()["state"]) <= set(everyone[0])


def loaded_without_state_of_what_one_rank_has() -> None:
    """A rank whose one matrix is frozen and has no state decides with the other rank all the same."""

    def matrices() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False))

    def optimizer_of(model: nn.Module) -> Any:
        return tilestep.Muon(model.parameters(), lr=0.1, max_grad_norm=1.0, stats=tilestep.Stats())  # type: ignore[attr-defined]

    saved, (model, twin) = matrices(), (matrices(), matrices())
    saved[1].requires_grad_(False)
    before = optimizer_of(saved)
    saved(torch.ones(1, 7)).sum().backward()
    before.step()
    optimizer, optimizer_of_twin = tilestep.shard(optimizer_of(model), model), optimizer_of(twin)
    pairs: list[tuple[Any, Any]] = [(model, optimizer), (twin, optimizer_of_twin)]
    for trained, updating in pairs:
        for loads in (False, True, False):
            trained[1].requires_grad_(not loads)
            for step in range(2):
                trained(torch.ones(1, 7)).sum().backward()
                updating.step()
                updating.zero_grad()
                if loads and step == 0:
                    updating.load_state_dict(before.state_dict())
    torch.testing.assert_close(optimizer.grad_norm, optimizer_of_twin.grad_norm)
    for own, wanted in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(own, wanted, atol=1e-6, rtol=1e-5)


def a_framework_that_saves_on_one_rank() -> None:
    """As Lightning does: it asks for `consolidate_state_dict`, and the first rank pickles what it then has."""
    model, optimizer = training("Muon")
    steps(model, optimizer, range(2))
    if dist.get_rank() == 0:
        with pytest.raises(TypeError, match=r"call consolidate_state_dict\(\) on all ranks"):
            torch.save(optimizer.state_dict(), io.BytesIO())
    optimizer.consolidate_state_dict()
    full = optimizer.full_state_dict()
    saved = optimizer.state_dict()
    if dist.get_rank() == 0:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        assert_same(torch.load(file), full)
        file.seek(0)
        whole = Matrices()
        alone = tilestep.Muon(whole.parameters(), **RULES["Muon"])  # type: ignore[attr-defined]
        alone.load_state_dict(torch.load(file))
    # The next one is for torch.distributed.checkpoint again, and so is one after another step.
    for step in (2, 3):
        assert isinstance(optimizer.state_dict()["state"][1]["momentum_buffer"], ShardedTensorPiece)
        optimizer.consolidate_state_dict()
        steps(model, optimizer, range(step, step + 1))
    optimizer.load_state_dict(full)


test_two_ranks = each_passes(
    [
        adafactor,
        muon,
        soap,
        frozen_from_the_start_before_a_step,
        loaded_without_state_of_what_one_rank_has,
        a_framework_that_saves_on_one_rank,
    ],
    2,
)
