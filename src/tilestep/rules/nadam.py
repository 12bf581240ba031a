"""NAdam: Adam with Nesterov momentum."""

from typing import Any

import torch

from .protocol import ADAM_RANGES, TORCH_OPTIONS, State, nonnegative, rule
from .scalars import decayed


@rule(
    name="NAdam",
    ranges=nonnegative("momentum_decay", **ADAM_RANGES),
    options=TORCH_OPTIONS,
    keyword_only=("maximize",),
    states={"mu_product": State(init=1.0, shape="scalar", dtype=torch.float32)},  # as in torch
)
def nadam(
    param: Any,
    grad: Any,
    mu_product: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    *,
    lr: Any = 2e-3,
    betas: Any = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    momentum_decay: Any = 4e-3,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    step: Any,
) -> tuple[Any, ...]:
    """Adam that looks one step ahead along its momentum, with a momentum that warms up.

    Equations (t is the step count from 1, M starts at 1):
        mu_t = beta1 * (1 - 0.96^(t * momentum_decay) / 2)
        M <- M * mu_t
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        p <- p - lr * ((1 - mu_t) / (1 - M) * g + mu_{t+1} / (1 - M * mu_{t+1}) * m) / (sqrt(v / (1 - beta2^t)) + eps)
    with g <- g + weight_decay * p before (coupled), or p <- p - lr * weight_decay * p before (decoupled).

    Source: Dozat, "Incorporating Nesterov Momentum into Adam" (ICLR workshop 2016); torch.optim.NAdam.
    """
    beta1, beta2 = betas
    if maximize:
        grad = -grad
    if decoupled_weight_decay:
        param = param * (1 - lr * weight_decay)
    else:
        grad = decayed(grad, param, weight_decay)
    mu = beta1 * (1 - 0.5 * 0.96 ** (step * momentum_decay))
    mu_next = beta1 * (1 - 0.5 * 0.96 ** ((step + 1) * momentum_decay))
    mu_product = mu_product * mu
    exp_avg = exp_avg + (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    denom = (exp_avg_sq / (1 - beta2**step)).sqrt() + eps
    grad_weight = lr * (1 - mu) / (1 - mu_product)
    exp_avg_weight = lr * mu_next / (1 - mu_product * mu_next)
    param = param - (grad_weight * grad + exp_avg_weight * exp_avg) / denom
    return param, mu_product, exp_avg, exp_avg_sq
