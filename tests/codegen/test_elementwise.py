"""Every elementwise operation of torch on each backend, beside torch in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from elementwise_rules import inputs, misses, rules

import tilestep
from tilestep import Rule
from tilestep.backends import registry
from tilestep.backends.eager import EagerSegment

BOUNDS = {torch.float32: 2e-6, torch.float64: 1e-14}
"""libmvec's functions are up to four units in the last place off."""


def check(rule: Rule, names: list[str], dtype: torch.dtype) -> None:
    left, right = inputs(dtype)
    param = torch.nn.Parameter(right.clone())
    optimizer = tilestep.Optimizer([param], rule)
    param.grad = left.clone()
    optimizer.step()
    state = optimizer.state[param]
    wrong = [text for name in names for text in misses(name, state[f"of_{name}"], left, right, BOUNDS[dtype])]
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("rule", "names"), rules(), ids=[names[0] for _, names in rules()])
def test_elementwise_operations_in_cpp(rule: Rule, names: list[str], dtype: torch.dtype) -> None:
    check(rule, names, dtype)


@pytest.mark.parametrize(("rule", "names"), rules(), ids=[names[0] for _, names in rules()])
def test_elementwise_operations_in_eager_torch(rule: Rule, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "segment_class", lambda device: EagerSegment)
    check(rule, names, torch.float64)


def test_elementwise_operations_in_tritons_interpreter() -> None:
    """In a process of its own, since Triton reads the variable when it is imported."""
    pytest.importorskip("triton", reason="Triton is not installed")
    script = Path(__file__).with_name("interpreted_elementwise.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip().endswith("all equal")
