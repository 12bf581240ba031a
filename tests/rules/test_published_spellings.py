"""Twelve rules of papers in their authors' spelling: accepted as they are, and right beside float64."""

from __future__ import annotations

import pytest
import torch
from published_spellings import SPELLINGS, adabelief, adanorm, came

import tilestep
from tilestep import Rule, State
from tilestep.checking import run_item, trace_all
from tilestep.checking.items import ITEMS, Subject

CPU = torch.device("cpu")


def subject_of(rule: Rule) -> Subject:
    subject = Subject(rule, {}, CPU, {})
    trace_all(rule, rule.hyperparameters, subject.graphs)  # type: ignore[arg-type]
    return subject


@pytest.mark.parametrize("rule", SPELLINGS, ids=lambda rule: rule.name)
@pytest.mark.parametrize("item", ["float32", "float64"])
def test_published_rules_pass_their_check(rule: Rule, item: str) -> None:
    verdict = run_item(subject_of(rule), item, ITEMS[item])
    assert verdict.passed, verdict.text


def test_sums_of_long_columns_are_as_exact_as_those_of_rows() -> None:
    """4,099 equal numbers one after the other in float32 were 5e-5 off."""
    verdict = run_item(subject_of(came), "sizes", ITEMS["sizes"])
    assert verdict.passed, verdict.text
    param = torch.nn.Parameter(torch.zeros(70_000, 1))
    optimizer = tilestep.Optimizer([param], column_mean)
    param.grad = torch.full_like(param, 0.1)
    optimizer.step()
    assert optimizer.state[param]["mean"].item() == pytest.approx(torch.tensor(0.1).item(), rel=1e-5)


@tilestep.rule(states={"mean": State(shape="column")})
def column_mean(param, grad, mean):
    return param - grad, grad.mean(dim=-2, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
def test_a_rule_with_lerp_is_its_own_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Weights are 0-dim float64 there, which torch's `lerp` refuses beside float32."""
    param, grad = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    zeros = torch.zeros(shape, dtype=dtype)
    rough = adabelief(param.clone(), grad, zeros.clone(), zeros.clone(), step=1)
    exact = adabelief(*(buffer.double().clone() for buffer in (param, grad, zeros, zeros)), step=1)
    for left, right in zip(rough, exact):
        torch.testing.assert_close(left.double(), right, rtol=1e-5, atol=1e-7)


def test_a_scalar_state_moves_towards_a_reduction_by_lerp() -> None:
    param = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = tilestep.Optimizer([param], adanorm)
    param.grad = torch.full((3, 4), 0.5)
    optimizer.step()
    assert optimizer.state[param]["norm_avg"].item() == pytest.approx(0.05 * 12**0.5 * 0.5)
