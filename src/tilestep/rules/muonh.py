"""MuonH: Muon on the sphere of matrices whose norm is the parameter's.

Example:
    >>> import torch
    >>> from tilestep.rules import registry
    >>> param, grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]]), torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    >>> moved = registry["MuonH"](param, grad, torch.zeros(2, 2), lr=0.5)[0]
    >>> round(moved.norm().item(), 4)
    5.0
"""

from typing import Any

import torch

from ..linalg.orthogonal import orthogonalize
from .muon import NEWTON_SCHULZ, averaged
from .protocol import MATRIX_OPTIONS, between, rule


@rule(
    name="MuonH",
    ranges={**NEWTON_SCHULZ, "momentum": between(0, 1)},
    options=MATRIX_OPTIONS,
    fallback="AdamW",
)
def muonh(
    param: Any,
    grad: Any,
    momentum_buffer: Any,
    *,
    lr: Any = 0.014,
    momentum: Any = 0.95,
    nesterov: bool = True,
    ns_coefficients: Any = (2.0, -1.5, 0.5),
    ns_steps: Any = 12,
    eps: Any = 1e-10,
) -> tuple[Any, ...]:
    """Muon with the Hyperball constraint: a step of relative size lr, then back to the norm before the step.

    Equations:
        b <- momentum * b + (1 - momentum) * g
        o = orthogonalize(g + momentum * (b - g) with nesterov, else b)
        q = p - lr * norm(p) * o / max(norm(o), eps)
        p <- q * norm(p) / max(norm(q), eps)
    A matrix of zeros stays zero: initialize with other values. The fixed norm replaces weight decay.
    `ns_coefficients`, `ns_steps` and matrices inside parameters are as in Muon.

    Source: Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them 2.1: Hyperball Optimization" (2025);
    the result MuonH of KellerJordan/modded-nanogpt, track 3, whose defaults these are; its `mu` is `momentum`.
    Emerging-Optimizers' MuonHyperball has a fixed norm for all parameters.
    """
    momentum_buffer, update = averaged(grad, momentum_buffer, momentum, nesterov)
    orthogonal = orthogonalize(update, steps=ns_steps, coefficients=ns_coefficients)
    radius = param.norm()
    moved = param - lr * radius / torch.clamp(orthogonal.norm(), min=eps) * orthogonal
    return moved * (radius / torch.clamp(moved.norm(), min=eps)), momentum_buffer
