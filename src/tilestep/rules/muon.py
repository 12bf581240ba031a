"""Muon: momentum whose every matrix is replaced by the nearest orthogonal one."""

from __future__ import annotations

import math
from typing import Any

from ..linalg.orthogonal import COEFFICIENTS, orthogonalize
from .protocol import at_least, between, rule

_ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")


@rule(
    name="Muon",
    ranges={
        "lr": at_least(0),
        "weight_decay": at_least(0),
        "momentum": at_least(0),
        "eps": at_least(0),
        "ns_steps": between(0, 100),
    },
    fallback="AdamW",
)
def muon(
    param: Any,
    grad: Any,
    momentum_buffer: Any,
    *,
    lr: Any = 1e-3,
    weight_decay: Any = 0.1,
    momentum: Any = 0.95,
    nesterov: bool = True,
    ns_coefficients: Any = COEFFICIENTS,
    eps: Any = 1e-7,
    ns_steps: Any = 5,
    adjust_lr_fn: str | None = None,
) -> tuple[Any, ...]:
    """Momentum, orthogonalized; for the matrices of a model's hidden layers.

    Equations:
        b <- b + (1 - momentum) * (g - b)
        u = g + momentum * (b - g) with nesterov, else b
        p <- p - lr * weight_decay * p - lr * ratio * orthogonalize(u)
    with ratio = sqrt(max(1, rows / columns)), or 0.2 * sqrt(max(rows, columns)) for `adjust_lr_fn="match_rms_adamw"`,
    or sqrt(rows / columns) for "spectral_unclamped".
    The orthogonalization is `tilestep.orthogonalize`, `ns_steps` Newton-Schulz steps in bfloat16.

    Parameters must be matrices; `tilestep.muon_groups` gives the others to another rule in the same optimizer.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is
    Scalable for LLM Training" (2025) for match_rms_adamw; Bernstein, "Deriving Muon" (2025) for spectral_unclamped;
    torch.optim.Muon.
    """
    if adjust_lr_fn not in _ADJUSTMENTS:
        raise ValueError(f"Invalid adjust_lr_fn: {adjust_lr_fn}; it must be one of {_ADJUSTMENTS}")
    momentum_buffer = momentum_buffer + (1 - momentum) * (grad - momentum_buffer)
    update = grad + momentum * (momentum_buffer - grad) if nesterov else momentum_buffer
    orthogonal = orthogonalize(update, steps=ns_steps, coefficients=ns_coefficients, eps=eps)
    rows, columns = param.size(-2), param.size(-1)
    if adjust_lr_fn == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(rows, columns))
    else:
        ratio = math.sqrt(rows / columns if adjust_lr_fn == "spectral_unclamped" else max(1, rows / columns))
    param = param * (1 - lr * weight_decay) - lr * ratio * orthogonal
    return param, momentum_buffer
