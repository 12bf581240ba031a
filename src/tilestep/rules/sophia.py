"""Sophia: momentum divided by a diagonal Hessian estimate, clipped element by element."""

from typing import Any

import torch

from .protocol import at_least, between, nonnegative, rule


@rule(
    name="SophiaG",
    ranges=nonnegative("lr", "rho", "weight_decay", betas=between(0, 1), bs=at_least(1)),
    options={"capturable": False},
    keyword_only=("bs", "maximize"),
)
def sophia_g(
    param: Any,
    grad: Any,
    exp_avg: Any,
    hessian: Any,
    *,
    lr: Any = 1e-4,
    betas: Any = (0.965, 0.99),
    rho: Any = 0.04,
    weight_decay: Any = 1e-1,
    bs: Any = 5120,
    maximize: bool = False,
) -> tuple[Any, ...]:
    """Second-order clipped stochastic optimization, the update between two Hessian estimates.

    Equations:
        m <- beta1 * m + (1 - beta1) * g
        p <- p * (1 - lr * weight_decay)
        p <- p - lr * sign(m) * min(|m| / (rho * bs * h + 1e-15), 1)
    The diagonal estimate h is the state `hessian`, which this rule only reads. Every few steps, after a backward pass
    on labels sampled from the model, the training script sets h <- beta2 * h + (1 - beta2) * g^2 (the estimator of
    Gauss, Newton and Bartlett; `bs` is the number of tokens or samples in a batch). While h is 0 this is sign descent.

    Source: Liu et al., "Sophia: A Scalable Stochastic Second-order Optimizer for Language Model Pre-training"
    (ICLR 2024), algorithm 3; names and defaults of SophiaG in the authors' Liuhong99/Sophia.
    """
    beta1, _ = betas
    if maximize:
        grad = -grad
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    ratio = torch.clamp(exp_avg.abs() / (rho * bs * hessian + 1e-15), max=1)
    param = param * (1 - lr * weight_decay) - lr * (exp_avg.sign() * ratio)
    return param, exp_avg, hessian
