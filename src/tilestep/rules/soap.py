"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

from typing import Any

import torch

from ..linalg.bases import descending, eigenbasis, orthogonal_basis
from .protocol import ADAM_RANGES, State, at_least, between, nonnegative, rule

_LARGEST = torch.finfo(torch.float32).max


@rule(
    name="SOAP",
    states={
        "exp_avg_sq": State(signed=False),
        "gram_left": State(shape="left"),
        "gram_right": State(shape="right"),
        "basis_left": State(shape="left"),
        "basis_right": State(shape="right"),
    },
    ranges=nonnegative(
        "max_precond_dim",
        shampoo_beta=between(float("-inf"), 1, open_low=True),
        precondition_frequency=at_least(1),
        **ADAM_RANGES,
    ),
)
def soap(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    gram_left: Any,
    gram_right: Any,
    basis_left: Any,
    basis_right: Any,
    *,
    lr: Any = 3e-3,
    betas: Any = (0.95, 0.95),
    shampoo_beta: Any = -1.0,
    eps: Any = 1e-8,
    weight_decay: Any = 0.01,
    precondition_frequency: Any = 10,
    max_precond_dim: Any = 10000,
    normalize_grads: bool = False,
    correct_bias: bool = True,
    step: Any,
) -> tuple[Any, ...]:
    """Adam on gradients that are turned into the eigenvectors of their running Gram matrices.

    Equations, with t the step count from 0, L and R the Gram matrices and U and V their eigenvectors:
        h = U^T g V;  m <- beta1 m + (1 - beta1) h;  v <- beta2 v + (1 - beta2) h^2
        p <- p - lr * sqrt(1 - beta2^t) / (1 - beta1^t) * U (m / (sqrt(v) + eps)) V^T
        p <- p - lr * weight_decay * p
        L <- L + (1 - shampoo_beta) (g g^T - L);  R <- R + (1 - shampoo_beta) (g^T g - R)
    At t = 0 only L and R are written, and U and V taken from their eigendecomposition. Every
    `precondition_frequency` steps each basis is sorted and turned by one step of power iteration and a QR
    decomposition, and m and v with it. A negative `shampoo_beta` stands for beta2.

    A side longer than `max_precond_dim` keeps no L and U (R and V): embeddings and heads are turned on one side.
    That cannot change for a parameter that has been stepped. Vectors are turned on none. Tensors of more than two
    dimensions need another rule, in a separate param group.

    In the null space of a singular L or R (gradients of low rank, rows without gradients, the longer side of a matrix
    at its first step) the basis consists of rounding errors, and Adam scales the gradients there like all gradients.
    The authors' code on gradients that differ in the last place deviates from itself as much as from this rule.

    Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (ICLR 2025), and its soap.py.
    """
    beta1, beta2 = betas
    decay = shampoo_beta if shampoo_beta >= 0 else beta2
    has_left = param.dim() > 1 and bool(param.size(-2) <= max_precond_dim)
    has_right = param.dim() > 1 and bool(param.size(-1) <= max_precond_dim)
    left, right = basis_left if has_left else None, basis_right if has_right else None
    count = step - 1
    first, turns = count == 0, torch.remainder(count, precondition_frequency) == 0

    turned = _rotate(grad, left, right)
    mean = torch.where(first, exp_avg, exp_avg + (1 - beta1) * (turned - exp_avg))
    square = torch.where(first, exp_avg_sq, beta2 * exp_avg_sq + (1 - beta2) * turned * turned)
    square = torch.clamp(square, max=_LARGEST)  # products that only reorder it would turn inf into NaN
    update = _rotate_back(mean / (square.sqrt() + eps), left, right)
    if normalize_grads:
        update = update / (1e-30 + (update * update).mean().sqrt())
    size = lr
    if correct_bias:
        size = lr * torch.sqrt(1 - beta2**count) / (1 - beta1**count)
    moved = param - size * update
    param = torch.where(first, param, moved * (1 - lr * weight_decay))

    order_left: Any = None
    order_right: Any = None
    next_left: Any = None
    next_right: Any = None
    if has_left:
        gram_left = gram_left + (1 - decay) * (grad @ grad.mT - gram_left)
        ahead_left = gram_left @ basis_left
        order_left = descending(ahead_left, basis_left)
        next_left = orthogonal_basis(ahead_left @ order_left)
    if has_right:
        gram_right = gram_right + (1 - decay) * (grad.mT @ grad - gram_right)
        ahead_right = gram_right @ basis_right
        order_right = descending(ahead_right, basis_right)
        next_right = orthogonal_basis(ahead_right @ order_right)
    original = _rotate_back(mean, left, right)
    refreshes = torch.logical_and(turns, torch.logical_not(first))
    exp_avg = torch.where(refreshes, _rotate(original, next_left, next_right), mean)
    exp_avg_sq = torch.where(refreshes, _rotate(square, order_left, order_right), square)
    if has_left:
        basis_left = torch.where(first, eigenbasis(gram_left), torch.where(refreshes, next_left, basis_left))
    if has_right:
        basis_right = torch.where(first, eigenbasis(gram_right), torch.where(refreshes, next_right, basis_right))
    return param, exp_avg, exp_avg_sq, gram_left, gram_right, basis_left, basis_right


def _rotate(value: Any, left: Any, right: Any) -> Any:
    """Return a matrix in the bases of its sides; None stands for the identity."""
    value = value if left is None else left.mT @ value
    return value if right is None else value @ right


def _rotate_back(value: Any, left: Any, right: Any) -> Any:
    value = value if left is None else left @ value
    return value if right is None else value @ right.mT
