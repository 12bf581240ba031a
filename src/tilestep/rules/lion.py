"""Lion: the sign of an interpolated momentum."""

from typing import Any

import torch

from .protocol import between, nonnegative, rule


@rule(
    name="Lion",
    ranges=nonnegative("lr", "weight_decay", betas=between(0, 1)),
    keyword_only=("maximize",),
    numbered=1,
)
def lion(
    param: Any,
    grad: Any,
    exp_avg: Any,
    *,
    lr: Any = 1e-4,
    betas: Any = (0.9, 0.99),
    weight_decay: Any = 0.0,
    maximize: bool = False,
) -> tuple[Any, ...]:
    """Evolved sign momentum with decoupled weight decay.

    Equations:
        u <- sign(beta1 * m + (1 - beta1) * g)
        p <- p * (1 - lr * weight_decay) - lr * u
        m <- beta2 * m + (1 - beta2) * g

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (NeurIPS 2023), algorithm 2.
    """
    beta1, beta2 = betas
    if maximize:
        grad = -grad
    update = torch.sign(beta1 * exp_avg + (1 - beta1) * grad)
    param = param * (1 - lr * weight_decay) - lr * update
    exp_avg = beta2 * exp_avg + (1 - beta2) * grad
    return param, exp_avg
