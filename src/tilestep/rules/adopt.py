"""ADOPT: Adam that normalizes by the previous second moment and clips what comes out."""

from typing import Any

import torch

from .protocol import ADAM_RANGES, TORCH_OPTIONS, at_least, rule
from .scalars import decayed


@rule(
    name="ADOPT",
    ranges={**ADAM_RANGES, "clip_exponent": at_least(0, or_none=True)},
    options={**TORCH_OPTIONS, "fused": None},
    keyword_only=("clip_exponent", "maximize"),
)
def adopt(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    *,
    lr: Any = 1e-3,
    betas: Any = (0.9, 0.9999),
    eps: Any = 1e-6,
    weight_decay: Any = 0.0,
    decouple: bool = False,
    clip_exponent: Any = 0.25,
    maximize: bool = False,
    step: Any,
) -> tuple[Any, ...]:
    """Modified Adam that converges with any beta2.

    Equations (t is the step count from 1; at t = 1 only v <- g^2):
        c <- clip(g / max(sqrt(v), eps), (t - 1)^clip_exponent)
        m <- beta1 * m + (1 - beta1) * c
        p <- p - lr * m
        v <- beta2 * v + (1 - beta2) * g^2
    with g <- g + weight_decay * p before, or with `decouple` p <- p - lr * weight_decay * p before (from t = 2 on).
    `clip_exponent=None` does not clip: the paper's first version.

    Source: Taniguchi et al., "ADOPT: Modified Adam Can Converge with Any beta2 with the Optimal Rate" (NeurIPS 2024),
    with clipping; names and defaults of the authors' iShohei220/adopt, whose `clip_lambda` is the function step**0.25.
    """
    beta1, beta2 = betas
    first = step == 1
    if maximize:
        grad = -grad
    shrunk = param
    if decouple:
        shrunk = param * (1 - lr * weight_decay)
    else:
        grad = decayed(grad, param, weight_decay)
    normed = grad / torch.clamp(exp_avg_sq.sqrt(), min=eps)
    if clip_exponent is not None:
        limit = (step - 1) ** clip_exponent
        normed = torch.clamp(normed, min=-limit, max=limit)
    averaged = exp_avg + (1 - beta1) * (normed - exp_avg)
    param = torch.where(first, param, shrunk - lr * averaged)
    exp_avg = torch.where(first, exp_avg, averaged)
    exp_avg_sq = torch.where(first, grad * grad, beta2 * exp_avg_sq + (1 - beta2) * grad * grad)
    return param, exp_avg, exp_avg_sq
