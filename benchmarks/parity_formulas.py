"""Published update rules on float64 tensors, as papers state them: the referees of benchmarks/parity.py.

A formula is made with its hyperparameters. It takes a parameter, its gradient, a mapping for states and the step count
from 1 on, and returns the new parameter. No code of tilestep takes part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Formula", "adagrad", "adam", "ademamix", "adamuon", "lamb", "lars", "lion", "muon", "normuon", "rmsprop",
    "schedule_free", "sgd",
]  # fmt: skip

Formula = Callable[[Tensor, Tensor, dict[str, Any], int], Tensor]

JORDAN = ((3.4445, -4.7750, 2.0315),) * 5
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
POLAR_EXPRESS_DION = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def _average(state: dict[str, Any], name: str, value: Tensor, beta: float) -> Tensor:
    state[name] = beta * state.get(name, torch.zeros_like(value)) + (1 - beta) * value
    return state[name]


def adam(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: str = "before",
    max_norm: float | None = None,
) -> Formula:
    """Kingma and Ba (2015), Loshchilov and Hutter (2019).

    Args:
        decay: where the weight decays: "before" the update, "after" it, or "in the gradient".
        max_norm: the largest norm of all gradients, which stands in the state as "norm".
    """

    def step(p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        if max_norm is not None:
            g = g * min(1.0, max_norm / (state["norm"] + 1e-6))
        if decay == "in the gradient":
            g = g + weight_decay * p
        m = _average(state, "m", g, betas[0]) / (1 - betas[0] ** t)
        v = _average(state, "v", g * g, betas[1]) / (1 - betas[1] ** t)
        if decay == "before":
            p = p * (1 - lr * weight_decay)
        p = p - lr * m / (v.sqrt() + eps)
        return p * (1 - lr * weight_decay) if decay == "after" else p

    return step


def lion(lr: float, betas: tuple[float, float], weight_decay: float, decay: str = "before") -> Formula:
    """Chen et al. (2023), algorithm 2; the decay is decoupled."""

    def step(p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        if decay == "in the gradient":
            g = g + weight_decay * p
        m = state.get("m", torch.zeros_like(p))
        update = (betas[0] * m + (1 - betas[0]) * g).sign()
        state["m"] = betas[1] * m + (1 - betas[1]) * g
        return (p if decay == "in the gradient" else p * (1 - lr * weight_decay)) - lr * update

    return step


def sgd(lr: float, momentum: float, weight_decay: float = 0.0, largest: float | None = None) -> Formula:
    """Sutskever et al. (2013) as torch has it: the first gradient is the first momentum.

    Args:
        largest: an update longer than this part of its parameter is shortened to it.
    """

    def step(p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        g = g + weight_decay * p
        state["m"] = momentum * state["m"] + g if "m" in state else g
        limit = 1.0 if largest is None else min(1.0, largest * float(p.norm()) / float(state["m"].norm()))
        return p - lr * limit * state["m"]

    return step


def adagrad(lr: float, eps: float = 1e-10) -> Formula:
    """Duchi et al. (2011)."""

    def step(p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        state["sum"] = state.get("sum", torch.zeros_like(p)) + g * g
        return p - lr * g / (state["sum"].sqrt() + eps)

    return step


def rmsprop(lr: float, alpha: float, eps: float) -> Formula:
    """Tieleman and Hinton (2012)."""

    def step(p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        return p - lr * g / (_average(state, "v", g * g, alpha).sqrt() + eps)

    return step


def lamb(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    ratio: str = "trust",
) -> Formula:
    """You et al. (2020), algorithm 2.

    Args:
        ratio: "trust" multiplies the update by ||p|| / ||update||; "limit" only shortens an update longer than its
            parameter, and decays the weight beside it; "none" is AdamW.
    """

    def step(p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        m = _average(state, "m", g, betas[0]) / (1 - betas[0] ** t)
        v = _average(state, "v", g * g, betas[1]) / (1 - betas[1] ** t)
        update = m / (v.sqrt() + eps)
        if ratio == "trust":
            update = update + weight_decay * p
            return p - lr * p.norm() / update.norm() * update
        before, p = p, p * (1 - lr * weight_decay)
        if ratio == "limit":
            # The limited norm is that of the update before its bias correction.
            raw = state["m"] / (state["v"].sqrt() + eps * math.sqrt(1 - betas[1] ** t))
            update = update * min(1.0, float(before.norm() / raw.norm()))
        return p - lr * update

    return step


def lars(lr: float, momentum: float, weight_decay: float, trust_coefficient: float) -> Formula:
    """You et al. (2017): the rate of a layer is the coefficient times ||p|| / (||g|| + decay * ||p||)."""

    def step(p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        rate = lr * trust_coefficient * p.norm() / (g.norm() + weight_decay * p.norm())
        state["m"] = momentum * state.get("m", torch.zeros_like(p)) + rate * (g + weight_decay * p)
        return p - state["m"]

    return step


def ademamix(lr: float, betas: tuple[float, float, float], alpha: float, eps: float, weight_decay: float) -> Formula:
    """Pagliardini et al. (2024), without warmups; the decay is part of the update."""

    def step(p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        fast = _average(state, "fast", g, betas[0]) / (1 - betas[0] ** t)
        v = _average(state, "v", g * g, betas[1]) / (1 - betas[1] ** t)
        slow = _average(state, "slow", g, betas[2])
        return p - lr * ((fast + alpha * slow) / (v.sqrt() + eps) + weight_decay * p)

    return step


def schedule_free(
    lr: float, beta: float, beta2: float | None = None, eps: float = 1e-8, weight_decay: float = 0.0, warmup: int = 0
) -> Formula:
    """Defazio et al. (2024); the parameter is y, at which gradients are taken. With `beta2` AdamW, without SGD."""

    def step(p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        z, x = state.setdefault("z", p), state.setdefault("x", p)
        rate = lr * min(1.0, t / warmup) if warmup else lr
        if beta2 is not None:
            v = _average(state, "v", g * g, beta2) / (1 - beta2**t)
            g = g / (v.sqrt() + eps)
        state["weights"] = state.get("weights", 0.0) + rate**2
        part = rate**2 / state["weights"]
        state["z"] = z - rate * (g + weight_decay * p)
        state["x"] = (1 - part) * x + part * state["z"]
        return (1 - beta) * state["z"] + beta * state["x"]

    return step


def orthogonal(x: Tensor, rows: Any, eps: float, stretch: float = 1.0) -> Tensor:
    """Jordan (2024): a X + (b G + c G^2) X with G = X X^T, from X over its norm; nothing is rounded to bfloat16."""
    if x.shape[-2] > x.shape[-1]:
        return orthogonal(x.mT, rows, eps, stretch).mT
    x = x / (stretch * x.norm(dim=(-2, -1), keepdim=True)).clamp(min=eps)
    for a, b, c in rows:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def scale_of(p: Tensor, kind: str) -> float:
    """What libraries multiply an orthogonal update by."""
    rows, columns = p.shape[-2:]
    scales = {
        "original": math.sqrt(max(1, rows / columns)),
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)),
        "spectral": math.sqrt(max(rows, columns)),
        "spectral_unclamped": math.sqrt(rows / columns),
    }
    return scales[kind]


def muon(
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    rows: Any = JORDAN,
    scale: str = "original",
    eps: float = 1e-7,
    stretch: float = 1.0,
    blocks: int = 1,
) -> Formula:
    """Jordan (2024); the momentum is an average, of which only the direction matters.

    Args:
        stretch: by how much a matrix is made smaller than its norm.
        blocks: how many blocks of rows are orthogonalized by themselves; the published rule takes the whole matrix.
    """

    def step(p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        m = _average(state, "m", g, momentum)
        update = (1 - momentum) * g + momentum * m if nesterov else m
        parts = [orthogonal(part, rows, eps, stretch) * scale_of(part, scale) for part in update.chunk(blocks, -2)]
        return p * (1 - lr * weight_decay) - lr * torch.cat(parts, -2)

    return step


def normuon(
    lr: float,
    momentum: float,
    beta2: float,
    weight_decay: float,
    nesterov: bool,
    rows: Any,
    scale: str,
    eps: float,
    stretch: float = 1.0,
    along: str = "rows",
) -> Formula:
    """Li et al. (2025): rows over their running root mean square, with the norm that the matrix had.

    Args:
        along: the mean is taken along "rows", or along "the longer side" of a matrix.
    """

    def step(p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        m = _average(state, "m", g, momentum)
        update = orthogonal((1 - momentum) * g + momentum * m if nesterov else m, rows, 1e-7, stretch)
        side = -2 if along == "the longer side" and p.shape[-2] < p.shape[-1] else -1
        v = _average(state, "v", update.square().mean(side, keepdim=True), beta2)
        scaled = update / (v.sqrt() + eps)
        scaled = scaled * update.norm() / scaled.norm()
        return p * (1 - lr * weight_decay) - lr * scale_of(p, scale) * scaled

    return step


def adamuon(lr: float, momentum: float, weight_decay: float, eps: float, rows: Any, plain: str = "") -> Formula:
    """Si et al. (2025): signs of the momentum, orthogonal, over the running root mean square of each element.

    Args:
        plain: with this scale of an orthogonal update, neither signs nor the last scaling.
    """

    def step(p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> Tensor:
        m = _average(state, "m", g, momentum)
        update = (1 - momentum) * g + momentum * m
        update = orthogonal(update if plain else update.sign(), rows, 1e-7)
        v = _average(state, "v", update.square(), momentum)
        scaled = update / (v.sqrt() + eps)
        if plain:
            return p * (1 - lr * weight_decay) - lr * scale_of(p, plain) * scaled
        return p * (1 - lr * weight_decay) - lr * 0.2 * math.sqrt(p.numel()) / scaled.norm() * scaled

    return step
