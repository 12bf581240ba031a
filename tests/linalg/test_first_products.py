"""What a first step of Muon builds for large matrices: all of it is known before anything is multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from iterations import NUMBERS

from tilestep.backends.triton.run import TritonPasses
from tilestep.linalg import orthogonal
from tilestep.linalg.operations import MATRIX_OPERATIONS


def key_of(launcher: Any, arguments: Sequence[Any]) -> tuple[Any, ...]:
    tensors = [getattr(argument, "base", argument) for argument in arguments]  # what a descriptor is of
    return (*launcher._constants.items(), *(getattr(value, "dtype", float) for value in tensors))


@pytest.mark.parametrize(("shape", "kernels"), [((64, 192), 3), ((192, 64), 3), ((64, 64), 2)])
def test_the_kernels_of_a_step_are_those_that_are_noted(
    shape: tuple[int, int], kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    operation = MATRIX_OPERATIONS["orthogonalize"]
    assert operation.launches is not None
    device = torch.device("cpu")
    assert operation.launches(shape, NUMBERS, device) == []
    monkeypatch.setattr(orthogonal, "uses_symmetric_kernel", lambda batch: True)
    noted = operation.launches(shape, NUMBERS, device)
    asked: dict[tuple[Any, ...], int] = {}

    def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, **options: Any) -> torch.Tensor:
        key = key_of(*orthogonal.symmetric_launch(left, right, out, **options))
        asked[key] = asked.get(key, 0) + 1
        return out.zero_()

    orthogonal.newton_schulz([torch.ones(3, *shape, dtype=torch.bfloat16)], NUMBERS, None, multiply)
    keys = [key_of(*launch) for launch in noted]
    assert set(keys) == set(asked)
    assert len(keys) == len(set(keys)) == kernels
    assert sum(asked.values()) > kernels


def test_a_language_model_builds_four_kernels_of_products_before_those_of_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel serves all shapes; those of products take longest to compile."""
    pytest.importorskip("triton")
    operation = MATRIX_OPERATIONS["orthogonalize"]
    assert operation.launches is not None
    monkeypatch.setattr(orthogonal, "uses_symmetric_kernel", lambda batch: True)
    shapes = [(64, 64), (16, 64), (176, 64), (64, 176)]
    noted = [launch for shape in shapes for launch in operation.launches(shape, NUMBERS, torch.device("cpu"))]
    assert len({key_of(*launch) for launch in noted}) == 4
    passes = TritonPasses.__new__(TritonPasses)
    passes.matrices = Mock(launches=lambda: noted)
    tiles = (Mock(), [])
    with patch.object(TritonPasses, "_step_launches", lambda self, unscales: iter([tiles])):
        assert passes.launches(False) == [*noted, tiles]
