"""Adan: Nesterov momentum estimated from gradients and their differences."""

from typing import Any

import torch

from .protocol import ADAM_RANGES, rule


@rule(
    name="Adan",
    ranges=ADAM_RANGES,
    options={"foreach": None, "fused": None},
    keyword_only=("no_prox",),
)
def adan(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    exp_avg_diff: Any,
    neg_pre_grad: Any,
    *,
    lr: Any = 1e-3,
    betas: Any = (0.98, 0.92, 0.99),
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    no_prox: bool = False,
    step: Any,
) -> tuple[Any, ...]:
    """Adaptive Nesterov momentum.

    Equations (t is the step count from 1; the previous gradient g' is g itself at t = 1 and kept negated):
        m <- beta1 * m + (1 - beta1) * g
        d <- beta2 * d + (1 - beta2) * (g - g')
        n <- beta3 * n + (1 - beta3) * (g + beta2 * (g - g'))^2
        u <- (m / (1 - beta1^t) + beta2 * d / (1 - beta2^t)) / (sqrt(n) / sqrt(1 - beta3^t) + eps)
        p <- (p - lr * u) / (1 + lr * weight_decay)
    or, with `no_prox`, p <- p * (1 - lr * weight_decay) - lr * u.

    Source: Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models" (TPAMI 2024),
    algorithm 1; names, defaults and betas (the paper's 1 - beta) of the authors' sail-sg/Adan.
    """
    beta1, beta2, beta3 = betas
    difference = torch.where(step == 1, 0.0, grad + neg_pre_grad)
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_diff = beta2 * exp_avg_diff + (1 - beta2) * difference
    lookahead = grad + beta2 * difference
    exp_avg_sq = beta3 * exp_avg_sq + (1 - beta3) * lookahead * lookahead
    denom = exp_avg_sq.sqrt() / torch.sqrt(1 - beta3**step) + eps
    momentum = exp_avg / (1 - beta1**step) + (beta2 / (1 - beta2**step)) * exp_avg_diff
    update = lr * (momentum / denom)
    param = param * (1 - lr * weight_decay) - update if no_prox else (param - update) / (1 + lr * weight_decay)
    return param, exp_avg, exp_avg_sq, exp_avg_diff, -grad
