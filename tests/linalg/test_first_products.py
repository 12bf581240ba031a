"""What a first step of Muon builds for large matrices: all of it is known before anything is multiplied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from iterations import NUMBERS

from tilestep.linalg import orthogonal
from tilestep.linalg.operations import MATRIX_OPERATIONS


@pytest.mark.parametrize(("shape", "kernels"), [((64, 192), 4), ((192, 64), 4), ((64, 64), 2)])
def test_the_kernels_of_a_step_are_those_that_are_noted(
    shape: tuple[int, int], kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    operation = MATRIX_OPERATIONS["orthogonalize"]
    assert operation.launches is not None
    device = torch.device("cpu")
    assert operation.launches(shape, NUMBERS, device) == []
    monkeypatch.setattr(orthogonal, "pays", lambda batch: True)
    noted = operation.launches(shape, NUMBERS, device)
    asked: dict[tuple[Any, ...], int] = {}

    def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, **options: Any) -> torch.Tensor:
        launcher, arguments = orthogonal.symmetric_launch(left, right, out, **options)
        key = (*launcher._constants.items(), *(getattr(value, "dtype", float) for value in arguments))
        asked[key] = asked.get(key, 0) + 1
        return out.zero_()

    orthogonal.newton_schulz([torch.ones(3, *shape, dtype=torch.bfloat16)], NUMBERS, None, multiply)
    keys = [
        (*launcher._constants.items(), *(getattr(value, "dtype", float) for value in arguments))
        for launcher, arguments in noted
    ]
    assert set(keys) == set(asked)
    assert len(keys) == len(set(keys)) == kernels
    assert sum(asked.values()) > kernels
