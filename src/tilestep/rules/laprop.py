"""LaProp: gradients are divided by their root mean square before they are averaged.

Example:
    >>> import torch
    >>> from tilestep.rules import registry
    >>> zeros, none = torch.zeros(2), torch.tensor(0.0)
    >>> states = zeros, none, none, zeros, None, None
    >>> registry["LaProp"](torch.ones(2), torch.tensor([3.0, -0.1]), *states, lr=0.1, step=1)[0]
    tensor([0.9000, 1.1000])
"""

from typing import Any

import torch

from .protocol import ADAM_RANGES, State, rule

_UNCENTERED = 10  # steps before the mean is subtracted, as in the authors' code


@rule(
    name="LaProp",
    states={
        "exp_avg_lr_1": State(0.0, shape="scalar", dtype=torch.float64),
        "exp_avg_lr_2": State(0.0, shape="scalar", dtype=torch.float64),
    },
    ranges=ADAM_RANGES,
)
def laprop(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_lr_1: Any,
    exp_avg_lr_2: Any,
    exp_avg_sq: Any,
    exp_mean_avg_beta2: Any,
    max_exp_avg_sq: Any,
    *,
    lr: Any = 4e-4,
    betas: Any = (0.9, 0.999),
    eps: Any = 1e-15,
    weight_decay: Any = 0.0,
    amsgrad: bool = False,
    centered: bool = False,
    step: Any,
) -> tuple[Any, ...]:
    """Adam with momentum after the normalization, so that beta1 and beta2 are independent.

    Equations (t is the step count from 1):
        v <- beta2 * v + (1 - beta2) * g^2,   c2 <- beta2 * c2 + 1 - beta2
        m <- beta1 * m + (1 - beta1) * lr * g / (sqrt(v / c2) + eps),   c1 <- beta1 * c1 + (1 - beta1) * lr
        p <- p - lr * m / c1
        p <- p - weight_decay * p
    The decay is not multiplied by lr. With `centered`, b <- beta2 * b + (1 - beta2) * g, and v - b^2 replaces v where
    t > 10. With `amsgrad` the largest such value replaces it. The state m includes the learning rates of its steps; c1
    and c2 are `exp_avg_lr_1` and `exp_avg_lr_2`. Where lr is 0 only the decay moves p; the authors' code subtracts m.

    Source: Ziyin et al., "LaProp: Separating Momentum and Adaptivity in Adam" (2020), and the authors' laprop.py
    (Z-T-WANG/LaProp-Optimizer), with their names and defaults.
    """
    beta1, beta2 = betas
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    exp_avg_lr_1 = beta1 * exp_avg_lr_1 + (1 - beta1) * lr
    exp_avg_lr_2 = beta2 * exp_avg_lr_2 + (1 - beta2)
    denom, is_late = exp_avg_sq, step > _UNCENTERED
    if centered:
        exp_mean_avg_beta2 = beta2 * exp_mean_avg_beta2 + (1 - beta2) * grad
        denom = torch.where(is_late, denom - exp_mean_avg_beta2 * exp_mean_avg_beta2, denom)
    if amsgrad:
        largest = torch.maximum(max_exp_avg_sq, denom)
        max_exp_avg_sq = torch.where(is_late, largest, max_exp_avg_sq) if centered else largest
        denom = torch.where(is_late, largest, denom) if centered else largest
    exp_avg = beta1 * exp_avg + (1 - beta1) * lr * (grad / ((denom / exp_avg_lr_2).sqrt() + eps))
    param = param - torch.where(exp_avg_lr_1 > 0, lr / exp_avg_lr_1, 0.0) * exp_avg
    param = param * (1 - weight_decay)
    return param, exp_avg, exp_avg_lr_1, exp_avg_lr_2, exp_avg_sq, exp_mean_avg_beta2, max_exp_avg_sq
