"""Every elementwise operation of torch on each backend, beside torch in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from elementwise_rules import misses_of, rules
from scripts import all_equal_in_the_interpreter

from tilestep import Rule
from tilestep.backends import registry
from tilestep.backends.eager import EagerPasses

BOUNDS = {torch.float32: 2e-6, torch.float64: 1e-14}
"""libmvec's functions are up to four units in the last place off."""


def check(rule: Rule, names: list[str], dtype: torch.dtype) -> None:
    wrong = misses_of(rule, names, dtype, BOUNDS[dtype])
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("rule", "names"), rules(), ids=[names[0] for _, names in rules()])
def test_elementwise_operations_in_cpp(rule: Rule, names: list[str], dtype: torch.dtype) -> None:
    check(rule, names, dtype)


@pytest.mark.parametrize(("rule", "names"), rules(), ids=[names[0] for _, names in rules()])
def test_elementwise_operations_in_eager_torch(rule: Rule, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "passes_class", lambda device: EagerPasses)
    check(rule, names, torch.float64)


def test_elementwise_operations_in_tritons_interpreter() -> None:
    all_equal_in_the_interpreter(Path(__file__).with_name("interpreted_elementwise.py"))
