"""Rules of a user's own with products and transposes, against the same rule called on tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrix_states import STATES, check_states

import tilestep
from tilestep.graph import Program, partition, trace


@tilestep.rule
def whitened(param: Any, grad: Any, momentum: Any, *, lr: Any = 0.1, decay: Any = 0.9) -> tuple[Any, ...]:
    """A product on each side, elementwise work before, between and after."""
    momentum = decay * momentum + (1 - decay) * grad
    left = (momentum @ momentum.mT) @ momentum
    squashed = left / (1 + left.abs())
    update = squashed @ (grad.T @ grad)
    return param - lr * update.tanh(), momentum


@tilestep.rule
def sided(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    """A product of the transposed shape, transposed back; one of the parameter itself; a fused product and sum."""
    tall = grad.mT @ (param @ param.mT)
    return torch.addmm(param, tall.mT, grad.T @ grad, beta=0.5, alpha=-0.1) - lr * tall.mT


@tilestep.rule
def polar(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    """What one library pass makes is used by the next, and a norm of it by the scalar pass between."""
    once = tilestep.orthogonalize(grad)
    scaled = once / once.norm()
    return param - lr * tilestep.orthogonalize((scaled @ grad.mT) @ grad)


@tilestep.rule
def two_types(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    """One operand that two operations take in different types, and a bfloat16 result multiplied at once."""
    return param - lr * (tilestep.orthogonalize(grad) @ (grad.mT @ grad))


RULES = [whitened, sided, polar, two_types]
SHAPES = [(5, 9), (9, 5), (6, 6), (5, 9), (1, 3)]


def cut(rule: tilestep.Rule) -> Program:
    return partition(trace(rule, rule.hyperparameters, dims=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_step_is_the_rule_called_on_tensors(rule: tilestep.Rule, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    expected = [param.detach().double() for param in params]
    states = [[torch.zeros(shape, dtype=torch.float64) for _ in rule.state_names] for shape in SHAPES]
    optimizer = tilestep.Optimizer(params, rule, lr=0.05)
    for _ in range(3):
        for place, param in enumerate(params):
            param.grad = 0.3 * torch.randn(param.shape, generator=generator).to(dtype)
            expected[place], *states[place] = rule(expected[place], param.grad.double(), *states[place], lr=0.05)
        optimizer.step()
    tolerance = {"rtol": 1e-3, "atol": 5e-3} if rule in (polar, two_types) else {"rtol": 1e-4, "atol": 1e-5}
    for param, wanted in zip(params, expected):
        torch.testing.assert_close(param.detach().double(), wanted, **tolerance)


@pytest.mark.parametrize("name", STATES)
def test_a_state_may_be_a_transpose_or_another_s_old_value(name: str) -> None:
    check_states(STATES[name])


def test_elementwise_work_stays_in_few_tile_passes() -> None:
    passes = cut(whitened)
    assert len(passes.tiles) == 3 and sum(matrix_pass is not None for matrix_pass in passes.matrices.passes) == 2
    assert sorted(passes.tiles[0].stores) == ["momentum", "scratch_0"]
    assert list(passes.tiles[-1].stores) == ["param"]


def test_a_result_s_norm_is_a_reduction_of_the_next_pass() -> None:
    passes = cut(polar)
    assert [len(tile.reductions) if tile else None for tile in passes.tiles] == [0, 1, 0, 0]
    assert [matrix_pass is not None for matrix_pass in passes.matrices.passes] == [True, False, True, False]


def test_rules_without_matrices_have_no_matrix_pass() -> None:
    for name in ("AdamW", "LAMB"):
        assert cut(tilestep.registry[name]).matrices.passes == []


def test_results_in_one_pass_reuse_the_operand_s_memory() -> None:
    params = [torch.nn.Parameter(torch.ones(8, 8)) for _ in range(4)]
    matrices = tilestep.Muon(params).fitting_plan(ahead=True).engines[0].passes[0].matrices
    operand, result = (matrices.batches[0].arrays[f"scratch_{place}"] for place in range(2))
    assert operand.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
    assert operand.data_ptr() - result.data_ptr() == 4 * 64 * 2


def squares_apart(param: Any, grad: Any) -> Any:
    return param - (grad @ grad.mT).sum()


def of_the_step(param: Any, grad: Any, *, step: Any) -> Any:
    return param - tilestep.orthogonalize(grad, steps=step)


def of_many_steps(param: Any, grad: Any, *, step: Any) -> Any:
    return param - tilestep.orthogonalize(grad, eps=step)


def of_data(param: Any, grad: Any) -> Any:
    return param - tilestep.orthogonalize(grad, eps=grad.norm())


def of_a_row(param: Any, grad: Any) -> Any:
    return param - grad.sum(dim=-1, keepdim=True) @ grad.sum(dim=-2, keepdim=True)


def of_a_mask(param: Any, grad: Any) -> Any:
    return param - torch.ones_like(grad) @ grad.mT @ grad


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (squares_apart, "test_matrices_rules.py:.*without the parameter's shape"),
        (of_the_step, "test_matrices_rules.py:.*reads .* step as a Python number, which may change every step"),
        (of_many_steps, "test_matrices_rules.py:.*must be known before the step"),
        (of_data, "test_matrices_rules.py:.*must be known before the step"),
        (of_a_row, "test_matrices_rules.py:.*matmul requires a matrix"),
        (of_a_mask, "test_matrices_rules.py:.*matmul requires a matrix"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_line(function: Any, message: str) -> None:
    with pytest.raises(tilestep.RuleError, match=message):
        cut(tilestep.rule(function))


def test_products_of_parameters_that_are_no_matrices_are_refused_by_name() -> None:
    named = [("conv", torch.nn.Parameter(torch.ones(2, 2, 3, 3)))]
    message = r"conv.*of shape \(2, 2, 3, 3\): its last dimensions are a convolution's kernel; flatten=True takes"
    with pytest.raises(tilestep.MatrixError, match=message):
        tilestep.Optimizer(named, tilestep.rule(lambda param, grad: param - grad.mT @ grad @ grad))
