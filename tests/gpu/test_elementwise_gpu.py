"""Every elementwise operation of torch in Triton on a GPU, beside torch in float64."""

from __future__ import annotations

import pytest
import torch
from elementwise_rules import inputs, misses, rules

import tilestep
from tilestep import Rule

BOUNDS = {torch.float32: 2e-6, torch.float64: 1e-14}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("rule", "names"), rules(), ids=[names[0] for _, names in rules()])
def test_elementwise_operations_on_a_gpu(rule: Rule, names: list[str], dtype: torch.dtype) -> None:
    left, right = (each.cuda() for each in inputs(dtype))
    param = torch.nn.Parameter(right.clone())
    optimizer = tilestep.Optimizer([param], rule)
    param.grad = left.clone()
    optimizer.step()
    state = optimizer.state[param]
    wrong = [text for name in names for text in misses(name, state[f"of_{name}"], left, right, BOUNDS[dtype])]
    assert not wrong, "\n".join(wrong[:20])
