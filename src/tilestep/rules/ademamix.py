"""AdEMAMix: Adam with a second, much slower momentum mixed in."""

from typing import Any

import torch

from .protocol import ADAM_RANGES, at_least, nonnegative, rule


def warm_up_alpha(step: Any, alpha: Any, warmup: Any) -> Any:
    """The mixing coefficient at a step: rises linearly from 0 to `alpha` over `warmup` steps.

    Args:
        step: the step count from 1, a 0-dim tensor.
        alpha: the final coefficient.
        warmup: the number of steps.

    Source: Pagliardini, Ablin and Grangier (2024).

    Example:
        >>> warm_up_alpha(torch.tensor(25.0), 2.0, 100).item()
        0.5
    """
    return torch.clamp(step / warmup, max=1) * alpha


def warm_up_beta3(step: Any, beta1: Any, beta3: Any, warmup: Any) -> Any:
    """The slow momentum's decay at a step: from `beta1` to `beta3` over `warmup` steps, its half-life growing linearly.

    Args:
        step: the step count from 1, a 0-dim tensor.
        beta1: the initial decay, a 0-dim tensor.
        beta3: the final decay, a 0-dim tensor.
        warmup: the number of steps.

    Source: Pagliardini, Ablin and Grangier (2024), as in the authors' apple/ml-ademamix (1e-8 inside the
    logarithm).

    Example:
        >>> beta1, beta3 = torch.tensor([0.9, 0.9999], dtype=torch.float64)
        >>> [round(warm_up_beta3(torch.tensor(t), beta1, beta3, 100).item(), 4) for t in (1.0, 50.0, 100.0)]
        [0.9909, 0.9998, 0.9999]
    """

    def half_life(beta: Any) -> Any:
        return -0.6931471805599453 / torch.log(beta + 1e-8) - 1

    fraction = step / warmup
    blended = (1 - fraction) * half_life(beta1) + fraction * half_life(beta3)
    return torch.where(step < warmup, 0.5 ** (1 / (blended + 1)), beta3)


@rule(
    name="AdEMAMix",
    ranges=nonnegative("alpha", beta3_warmup=at_least(1), alpha_warmup=at_least(1), **ADAM_RANGES),
    numbered=3,
)
def ademamix(
    param: Any,
    grad: Any,
    exp_avg_fast: Any,
    exp_avg_slow: Any,
    exp_avg_sq: Any,
    *,
    lr: Any = 1e-3,
    betas: Any = (0.9, 0.999, 0.9999),
    alpha: Any = 2.0,
    beta3_warmup: Any = None,
    alpha_warmup: Any = None,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    step: Any,
) -> tuple[Any, ...]:
    """Adam with a mixture of a fast and a slow average of gradients.

    Equations (t is the step count from 1; alpha and beta3 follow `warm_up_alpha` and `warm_up_beta3` if asked):
        m1 <- beta1 * m1 + (1 - beta1) * g
        m2 <- beta3 * m2 + (1 - beta3) * g
        v <- beta2 * v + (1 - beta2) * g^2
        u <- (m1 / (1 - beta1^t) + alpha * m2) / (sqrt(v) / sqrt(1 - beta2^t) + eps)
        p <- p - lr * (u + weight_decay * p)
    With beta1 = 0 the fast average is the gradient and has no buffer.

    Source: Pagliardini, Ablin and Grangier, "The AdEMAMix Optimizer: Better, Faster, Older" (ICLR 2025), algorithm 1;
    names and defaults of the authors' apple/ml-ademamix.
    """
    beta1, beta2, beta3 = betas
    if alpha_warmup is not None:
        alpha = warm_up_alpha(step, alpha, alpha_warmup)
    if beta3_warmup is not None:
        beta3 = warm_up_beta3(step, beta1, beta3, beta3_warmup)
    fast = grad
    if beta1 != 0:
        exp_avg_fast = beta1 * exp_avg_fast + (1 - beta1) * grad
        fast = exp_avg_fast / (1 - beta1**step)
    exp_avg_slow = beta3 * exp_avg_slow + (1 - beta3) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    denom = exp_avg_sq.sqrt() / torch.sqrt(1 - beta2**step) + eps
    update = (fast + alpha * exp_avg_slow) / denom + weight_decay * param
    param = param - lr * update
    return param, exp_avg_fast, exp_avg_slow, exp_avg_sq
