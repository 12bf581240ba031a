"""MARS: variance reduction for Adam, Lion and Muon.

Example:
    >>> import torch
    >>> from tilestep.rules import registry
    >>> zeros = torch.zeros(1, 2)
    >>> states = zeros, zeros, zeros, None
    >>> registry["MARS"](torch.ones(1, 2), torch.tensor([[0.3, -0.1]]), *states, lr=0.1, step=1)[0]
    tensor([[0.9000, 1.1000]])
"""

import math
from typing import Any

import torch

from ..linalg.orthogonal import orthogonalize
from .protocol import ADAM_RANGES, between, nonnegative, one_of, rule


@rule(
    name="MARS",
    ranges=nonnegative(
        "gamma",
        "lr_1d_factor",
        "weight_decay_1d",
        mars_type=one_of("mars-adamw", "mars-lion", "mars-shampoo"),
        betas_1d=between(0, 1),
        **ADAM_RANGES,
    ),
)
def mars(
    param: Any,
    grad: Any,
    exp_avg: Any,
    last_grad: Any,
    exp_avg_sq: Any,
    max_exp_avg_sq: Any,
    *,
    lr: Any = 3e-3,
    betas: Any = (0.95, 0.99),
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    amsgrad: bool = False,
    gamma: Any = 0.025,
    is_approx: bool = True,
    mars_type: str = "mars-adamw",
    optimize_1d: bool = False,
    lr_1d_factor: Any = 1.0,
    betas_1d: Any = (0.9, 0.95),
    weight_decay_1d: Any = 0.1,
    step: Any,
) -> tuple[Any, ...]:
    """A momentum of gradients corrected by their change, scaled as in AdamW, Lion or Muon.

    Equations (t is the step count from 1, h the gradient of the step before, 0 at first):
        c = g + gamma * beta1 / (1 - beta1) * (g - h);   c <- c / max(1, norm(c))
        m <- beta1 * m + (1 - beta1) * c
        v <- beta2 * v + (1 - beta2) * c^2
        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)     "mars-adamw"
        u = sign(m)                                                 "mars-lion"
        u = sqrt(max(1, rows / columns)) * orthogonalize(m)         "mars-shampoo", for matrices; else as adamw
        p <- p - lr * (u + weight_decay * p)
    With `amsgrad` the largest v so far replaces v. Without `is_approx` the rule only reads h, the state `last_grad`:
    the training script writes there the gradient of the previous step's weights on this step's batch.

    Parameters that are not matrices take AdamW's update with the rate lr * `lr_1d_factor`, `betas_1d` and
    `weight_decay_1d`, unless `optimize_1d` is true. (The authors' `lr_1d` is lr * `lr_1d_factor` at the first step, and
    their `weight_decay_1d` too is multiplied by the rate.)

    Source: Yuan et al., "MARS: Unleashing the Power of Variance Reduction for Training Large Models" (ICML 2025),
    algorithms 1 to 4; names and defaults of the authors' AGI-Arena/MARS.
    """
    if not optimize_1d and param.dim() != 2:
        lr, betas, weight_decay, mars_type = lr * lr_1d_factor, betas_1d, weight_decay_1d, "mars-adamw"
        corrected = grad
    else:
        corrected = grad + gamma * (betas[0] / (1 - betas[0])) * (grad - last_grad)
        norm = corrected.norm()
        corrected = torch.where(norm > 1, corrected / norm, corrected)
        last_grad = grad if is_approx else last_grad
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * corrected
    if mars_type == "mars-lion":
        update = torch.sign(exp_avg)
    elif mars_type == "mars-shampoo" and param.dim() == 2:
        ratio = math.sqrt(max(1, param.size(-2) / param.size(-1)))
        update = ratio * orthogonalize(exp_avg / (1 - beta1), eps=eps)
    else:
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * corrected * corrected
        square = exp_avg_sq
        if amsgrad:
            max_exp_avg_sq = torch.maximum(max_exp_avg_sq, exp_avg_sq)
            square = max_exp_avg_sq
        denom = square.sqrt() / torch.sqrt(1 - beta2**step) + eps
        update = exp_avg / (1 - beta1**step) / denom
    param = param - lr * (update + weight_decay * param)
    return param, exp_avg, last_grad, exp_avg_sq, max_exp_avg_sq
