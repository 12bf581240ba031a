"""RAdam: Adam with a rectified adaptive learning rate."""

from typing import Any

import torch

from .protocol import ADAM_RANGES, TORCH_OPTIONS, rule
from .scalars import decayed


@rule(
    name="RAdam",
    ranges=ADAM_RANGES,
    options=TORCH_OPTIONS,
    keyword_only=("maximize",),
)
def radam(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    *,
    lr: Any = 1e-3,
    betas: Any = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    step: Any,
) -> tuple[Any, ...]:
    """Adam that steps along its momentum alone until the second moment has seen enough gradients to be trusted.

    Equations (t is the step count from 1):
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        rho_inf = 2 / (1 - beta2) - 1
        rho_t = rho_inf - 2 * t * beta2^t / (1 - beta2^t)
        r_t = sqrt((rho_t - 4) * (rho_t - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho_t))
        p <- p - lr / (1 - beta1^t) * m * r_t * sqrt(1 - beta2^t) / (sqrt(v) + eps)  if rho_t > 5
        p <- p - lr / (1 - beta1^t) * m                                              otherwise
    with g <- g + weight_decay * p before (coupled), or p <- p - lr * weight_decay * p before (decoupled). The paper
    has 4 in place of the 5, and no eps.

    Source: Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond" (ICLR 2020); torch.optim.RAdam.
    """
    beta1, beta2 = betas
    if maximize:
        grad = -grad
    if decoupled_weight_decay:
        param = param * (1 - lr * weight_decay)
    else:
        grad = decayed(grad, param, weight_decay)
    exp_avg = exp_avg + (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    bias_correction2 = 1 - beta2**step
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * step * beta2**step / bias_correction2
    rectification = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
    trusted = rho > 5
    # Select scalars first and tensors second, so that an untrusted step computes no invalid square root.
    scale = torch.where(trusted, torch.sqrt(torch.where(trusted, rectification * bias_correction2, 1.0)), 1.0)
    denom = torch.where(trusted, exp_avg_sq.sqrt() + eps, 1.0)
    param = param - (lr * scale / (1 - beta1**step)) * (exp_avg / denom)
    return param, exp_avg, exp_avg_sq
