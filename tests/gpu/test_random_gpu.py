"""Stochastic rounding on a GPU: by the bits that torch works out on a CPU, captured or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_rows import SHAPES
from random_rows import FORMATS, check_elements, check_states, train

import tilestep


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_elements_are_rounded_by_the_same_bits(dtype: torch.dtype) -> None:
    check_elements(dtype, device="cuda")


@pytest.mark.parametrize("format", FORMATS)
def test_states_are_rounded_by_the_same_bits(format: str) -> None:
    check_states(format, [*SHAPES, (1024, 512), (1000, 4100)], device="cuda")


@pytest.mark.parametrize("rule", ["AdamW", "Adafactor", "LAMB"])
def test_training_is_that_of_a_cpu(rule: str) -> None:
    for mine, wanted in zip(train("cuda", rule), train("cpu", rule)):
        assert (mine != wanted).float().mean() < 0.02


@pytest.mark.parametrize("format", [None, "int8"])
def test_a_captured_step_is_an_eager_one(format: Any) -> None:
    runs = []
    for captures in (False, True):
        torch.manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=torch.bfloat16))
            for shape in [(512, 1024), (300, 260)]
        ]
        optimizer = tilestep.AdamW(params, lr=1e-3, state_dtype=format, max_grad_norm=1.0, rounding="stochastic")
        for param in params:
            param.grad = torch.zeros_like(param)
        step = tilestep.capture(optimizer).replay if captures else optimizer.step
        for _ in range(6):
            for param in params:
                assert param.grad is not None
                param.grad.copy_(torch.randn_like(param))
            step()
        runs.append([param.detach().clone() for param in params])
    assert all(map(torch.equal, *runs))
