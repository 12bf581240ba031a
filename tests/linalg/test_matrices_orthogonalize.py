"""Newton-Schulz in bfloat16 against the singular value decomposition, float64 and torch's Muon."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from iterations import NUMBERS, exact

import tilestep
from tilestep.linalg import COEFFICIENTS
from tilestep.linalg.coefficients import NAMES, rows_of
from tilestep.linalg.orthogonal import PRECISIONS, newton_schulz

SHAPES = [(24, 24), (16, 48), (48, 16), (1, 8), (8, 1), (65, 130)]


def drawn(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
    wanted = exact(matrix, [coefficients] * steps)
    assert (result - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_as_near_to_float64_as_torch_s(shape: tuple[int, int]) -> None:
    matrix = drawn(shape, seed=3)
    param = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    param.grad = matrix.clone()
    muon = torch.optim.Muon([param], lr=1.0, momentum=0.0, weight_decay=0.0, nesterov=False)
    muon.step()
    theirs = -param.detach() / max(1, shape[0] / shape[1]) ** 0.5
    wanted = exact(matrix)
    assert (tilestep.orthogonalize(matrix) - wanted).norm() < 1.2 * (theirs - wanted).norm() + 1e-3


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (24, 24)])
def test_a_batch_is_its_matrices_one_by_one_and_stays_as_it_is(shape: tuple[int, int]) -> None:
    batch = drawn((3, *shape)).to(torch.bfloat16)
    before, out = batch.clone(), torch.empty_like(batch)
    assert newton_schulz([batch], NUMBERS, out) is out
    assert torch.equal(batch, before)
    for place in range(3):
        torch.testing.assert_close(out[place], newton_schulz([batch[place : place + 1]], NUMBERS, None)[0])


def test_leading_dimensions_are_stacks() -> None:
    stack = drawn((2, 3, 6, 9)).float()
    found = tilestep.orthogonalize(stack)
    assert all(torch.equal(found[i, j], tilestep.orthogonalize(stack[i, j])) for i in range(2) for j in range(3))
    assert tilestep.orthogonalize(torch.ones(0, 6, 9)).shape == (0, 6, 9)


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
        ({"x": torch.ones(4)}, tilestep.MatrixError, "not a tensor of 1 dimensions"),
        ({"x": torch.ones(())}, ValueError, "not a tensor of 0 dimensions"),
        (
            {"coefficients": (1.0, 2.0)},
            tilestep.RuleError,
            "three numbers, a list of triples, or one of jordan, simple",
        ),
        ({"coefficients": [(1.0, 2.0, "3")]}, tilestep.RuleError, "three numbers"),
        ({"coefficients": [(1.0, 2.0, float("nan"))]}, tilestep.RuleError, "three numbers"),
        ({"coefficients": []}, tilestep.RuleError, "three numbers"),
        ({"coefficients": "newton"}, tilestep.RuleError, "'newton'; it must be three numbers"),
        ({"coefficients": [COEFFICIENTS] * 4, "steps": 5}, tilestep.RuleError, "4 steps with a list of 4 .*, not 5"),
        ({"coefficients": "cubic5", "steps": 4}, tilestep.RuleError, "5 steps with 'cubic5', not 4"),
        ({"coefficients": "polar_express_dion", "steps": 6}, tilestep.RuleError, "5 steps with .*, not 6"),
        ({"steps": 100}, tilestep.RuleError, "less than 100 steps, not 100"),
        ({"steps": 2.5}, tilestep.RuleError, "whole number of steps, .* not 2.5"),
        ({"safety": 1.05}, tilestep.RuleError, "safety=1.05 requires coefficients='polar_express'"),
        ({"coefficients": "cans", "safety": 0}, tilestep.RuleError, "safety=0; it must be finite and at least 1"),
        ({"coefficients": "cans", "safety": math.inf}, tilestep.RuleError, "safety=inf; it must be finite"),
        ({"eps": -1e-7}, tilestep.RuleError, "eps=-1e-07; it must be at least 0"),
        ({"coefficients": "cans", "safety": "a"}, tilestep.RuleError, "safety='a'; it must be finite"),
        ({"safety": None}, tilestep.RuleError, "safety=None requires coefficients='polar_express'"),
        ({"eps": math.nan}, tilestep.RuleError, "eps=nan; it must be at least 0"),
        ({"eps": "a"}, tilestep.RuleError, "eps='a'; it must be at least 0"),
        ({"eps": None}, tilestep.RuleError, "eps=None; it must be at least 0"),
        ({"x": torch.ones(2, 2, dtype=torch.int64)}, tilestep.MatrixError, "numbers, not torch.int64"),
        ({"x": torch.ones(2, 2, dtype=torch.complex64)}, tilestep.MatrixError, "numbers, not torch.complex64"),
        ({"precision": "tf32"}, tilestep.RuleError, "'tf32'; it must be one of bfloat16, float16, float32"),
    ],
)
def test_what_it_cannot_take_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tilestep.orthogonalize(**{"x": torch.ones(2, 2), **arguments})


EMERGING = [
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    *[(1.8750, -1.2500, 0.3750)] * 4,
]
"""The rows that Emerging-Optimizers has for polar_express, the last repeated."""


def test_the_rows_are_the_published_ones() -> None:
    for row, published in zip(rows_of("polar_express", 11), EMERGING, strict=True):
        assert row == pytest.approx(published, abs=1e-4)
    # gram-newton-schulz divides the raw rows by powers of 1.05.
    a, b, c = rows_of("polar_express", safety=1.05)[0]
    assert (a * 1.05, b * 1.05**3, c * 1.05**5) == pytest.approx((8.28721201814563, -23.595886519098837, 17.3003873125))
    a, b, c = rows_of("cans")[1]  # Emerging-Optimizers has them without room for rounding
    assert (a * 1.01, b * 1.01**3, c * 1.01**5) == pytest.approx(rows_of("cans", safety=1)[1])
    assert rows_of("cans", safety=1)[1] == (4.1828, -3.1087, 0.5806)
    # dion divides by 1.02 of the norm, which is a scale of the first step's argument.
    value = torch.tensor(0.3, dtype=torch.float64)
    a, b, c = 8.156554524902461, -22.48329292557795, 15.878769915207462
    scaled = value / 1.02
    first = rows_of("polar_express_dion")[0]
    assert exact_step(value, first) == pytest.approx(float(exact_step(scaled, (a, b, c))))
    assert rows_of("quintic", 7)[5:] == rows_of("quintic")[:2] and rows_of("aol", 5)[4] == rows_of("aol")[0]
    assert rows_of("cans", 6)[5] == rows_of("cans")[4] and rows_of("deepseek-v4", 12)[10:] == [(2.0, -1.5, 0.5)] * 2
    steps = {name: len(rows_of(name)) for name in NAMES}
    assert steps == {**dict.fromkeys(NAMES, 5), "aol": 4, "deepseek-v4": 10, "deepseekv4": 10}
    assert rows_of("simple") == rows_of("jordan") == rows_of(COEFFICIENTS) and len(rows_of(COEFFICIENTS, 7)) == 7


def exact_step(value: torch.Tensor, row: tuple[float, float, float]) -> torch.Tensor:
    a, b, c = row
    return a * value + b * value**3 + c * value**5


@pytest.mark.parametrize("name", NAMES)
def test_each_set_is_its_iteration_in_every_precision(name: str) -> None:
    for shape in ((16, 48), (48, 16), (24, 24)):
        matrix = drawn(shape)
        wanted = exact(matrix, rows_of(name))
        for precision, within in (("float32", 1e-3), ("float16", 1e-2), ("bfloat16", 5e-2)):
            result = tilestep.orthogonalize(1e-6 * matrix, coefficients=name, precision=precision)
            assert (result - wanted).norm() < within * wanted.norm()
            assert torch.equal(result, result.to(PRECISIONS[precision]).double())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "aol"])  # which is for preconditioned matrices
def test_no_set_diverges_where_rounding_makes_a_singular_value_larger_than_the_norm(name: str, precision: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for rows, columns in ((1, 1), (8, 8), (64, 96), (300, 40)):
        left = torch.randn(16, rows, 1, generator=generator)
        near = left * torch.randn(16, 1, columns, generator=generator)
        near += 1e-3 * torch.randn(16, rows, columns, generator=generator)
        found = torch.linalg.matrix_norm(tilestep.orthogonalize(near, coefficients=name, precision=precision), 2)
        # The first step of "cubic5" makes 0.02 of a singular value of one, less than what bfloat16 rounds.
        assert (0.6 if name != "cubic5" else 0.0) < float(found.min()) and float(found.max()) < 1.5, (rows, columns)


def test_a_list_has_a_row_a_step_and_numbers_of_any_kind() -> None:
    matrix, rows = drawn((8, 12)), [(3.0, -4.0, 2.0), [2.0, -1.5, 0.5], (1.5, -0.5, 0.0)]
    result = tilestep.orthogonalize(matrix, 3, rows, precision="float32")
    assert (result - exact(matrix, rows)).norm() < 1e-5  # type: ignore[arg-type]
    assert torch.equal(result, tilestep.orthogonalize(matrix, None, tuple(map(tuple, rows)), precision="float32"))
