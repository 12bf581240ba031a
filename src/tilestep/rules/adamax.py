"""Adamax: Adam with the infinity norm."""

from typing import Any

import torch

from .protocol import ADAM_RANGES, TORCH_OPTIONS, rule
from .scalars import decayed


@rule(
    name="Adamax",
    ranges=ADAM_RANGES,
    options=TORCH_OPTIONS,
    keyword_only=("maximize",),
    positional=("foreach",),
)
def adamax(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_inf: Any,
    *,
    lr: Any = 2e-3,
    betas: Any = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    maximize: bool = False,
    step: Any,
) -> tuple[Any, ...]:
    """Adam with a decayed maximum of the gradient's magnitude in place of its second moment.

    Equations (t is the step count from 1):
        g <- g + weight_decay * p
        m <- beta1 * m + (1 - beta1) * g
        u <- max(beta2 * u, |g| + eps)
        p <- p - lr / (1 - beta1^t) * m / u

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (ICLR 2015), section 7.1; torch.optim.Adamax.
    """
    beta1, beta2 = betas
    if maximize:
        grad = -grad
    grad = decayed(grad, param, weight_decay)
    exp_avg = exp_avg + (1 - beta1) * (grad - exp_avg)
    exp_inf = torch.maximum(beta2 * exp_inf, grad.abs() + eps)
    param = param - (lr / (1 - beta1**step)) * (exp_avg / exp_inf)
    return param, exp_avg, exp_inf
