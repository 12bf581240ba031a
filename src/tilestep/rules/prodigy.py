"""Prodigy: Adam that finds its own step size."""

import math
from typing import Any

import torch

from .protocol import State, at_least, between, nonnegative, rule
from .scalars import decayed, max_over_tensors, sum_over_tensors


@rule(
    name="Prodigy",
    states={
        "p0": State("param"),
        "d": State("d0", shape="scalar"),
        "d_max": State("d0", shape="scalar"),
        "d_numerator": State(0.0, shape="scalar"),
        "idle": State(0.0, shape="scalar"),
        "renewals": State(0.0, shape="scalar"),
    },
    ranges=nonnegative(
        "lr",
        "weight_decay",
        "d_coef",
        betas=between(0, 1),
        beta3=between(0, 1),
        eps=between(0, math.inf, open_low=True),
        d0=between(0, math.inf, open_low=True),
        growth_rate=at_least(1),
    ),
    options={"fsdp_in_use": False},
)
def prodigy(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    s: Any,
    p0: Any,
    d: Any,
    d_max: Any,
    d_numerator: Any,
    idle: Any,
    renewals: Any,
    *,
    lr: Any = 1.0,
    betas: Any = (0.9, 0.999),
    beta3: Any = None,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    decouple: bool = True,
    use_bias_correction: bool = False,
    safeguard_warmup: bool = False,
    d0: Any = 1e-6,
    d_coef: Any = 1.0,
    growth_rate: Any = math.inf,
    step: Any,
) -> tuple[Any, ...]:
    """Adam with an estimate d of the distance to the solution as its step size.

    Equations (dot and norm1 are sums over all parameters; p0 is the initial parameter; beta3 is sqrt(beta2) if None; t
    counts steps from 1, without the `idle` steps in which nothing moved):
        e <- d * lr, times sqrt(1 - beta2^t) / (1 - beta1^t) with `use_bias_correction`
        r <- beta3 * r + d / d0 * e * dot(g, p0 - p)
        s <- beta3 * s + d / d0 * e * g     (d in place of e with `safeguard_warmup`)
        m <- beta1 * m + (1 - beta1) * d * g
        v <- beta2 * v + (1 - beta2) * d^2 * g^2
        h <- d_coef * r / norm1(s)
        d <- min(max(d_max, h), growth_rate * (max(d, h) if d = d0 else d)), d_max <- max(d_max, h)
        p <- p - weight_decay * e * p - e * m / (sqrt(v) + d * eps)
    with g <- g + weight_decay * p before instead of the decay when `decouple` is off. While norm1(s) is 0, and if lr is
    0, nothing moves. d, d_max and d_numerator (r) are global scalars of the optimizer. Every parameter keeps copies,
    which are renewed in steps with a gradient: d and d_max are the largest copies among parameters with a gradient, and
    r is the copy with the most `renewals`. If only parameters that missed earlier steps have a gradient, the step
    continues from an older r. An h of NaN, as with infinite weights, leaves d and d_max unchanged. With beta1 = 0 the
    authors' code uses the new d for m, and this rule the old d, as in the equations.

    Source: Mishchenko and Defazio, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner" (ICML 2024),
    algorithm 4; names and defaults of the authors' konstmish/prodigy, without `slice_p`.
    """
    beta1, beta2 = betas
    if beta3 is None:
        beta3 = torch.sqrt(beta2)
    # Copies of parameters without a gradient were not renewed and are behind: d and d_max never fall, so their maxima
    # are the newest; r may fall, so the newest r belongs to the parameters with the most renewals.
    d, d_max, newest = max_over_tensors(d), max_over_tensors(d_max), max_over_tensors(renewals)
    latest = max_over_tensors(torch.where(renewals == newest, d_numerator, -math.inf))
    if not decouple:
        grad = decayed(grad, param, weight_decay)
    dlr = d * lr
    if use_bias_correction:
        count = step - idle
        dlr = dlr * (torch.sqrt(1 - beta2**count) / (1 - beta1**count))
    active = lr > 0
    s = torch.where(active, beta3 * s + (d / d0) * (d if safeguard_warmup else dlr) * grad, s)
    exp_avg = torch.where(active, beta1 * exp_avg + (d * (1 - beta1)) * grad, exp_avg)
    exp_avg_sq = torch.where(active, beta2 * exp_avg_sq + (d * d * (1 - beta2)) * grad * grad, exp_avg_sq)
    # Scaled before summation, so that the sum is part of the pass that has s.
    progress = ((d / d0) * dlr * grad * (p0 - param)).sum()
    numerator = beta3 * latest + sum_over_tensors(progress)
    denominator = sum_over_tensors(torch.where(active, s.abs().sum(), 0.0))
    # With infinite or NaN values the denominator is NaN: not moving would hide them.
    moves = denominator != 0
    if use_bias_correction:
        idle = torch.where(moves, idle, idle + 1)
    d_hat = d_coef * numerator / denominator
    # d0 may have been rounded when it was stored as the first d, so equality could fail. Comparisons exclude NaN.
    begun = torch.where((d <= d0 * (1 + 1e-6)) & (d_hat > d), d_hat, d)
    d_max = torch.where(moves & (d_hat > d_max), d_hat, d_max)
    d = torch.where(moves, torch.minimum(d_max, begun * growth_rate), d)
    d_numerator = torch.where(moves, numerator, d_numerator)
    renewals = torch.where(moves, newest + 1, renewals)
    shrunk = param * (1 - dlr * weight_decay) if decouple else param
    param = torch.where(moves, shrunk - dlr * (exp_avg / (exp_avg_sq.sqrt() + d * eps)), param)
    return param, exp_avg, exp_avg_sq, s, p0, d, d_max, d_numerator, idle, renewals
