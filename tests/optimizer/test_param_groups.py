"""Param groups by patterns of names."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import tilestep
from tilestep import param_groups


def model() -> torch.nn.Module:
    return torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(5, 3),
            "layers": torch.nn.ModuleList([torch.nn.Linear(3, 3)] * 1),
            "norm": torch.nn.LayerNorm(3),
        }
    )


def names(groups: list[dict[str, Any]]) -> list[list[str]]:
    return [[name for name, _ in group["params"]] for group in groups]


def test_the_first_pattern_that_fits_takes_a_parameter() -> None:
    groups = param_groups(
        model(),
        {
            re.compile("^embed"): {"lr": 0.1},
            lambda name, param: param.dim() < 2: {"weight_decay": 0.0},
            "weight$": {"rule": "Lion", "lr": 0.01},
        },
    )
    assert names(groups) == [["embedding.weight"], ["layers.0.bias", "norm.weight", "norm.bias"], ["layers.0.weight"]]
    optimizer = tilestep.AdamW(groups, lr=1.0)
    assert [
        (group["lr"], group["weight_decay"], optimizer.rule_of(group).name) for group in optimizer.param_groups
    ] == [
        (0.1, 0.01, "AdamW"),
        (1.0, 0.0, "AdamW"),
        (0.01, 0.0, "Lion"),
    ]


def test_the_rest_comes_first_and_frozen_parameters_are_left_out() -> None:
    made = model()
    made["embedding"].weight.requires_grad_(False)
    groups = param_groups(made.named_parameters(), {"norm": {"lr": 0.5}})
    assert names(groups) == [["layers.0.weight", "layers.0.bias"], ["norm.weight", "norm.bias"]]
    assert "lr" not in groups[0]
    optimizer = tilestep.AdamW(groups)
    assert optimizer.param_groups[1]["param_names"] == ["norm.weight", "norm.bias"]
    made["norm"].bias.grad = torch.ones(3).to_sparse()
    with pytest.raises(tilestep.GradientError, match=r"parameter 1 of group 1 \(norm\.bias\)"):
        optimizer.step()


def test_a_pattern_that_gets_nothing() -> None:
    with pytest.raises(ValueError, match=r"pattern 'attention' matches no trainable parameter; their names are embedd"):
        param_groups(model(), {"attention": {}})
    with pytest.raises(ValueError, match=r"Invalid pattern: '\(' is not a regular expression: missing \)"):
        param_groups(model(), {"(": {}})
    with pytest.raises(
        ValueError, match=r"pattern 'norm\.bias' gets no parameter: norm\.bias and all its other matches go"
    ):
        param_groups(model(), {"bias": {}, r"norm.bias": {}})
    with pytest.raises(ValueError, match="names are none"):
        param_groups([], {"bias": {}})
    with pytest.raises(ValueError, match=r"pattern <function .*never"):

        def never(name: str, param: torch.Tensor) -> bool:
            return False

        param_groups(model(), {never: {}})


def test_torch_s_optimizers_take_them_too() -> None:
    optimizer = torch.optim.AdamW(param_groups(model(), {"norm": {"lr": 0.5}}))
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5]


def test_a_group_of_a_derived_rule_takes_what_the_optimizer_was_given_and_its_own_defaults() -> None:
    averaged = tilestep.ema(tilestep.registry["AdamW"], 0.5)
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = tilestep.AdamW([{"params": [first]}, {"params": [second], "rule": averaged}], lr=0.25)
    group = optimizer.param_groups[1]
    assert (group["lr"], group["ema_decay"], group["weight_decay"]) == (0.25, 0.5, 0.01)
    assert "ema_decay" not in optimizer.param_groups[0]
