"""The decision of a step on a GPU: the kernel against the host's formulas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scripts import all_equal_in_the_interpreter

from tilestep.backends.triton.run import DecisionLaunchers, decision_launch
from tilestep.kernels.spec import CONTROL_SIZE
from tilestep.optimizer.control import decide
from tilestep.runtime.decision import StepInputs


def test_interpreted_decision_equals_the_hosts() -> None:
    all_equal_in_the_interpreter(Path(__file__).with_name("interpreted_decide.py"))


def test_numbers_of_another_dtype_have_their_own_kernel() -> None:
    """A launcher calls what was compiled for its first numbers: it would read the bits of others as theirs."""
    pytest.importorskip("triton")
    launchers: DecisionLaunchers = {}
    control = torch.zeros(CONTROL_SIZE, dtype=torch.float64)
    made = [
        decision_launch(decide, control, StepInputs(grad_scale=torch.ones(1, dtype=dtype)), launchers)[0]
        for dtype in (torch.float32, torch.float64, torch.float32)
    ]
    assert made[0] is made[2] and made[0] is not made[1]
