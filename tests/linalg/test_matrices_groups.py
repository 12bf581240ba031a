"""Which of a model's parameters go to Muon."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tilestep


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)
        self.output = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)


class Model(nn.Module):
    def __init__(self, head: str, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.places = nn.Embedding(16, 16)
        self.patches = nn.Conv2d(3, 16, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        setattr(self, head, nn.Linear(16, 50, bias=False))
        if tied:
            getattr(self, head).weight = self.tokens.weight


def names(group: dict[str, Any]) -> list[str]:
    return [name for name, _ in group["params"]]


HIDDEN = [
    f"layers.{layer}.{name}.weight"
    for layer in range(2)
    for name in ("attention.in_proj", "attention.out_proj", "output")
]


@pytest.mark.parametrize(("head", "tied"), [("lm_head", False), ("lm_head", True), ("vocabulary", False)])
def test_matrices_between_the_ends_go_to_muon(head: str, tied: bool) -> None:
    model = Model(head, tied)
    muon, others = tilestep.muon_groups(model)
    assert [name.replace("in_proj_weight", "in_proj.weight") for name in names(muon)] == HIDDEN
    assert (muon["rule"], others["rule"]) == ("Muon", "AdamW")
    every = {name for name, _ in model.named_parameters()}
    assert {*names(muon), *names(others)} == every and len(names(muon)) + len(names(others)) == len(every)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer = tilestep.Muon([muon, others], lr=0.01)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step()
    assert not any(torch.equal(param.detach(), before_step) for param, before_step in zip(model.parameters(), before))


def test_names_alone_will_do() -> None:
    named = [
        ("embed_tokens.weight", torch.ones(9, 4)),
        ("up.weight", torch.ones(4, 4)),
        ("lm_head.weight", torch.ones(9, 4)),
    ]
    params = [(name, nn.Parameter(value)) for name, value in named]
    muon, others = tilestep.muon_groups(params, muon={"lr": 0.02}, others={"lr": 1e-3}, rule="Lion")
    assert names(muon) == ["up.weight"] and muon["lr"] == 0.02
    assert names(others) == ["embed_tokens.weight", "lm_head.weight"] and others["rule"] == "Lion"


def test_a_rule_made_from_muon_says_too_who_takes_the_rest() -> None:
    model = Model("lm_head")
    careful = tilestep.cautious(tilestep.registry["Muon"])
    first, others = tilestep.muon_groups(model, muon={"rule": careful})
    assert first["rule"] is careful and others["rule"] == careful.fallback == tilestep.registry["Muon"].fallback
    with pytest.raises(ValueError, match="SGD names no rule for the parameters that it does not take; give `rule`"):
        tilestep.muon_groups(model, muon={"rule": "SGD"})
    assert tilestep.muon_groups(model, muon={"rule": "SGD"}, rule="Lion")[1]["rule"] == "Lion"


def test_frozen_parameters_are_left_out_and_a_pattern_of_one_s_own_decides() -> None:
    model = Model("lm_head")
    model.layers[0].requires_grad_(False)
    muon, others = tilestep.muon_groups(model, outside=r"^layers\.1\.output|head")
    assert names(muon) == ["layers.1.attention.in_proj_weight", "layers.1.attention.out_proj.weight"]
    assert "layers.1.output.weight" in names(others) and not any(name.startswith("layers.0") for name in names(others))


def test_a_model_without_hidden_matrices_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter that trains has two dimensions"):
        tilestep.muon_groups(nn.LayerNorm(4))
    with pytest.raises(ValueError, match=r"0\.weight are taken for embeddings and heads; give another `outside`"):
        tilestep.muon_groups(nn.Sequential(nn.Embedding(3, 4)))
