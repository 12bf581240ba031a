"""The algorithms of papers, written as their authors state them: plain numpy loops, one step a yield."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

STEPS = 20
Gradient = Callable[[Any, int], Any]


def problem(shape: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, Gradient]:
    """A starting point, and a noisy gradient that pulls towards another point."""
    random = np.random.default_rng(seed)
    start, target = random.normal(size=shape), random.normal(size=shape)
    noise = random.normal(size=(STEPS + 1, *shape)) * np.exp(random.normal(size=shape))

    def gradient(param: Any, step: int) -> Any:
        if isinstance(param, np.ndarray):
            return 0.3 * (param - target) + noise[step]
        return torch.from_numpy(gradient(param.numpy(), step))

    return start, gradient


def norm(x: np.ndarray) -> float:
    return math.sqrt(float((x**2).sum()))


def lamb(p, gradient, lr, bias_correction, betas, eps, weight_decay, adam_w_mode, grad_averaging, use_nvlamb):
    b1, b2 = betas
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t in range(1, STEPS + 1):
        g = gradient(p, t)
        if not adam_w_mode:
            g = g + weight_decay * p
        m = b1 * m + ((1 - b1) if grad_averaging else 1.0) * g
        v = b2 * v + (1 - b2) * g**2
        m_hat = m / (1 - b1**t) if bias_correction else m
        v_hat = v / (1 - b2**t) if bias_correction else v
        r = m_hat / (np.sqrt(v_hat) + eps)
        if adam_w_mode:
            r = r + weight_decay * p
        ratio = 1.0
        if (weight_decay != 0 or use_nvlamb) and norm(p) != 0 and norm(r) != 0:
            ratio = norm(p) / norm(r)
        p = p - lr * ratio * r
        yield p


def lars(p, gradient, lr, momentum, weight_decay, trust_coefficient, eps, nesterov, exclude_bias_and_norm):
    v = np.zeros_like(p)
    for t in range(1, STEPS + 1):
        g, rate = gradient(p, t), lr
        if p.ndim > 1 or not exclude_bias_and_norm:
            rate = lr * trust_coefficient * norm(p) / (norm(g) + weight_decay * norm(p) + eps)
            g = g + weight_decay * p
        v = momentum * v + rate * g
        p = p - (momentum * v + rate * g if nesterov else v)
        yield p


def lion(p, gradient, lr, betas, weight_decay, maximize):
    b1, b2 = betas
    m = np.zeros_like(p)
    for t in range(1, STEPS + 1):
        g = -gradient(p, t) if maximize else gradient(p, t)
        update = np.sign(m * b1 + g * (1 - b1))
        p = p * (1 - lr * weight_decay)
        p = p + update * -lr
        m = m * b2 + g * (1 - b2)
        yield p


def adan(p, gradient, lr, betas, eps, weight_decay, no_prox):
    b1, b2, b3 = betas
    m, d, n, before = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p), None
    for t in range(1, STEPS + 1):
        g = gradient(p, t)
        change = np.zeros_like(p) if before is None else g - before
        m = b1 * m + (1 - b1) * g
        d = b2 * d + (1 - b2) * change
        n = b3 * n + (1 - b3) * (g + b2 * change) ** 2
        eta = lr / (np.sqrt(n / (1 - b3**t)) + eps)
        step = eta * (m / (1 - b1**t) + b2 * d / (1 - b2**t))
        p = (1 - lr * weight_decay) * p - step if no_prox else (p - step) / (1 + lr * weight_decay)
        before = g
        yield p


def ademamix(p, gradient, lr, betas, alpha, beta3_warmup, alpha_warmup, eps, weight_decay):
    b1, b2, b3_end = betas
    m1, m2, v = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    for t in range(1, STEPS + 1):
        g, a, b3 = gradient(p, t), alpha, b3_end
        if alpha_warmup is not None:
            a = min(t * alpha / alpha_warmup, alpha)
        if beta3_warmup is not None and t < beta3_warmup:
            mu, halves = t / beta3_warmup, [math.log(0.5) / math.log(b + 1e-8) - 1 for b in (b1, b3_end)]
            b3 = 0.5 ** (1 / ((1 - mu) * halves[0] + mu * halves[1] + 1))
        m1 = b1 * m1 + (1 - b1) * g
        m2 = b3 * m2 + (1 - b3) * g
        v = b2 * v + (1 - b2) * g**2
        adam = (m1 / (1 - b1**t) + a * m2) / (np.sqrt(v / (1 - b2**t)) + eps)
        p = p - lr * (adam + weight_decay * p)
        yield p


def adopt(p, gradient, lr, betas, eps, weight_decay, decouple, clip_exponent, maximize):
    b1, b2 = betas
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t in range(STEPS):
        g = -gradient(p, t + 1) if maximize else gradient(p, t + 1)
        if not decouple:
            g = g + weight_decay * p
        if t == 0:
            v = g**2
            yield p
            continue
        if decouple:
            p = p - lr * weight_decay * p
        c = g / np.maximum(np.sqrt(v), eps)
        if clip_exponent is not None:
            c = np.clip(c, -(t**clip_exponent), t**clip_exponent)
        m = b1 * m + (1 - b1) * c
        p = p - lr * m
        v = b2 * v + (1 - b2) * g**2
        yield p


def schedule_free(p, gradient, beta, direction, lr, weight_decay, warmup_steps, r, weight_lr_power):
    x, z, total, largest = p.copy(), p.copy(), 0.0, 0.0
    for t in range(1, STEPS + 1):
        y = (1 - beta) * z + beta * x
        rate = lr * t / warmup_steps if t < warmup_steps else lr
        largest = max(largest, rate)
        weight = t**r * largest**weight_lr_power
        total += weight
        z = z - rate * (direction(gradient(y, t), t) + weight_decay * y)
        c = weight / total if total else 0.0
        x = (1 - c) * x + c * z
        yield (1 - beta) * z + beta * x, x, z


def schedule_free_sgd(p, gradient, momentum, **hyper):
    yield from schedule_free(p, gradient, momentum, lambda g, t: g, **hyper)


def schedule_free_adamw(p, gradient, betas, eps, inner_momentum, **hyper):
    m, v = np.zeros_like(p), np.zeros_like(p)

    def direction(g, t):
        nonlocal m, v
        m = inner_momentum * m + (1 - inner_momentum) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        return m / (1 - inner_momentum**t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)

    yield from schedule_free(p, gradient, betas[0], direction, **hyper)


def sophia_g(p, gradient, hessian, lr, betas, rho, weight_decay, bs, maximize):
    m = np.zeros_like(p)
    for t in range(1, STEPS + 1):
        g = -gradient(p, t) if maximize else gradient(p, t)
        p = p * (1 - lr * weight_decay)
        m = betas[0] * m + (1 - betas[0]) * g
        p = p - lr * np.sign(m) * np.minimum(np.abs(m) / (rho * bs * hessian + 1e-15), 1.0)
        yield p


def stable_adamw(p, gradient, lr, betas, weight_decay, eps):
    v, u = np.zeros_like(p), np.zeros_like(p)
    for t in range(1, STEPS + 1):
        g = gradient(p, t)
        b1, b2 = (b * (1 - b ** (t - 1)) / (1 - b**t) for b in betas)
        v = b1 * v + (1 - b1) * g
        u = b2 * u + (1 - b2) * g**2
        rms = math.sqrt(float((g**2 / np.maximum(u, eps**2)).mean()))
        eta = lr / max(1.0, rms)
        p = p - eta * weight_decay * p - eta * v / (np.sqrt(u) + eps)
        yield p


def tiger(p, gradient, lr, beta, weight_decay, shrink_ratio, embedding, center):
    m = np.zeros_like(p)
    for t in range(1, STEPS + 1):
        g = gradient(p, t)
        if shrink_ratio is not None and np.isnan(g).any():
            p = (p - center) * shrink_ratio + center
            yield p
            continue
        m = beta * m + (1 - beta) * g
        if p.ndim < 2:
            p = p - lr * 0.5 * np.sign(m)
        else:
            rms = np.sqrt((p**2).mean(axis=-1, keepdims=True)) if embedding else math.sqrt(float((p**2).mean()))
            p = p - lr * rms * (np.sign(m) + weight_decay * p)
        yield p


def laprop(p, gradient, lr, betas, eps, weight_decay, amsgrad, centered):
    b1, b2 = betas
    v, m, mean, most = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    rates = whole = 0.0
    for t in range(1, STEPS + 1):
        g = gradient(p, t)
        rate = lr(t) if callable(lr) else lr
        v, mean = b2 * v + (1 - b2) * g**2, b2 * mean + (1 - b2) * g
        rates, whole = b1 * rates + (1 - b1) * rate, b2 * whole + 1 - b2
        spread = v - mean**2 if centered and t > 10 else v
        if amsgrad and (t > 10 or not centered):
            most = np.maximum(most, spread)
            spread = most
        m = b1 * m + (1 - b1) * rate * g / (np.sqrt(spread / whole) + eps)
        p = p - m / (rates / rate)
        p = p - weight_decay * p
        yield p


def adam_atan2(p, gradient, lr, betas, weight_decay, a, b):
    b1, b2 = betas
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t in range(1, STEPS + 1):
        g = gradient(p, t)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        p = p * (1 - lr * weight_decay)
        p = p - lr * a * np.arctan2(m / (1 - b1**t), np.sqrt(b * b * v / (1 - b2**t)))
        yield p


def zeroth_power(x: np.ndarray, eps: float = 1e-7, rows: Any = ((3.4445, -4.7750, 2.0315),) * 5) -> np.ndarray:
    """Jordan's iteration, in float64: X over its norm, then a X + (b G + c G^2) X."""
    if x.shape[0] > x.shape[1]:
        return zeroth_power(x.T, eps, rows).T
    x = x / max(norm(x), eps)
    for a, b, c in rows:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def mars(p, gradient, lr, betas, eps, weight_decay, amsgrad, gamma, is_approx, mars_type, optimize_1d, lr_1d_factor,
         betas_1d, weight_decay_1d, before=None):  # fmt: skip
    is_matrix = p.ndim == 2
    reduces = is_matrix or optimize_1d
    if not reduces:
        lr, betas, weight_decay = lr * lr_1d_factor, betas_1d, weight_decay_1d
    b1, b2 = betas
    m, v, most, last = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    for t in range(1, STEPS + 1):
        g = gradient(p, t)
        if before is not None:
            last = before(t)
        c = g
        if reduces:
            c = g + gamma * b1 / (1 - b1) * (g - last)
            c = c / max(1.0, norm(c))
        m = b1 * m + (1 - b1) * c
        v = b2 * v + (1 - b2) * c**2
        most = np.maximum(most, v)
        if mars_type == "mars-lion" and reduces:
            u = np.sign(m)
        elif mars_type == "mars-shampoo" and is_matrix:
            u = max(1, p.shape[0] / p.shape[1]) ** 0.5 * zeroth_power(m / (1 - b1), eps)
        else:
            u = m / (1 - b1**t) / (np.sqrt((most if amsgrad else v) / (1 - b2**t)) + eps)
        p = p - lr * (weight_decay * p + u)
        last = g
        yield p


def row_scale(p: np.ndarray, adjust: str | None) -> float:
    """What published implementations multiply an orthogonal update by."""
    rows, columns = p.shape
    ratios = {"spectral": max(rows, columns), "spectral_unclamped": rows / columns}
    if adjust == "match_rms_adamw":
        return 0.2 * max(rows, columns) ** 0.5
    return ratios.get(adjust or "", max(1, rows / columns)) ** 0.5


def momenta(p, gradient, momentum, nesterov):
    """The gradient's running average, with the gradient once more for Nesterov; the caller sends the new parameter."""
    b = np.zeros_like(p)
    for t in range(1, STEPS + 1):
        g = gradient(p, t)
        b = momentum * b + (1 - momentum) * g
        p = yield (1 - momentum) * g + momentum * b if nesterov else b


def on_matrices(p, gradient, momentum, nesterov, update):
    """The parameter after each step; `update(p, u)` is the next one."""
    source = momenta(p, gradient, momentum, nesterov)
    u = next(source)
    for t in range(1, STEPS + 1):
        p = update(p, u)
        yield p
        u = source.send(p) if t < STEPS else None


def normuon(p, gradient, lr, weight_decay, momentum, beta2, nesterov, eps, ns_coefficients, ns_steps, adjust_lr_fn,
            lr_scale):  # fmt: skip
    v = np.zeros((len(p), 1))

    def update(p, u):
        nonlocal v
        o = zeroth_power(u)
        v = beta2 * v + (1 - beta2) * (o * o).mean(axis=1, keepdims=True)
        n = o / (np.sqrt(v) + eps)
        n = n * (norm(o) / (norm(n) + eps))
        return p * (1 - lr * weight_decay) - lr * lr_scale * row_scale(p, adjust_lr_fn) * n

    yield from on_matrices(p, gradient, momentum, nesterov, update)


def adamuon(p, gradient, lr, weight_decay, momentum, nesterov, ns_steps, ns_coefficients, eps):
    v = np.zeros_like(p)

    def update(p, u):
        nonlocal v
        o = zeroth_power(np.sign(u))
        v = momentum * v + (1 - momentum) * o**2
        n = o / (np.sqrt(v) + eps)
        n = n * (0.2 * (min(p.shape) * max(p.shape)) ** 0.5 / (norm(n) + eps))
        return p * (1 - lr * weight_decay) - lr * n

    yield from on_matrices(p, gradient, momentum, nesterov, update)


def muonh(p, gradient, lr, momentum, nesterov, ns_coefficients, ns_steps, eps):
    def update(p, u):
        o = zeroth_power(u, rows=[ns_coefficients] * ns_steps)
        q = p - lr * o * norm(p) / max(norm(o), eps)
        return q / max(norm(q), eps) * norm(p)

    yield from on_matrices(p, gradient, momentum, nesterov, update)


def scion(p, gradient, lr, momentum, norm, scale, unconstrained, normalized, transpose, ns_steps):
    def lmo(g):
        if g.ndim < 2:
            return g / (np.sqrt((g**2).mean()) + 1e-8)
        rows, columns = g.shape
        if norm == "Sign":
            return np.sign(g) / (1 if normalized is False else columns)
        if norm in ("Auto", "Spectral"):
            factor = rows if normalized is False else rows / columns
            return factor**0.5 * zeroth_power(g, rows=((3.4445, -4.7750, 2.0315),) * ns_steps)
        if transpose:
            g, rows, columns = g.T, columns, rows
        if norm == "ColNorm":
            size = np.sqrt((g**2).sum(axis=0, keepdims=True)) / rows**0.5 * (columns if normalized else 1)
        else:
            size = np.sqrt((g**2).sum(axis=1, keepdims=True)) * (1 if normalized is False else columns**0.5)
        g = g / (size + 1e-8)
        return g.T if transpose else g

    b = np.zeros_like(p)
    for t in range(1, STEPS + 1):
        b = (1 - momentum) * b + momentum * gradient(p, t)
        p = (p if unconstrained else p * (1 - lr)) - lr * scale * lmo(b)
        yield p


def prodigy(
    tensors: list[np.ndarray],
    gradients: list[Gradient],
    *,
    lr,
    betas,
    beta3,
    eps,
    weight_decay,
    decouple,
    use_bias_correction,
    safeguard_warmup,
    d0,
    d_coef,
    growth_rate,
) -> Iterator[tuple[list[np.ndarray], float]]:
    b1, b2 = betas
    b3 = math.sqrt(b2) if beta3 is None else beta3
    first = [p.copy() for p in tensors]
    m, v, s = ([np.zeros_like(p) for p in tensors] for _ in range(3))
    d = d_max = d0
    numerator, count = 0.0, 1
    for t in range(1, STEPS + 1):
        correction = math.sqrt(1 - b2**count) / (1 - b1**count) if use_bias_correction else 1.0
        dlr, total, denominator = d * lr * correction, b3 * numerator, 0.0
        present_or_none = [gradient(p, t) for gradient, p in zip(gradients, tensors)]
        present = [i for i, g in enumerate(present_or_none) if g is not None]
        for i in present:
            p = tensors[i]
            g = present_or_none[i] + (0.0 if decouple else weight_decay * p)
            total += d / d0 * dlr * float((g * (first[i] - p)).sum())
            m[i] = b1 * m[i] + d * (1 - b1) * g
            v[i] = b2 * v[i] + d * d * (1 - b2) * g**2
            s[i] = b3 * s[i] + d / d0 * (d if safeguard_warmup else dlr) * g
            denominator += float(np.abs(s[i]).sum())
        if denominator > 0:
            count += 1
            numerator = total
            d_hat = d_coef * numerator / denominator
            if d == d0:
                d = max(d, d_hat)
            d_max = max(d_max, d_hat)
            d = min(d_max, d * growth_rate)
            for i in present:
                p = tensors[i]
                decay = weight_decay * dlr * p if decouple else 0.0
                tensors[i] = p - decay - dlr * m[i] / (np.sqrt(v[i]) + d * eps)
        yield list(tensors), d
