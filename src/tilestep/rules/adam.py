"""Adam, and Adam with decoupled weight decay."""

from typing import Any

import torch

from .protocol import ADAM_RANGES, TORCH_OPTIONS, rule
from .scalars import decayed

_OPTIONS = {**TORCH_OPTIONS, "fused": None}


@rule(
    name="Adam",
    ranges=ADAM_RANGES,
    options=_OPTIONS,
    keyword_only=("maximize", "decoupled_weight_decay"),
    numbered=2,
)
def adam(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    max_exp_avg_sq: Any,
    *,
    lr: Any = 1e-3,
    betas: Any = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
    step: Any,
) -> tuple[Any, ...]:
    """Adaptive moment estimation.

    Equations (t is the step count from 1):
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    with g <- g + weight_decay * p before (coupled), or p <- p - lr * weight_decay * p before (decoupled), and with
    `amsgrad` the largest v so far in place of v.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (ICLR 2015); Reddi et al., "On the Convergence
    of Adam and Beyond" (ICLR 2018) for amsgrad; torch.optim.Adam.
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
    bias_correction1 = 1 - beta1**step
    bias_correction2_sqrt = torch.sqrt(1 - beta2**step)
    second_moment = exp_avg_sq
    if amsgrad:
        max_exp_avg_sq = torch.maximum(max_exp_avg_sq, exp_avg_sq)
        second_moment = max_exp_avg_sq
    denom = second_moment.sqrt() / bias_correction2_sqrt + eps
    param = param - (lr / bias_correction1) * (exp_avg / denom)
    return param, exp_avg, exp_avg_sq, max_exp_avg_sq


@rule(
    name="AdamW",
    ranges=ADAM_RANGES,
    options={**_OPTIONS, "decoupled_weight_decay": True},
    keyword_only=("maximize",),
    numbered=2,
)
def adamw(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    max_exp_avg_sq: Any,
    *,
    lr: Any = 1e-3,
    betas: Any = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
    step: Any,
) -> tuple[Any, ...]:
    """Adam with decoupled weight decay.

    Equations (t is the step count from 1):
        p <- p - lr * weight_decay * p
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    and with `amsgrad` the largest v so far in place of v.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (ICLR 2019); torch.optim.AdamW.
    """
    return adam(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        max_exp_avg_sq,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        amsgrad=amsgrad,
        maximize=maximize,
        decoupled_weight_decay=True,
        step=step,
    )
