"""StableAdamW: AdamW with Adafactor's update clipping."""

from typing import Any

import torch

from .protocol import ADAM_RANGES, State, rule


def _debiased(beta: Any, step: Any) -> Any:
    return beta * (1 - beta ** (step - 1)) / (1 - beta**step)


@rule(
    name="StableAdamW",
    states={"exp_avg_sq": State(signed=False)},
    ranges=ADAM_RANGES,
)
def stable_adamw(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    *,
    lr: Any = 1e-3,
    betas: Any = (0.9, 0.99),
    weight_decay: Any = 1e-2,
    eps: Any = 1e-6,
    step: Any,
) -> tuple[Any, ...]:
    """AdamW whose learning rate falls where the second moment lags behind the gradient.

    Equations (t is the step count from 1, the mean is over one parameter tensor):
        b1 <- beta1 * (1 - beta1^(t-1)) / (1 - beta1^t), b2 likewise from beta2
        m <- b1 * m + (1 - b1) * g
        v <- b2 * v + (1 - b2) * g^2
        eta <- lr / max(1, sqrt(mean(g^2 / max(v, eps^2))))
        p <- p - eta * weight_decay * p - eta * m / (sqrt(v) + eps)

    Source: Wortsman et al., "Stable and low-precision training for large-scale vision-language models" (NeurIPS 2023),
    algorithm 2; names and defaults of warner-benjamin/optimi.
    """
    beta1, beta2 = betas
    beta1_hat = _debiased(beta1, step)
    beta2_hat = _debiased(beta2, step)
    exp_avg = beta1_hat * exp_avg + (1 - beta1_hat) * grad
    exp_avg_sq = beta2_hat * exp_avg_sq + (1 - beta2_hat) * grad * grad
    rms = (grad * grad / torch.clamp(exp_avg_sq, min=eps * eps)).mean().sqrt()
    eta = lr / torch.clamp(rms, min=1)
    param = param * (1 - eta * weight_decay) - eta * (exp_avg / (exp_avg_sq.sqrt() + eps))
    return param, exp_avg, exp_avg_sq
