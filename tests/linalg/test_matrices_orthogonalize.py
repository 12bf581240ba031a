"""Newton-Schulz in bfloat16 against the singular value decomposition, float64 and torch's Muon."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilestep
from tilestep.linalg import COEFFICIENTS
from tilestep.linalg.orthogonal import newton_schulz

SHAPES = [(24, 24), (16, 48), (48, 16), (1, 8), (8, 1), (65, 130)]


def drawn(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact(matrix: torch.Tensor, steps: int, coefficients: tuple[float, ...]) -> torch.Tensor:
    """The iteration as the paper has it, in float64."""
    a, b, c = coefficients
    value = matrix / matrix.norm()
    for _ in range(steps):
        gram = value @ value.mT
        value = a * value + (b * gram + c * gram @ gram) @ value
    return value


@pytest.mark.parametrize("shape", SHAPES)
def test_it_keeps_singular_vectors_and_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    left, values, right = torch.linalg.svd(drawn(shape), full_matrices=False)
    spread = torch.linspace(0.1, 1.0, len(values), dtype=torch.float64)
    result = left.mT @ tilestep.orthogonalize(left * spread @ right) @ right.mT
    assert result.diagonal().min() > 0.6 and result.diagonal().max() < 1.3
    assert (result - result.diagonal().diag()).abs().max() < 0.05


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("steps", "coefficients"), [(5, COEFFICIENTS), (3, (1.5, -0.5, 0.0)), (0, COEFFICIENTS)])
def test_it_is_the_paper_s_iteration(shape: tuple[int, int], steps: int, coefficients: tuple[float, ...]) -> None:
    matrix = drawn(shape)
    result = tilestep.orthogonalize(matrix, steps=steps, coefficients=coefficients)
    wanted = exact(matrix, steps, coefficients)
    assert (result - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_as_near_to_float64_as_torch_s(shape: tuple[int, int]) -> None:
    matrix = drawn(shape, seed=3)
    param = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    param.grad = matrix.clone()
    muon = torch.optim.Muon([param], lr=1.0, momentum=0.0, weight_decay=0.0, nesterov=False)
    muon.step()
    theirs = -param.detach() / max(1, shape[0] / shape[1]) ** 0.5
    wanted = exact(matrix, 5, COEFFICIENTS)
    assert (tilestep.orthogonalize(matrix) - wanted).norm() < 1.2 * (theirs - wanted).norm() + 1e-3


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (24, 24)])
def test_a_batch_is_its_matrices_one_by_one_and_stays_as_it_is(shape: tuple[int, int]) -> None:
    batch = drawn((3, *shape)).to(torch.bfloat16)
    before, out = batch.clone(), torch.empty_like(batch)
    numbers = (5, *COEFFICIENTS, 1e-7)
    assert newton_schulz([batch], numbers, out) is out
    assert torch.equal(batch, before)
    for place in range(3):
        torch.testing.assert_close(out[place], newton_schulz([batch[place : place + 1]], numbers, None)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_result_has_the_operand_s_dtype_and_bfloat16_values(dtype: torch.dtype) -> None:
    matrix = drawn((6, 9)).to(dtype)
    before = matrix.clone()
    result = tilestep.orthogonalize(matrix)
    assert result.dtype is dtype and torch.equal(matrix, before)
    assert torch.equal(result, result.to(torch.bfloat16).to(dtype))


def test_nothing_stays_nothing_and_small_is_not_lost() -> None:
    assert torch.equal(tilestep.orthogonalize(torch.zeros(3, 4)), torch.zeros(3, 4))
    small = tilestep.orthogonalize(drawn((8, 8)).float() * 1e-5)
    assert torch.equal(small, tilestep.orthogonalize(drawn((8, 8)).float() * 1e-5 * 2**10))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"matrix": torch.ones(4)}, tilestep.MatrixError, "not a tensor of 1 dimensions"),
        ({"matrix": torch.ones(2, 2, 2)}, ValueError, "not a tensor of 3 dimensions"),
        ({"matrix": torch.ones(2, 2), "coefficients": (1.0, 2.0)}, tilestep.RuleError, "three coefficients, not 2"),
        ({"matrix": torch.ones(2, 2), "steps": 100}, tilestep.RuleError, "less than 100 steps, not 100"),
    ],
)
def test_what_it_cannot_take_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tilestep.orthogonalize(**arguments)
