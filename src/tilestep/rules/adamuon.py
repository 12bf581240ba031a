"""AdaMuon: Muon on the signs of the momentum, with a second moment of each element.

Example:
    >>> import torch
    >>> from tilestep.rules import registry
    >>> zeros = torch.zeros(2, 3)
    >>> moved = registry["AdaMuon"](zeros, torch.tensor([[3.0, 1.0, -1.0], [0.1, -2.0, 1.0]]), zeros, zeros, lr=1.0)[0]
    >>> round(moved.square().mean().sqrt().item(), 4)
    0.2
"""

import math
from typing import Any

import torch

from ..linalg.coefficients import COEFFICIENTS
from ..linalg.orthogonal import orthogonalize
from .muon import NEWTON_SCHULZ, averaged
from .protocol import MATRIX_OPTIONS, State, between, nonnegative, rule


@rule(
    name="AdaMuon",
    states={"v_buffer": State(signed=False)},
    ranges=nonnegative("weight_decay", momentum=between(0, 1), **NEWTON_SCHULZ),
    options=MATRIX_OPTIONS,
    fallback="AdamW",
)
def adamuon(
    param: Any,
    grad: Any,
    momentum_buffer: Any,
    v_buffer: Any,
    *,
    lr: Any = 0.02,
    weight_decay: Any = 0.01,
    momentum: Any = 0.95,
    nesterov: bool = True,
    ns_steps: Any = None,
    ns_coefficients: Any = COEFFICIENTS,
    eps: Any = 1e-8,
) -> tuple[Any, ...]:
    """Orthogonalized signs, divided by the root of their second moment and scaled to a root mean square of 0.2.

    Equations:
        b <- momentum * b + (1 - momentum) * g
        o = orthogonalize(sign(g + momentum * (b - g) with nesterov, else b))
        v <- momentum * v + (1 - momentum) * o^2
        n = o / (sqrt(v) + eps)
        p <- p - lr * weight_decay * p - lr * 0.2 * sqrt(rows * columns) / (norm(n) + eps) * n
    `ns_coefficients`, `ns_steps` and matrices inside parameters are as in Muon.

    Source: Si et al., "AdaMuon: Adaptive Muon Optimizer" (2025), algorithm 1 of its third version; names and defaults
    of the authors' Chongjie-Si/AdaMuon, gpt2/models/optimizers, whose second moment is in bfloat16.
    """
    momentum_buffer, update = averaged(grad, momentum_buffer, momentum, nesterov)
    orthogonal = orthogonalize(torch.sign(update), steps=ns_steps, coefficients=ns_coefficients)
    v_buffer = momentum * v_buffer + (1 - momentum) * orthogonal * orthogonal
    normalized = orthogonal / (v_buffer.sqrt() + eps)
    size = 0.2 * math.sqrt(param.size(-2) * param.size(-1)) / (normalized.norm() + eps)
    param = param * (1 - lr * weight_decay) - lr * size * normalized
    return param, momentum_buffer, v_buffer
