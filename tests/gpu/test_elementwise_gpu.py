"""Every elementwise operation of torch in Triton on a GPU, beside torch in float64."""

from __future__ import annotations

import pytest
import torch
from elementwise_rules import misses_of, rules

from tilestep import Rule

BOUNDS = {torch.float32: 2e-6, torch.float64: 1e-14}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("rule", "names"), rules(), ids=[names[0] for _, names in rules()])
def test_elementwise_operations_on_a_gpu(rule: Rule, names: list[str], dtype: torch.dtype) -> None:
    wrong = misses_of(rule, names, dtype, BOUNDS[dtype], "cuda")
    assert not wrong, "\n".join(wrong[:20])
