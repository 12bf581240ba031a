"""LAMB: Adam with a learning rate per layer, from the ratio of the weights' norm to the update's."""

from typing import Any

import torch

from .protocol import ADAM_RANGES, rule
from .scalars import decayed


@rule(
    name="LAMB",
    ranges=ADAM_RANGES,
    keyword_only=("adam_w_mode", "grad_averaging", "use_nvlamb"),
    numbered=2,
)
def lamb(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    *,
    lr: Any = 1e-3,
    bias_correction: bool = True,
    betas: Any = (0.9, 0.999),
    eps: Any = 1e-6,
    weight_decay: Any = 0.01,
    adam_w_mode: bool = True,
    grad_averaging: bool = True,
    use_nvlamb: bool = False,
    step: Any,
) -> tuple[Any, ...]:
    """Layer-wise adaptive moments for large batches.

    Equations (t is the step count from 1, norms are over one parameter tensor):
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        u <- m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p
        p <- p - lr * norm(p) / norm(u) * u
    The ratio is 1 where a norm is 0, and for parameters without weight decay unless `use_nvlamb`. `bias_correction`
    off leaves the two corrections out, `grad_averaging` off adds g whole to m, and `adam_w_mode` off adds
    weight_decay * p to g instead of to u. apex clips the global gradient norm at 1 unless told otherwise: pass
    `max_grad_norm=1.0` for that.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (ICLR 2020),
    algorithm 2, with phi the identity; names and defaults of apex.optimizers.FusedLAMB.
    """
    beta1, beta2 = betas
    if not adam_w_mode:
        grad = decayed(grad, param, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1 if grad_averaging else 1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2_sqrt = torch.sqrt(1 - beta2**step) if bias_correction else 1.0
    update = (exp_avg / correction1) / (exp_avg_sq.sqrt() / correction2_sqrt + eps)
    if adam_w_mode:
        update = decayed(update, param, weight_decay)
    step_size = lr
    if use_nvlamb or weight_decay != 0:
        param_norm = param.norm()
        update_norm = update.norm()
        adapts = (param_norm > 0) & (update_norm > 0)
        step_size = lr * torch.where(adapts, param_norm / update_norm, 1.0)
    param = param - step_size * update
    return param, exp_avg, exp_avg_sq
