"""Schedules as functions of the step, for use as hyperparameters: they run inside the kernel's scalar pass.

A schedule is called with the step count of a parameter, from 1, and returns the value for that step. Schedules with
equal arguments are equal, so that their param groups share a kernel. Any other function of the step works too:
`lr=lambda step: 1e-3 / math.sqrt(step)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

_SHAPES = ("linear", "cosine")


@dataclass(frozen=True)
class Piecewise:
    """A piecewise curve through points; constant before the first and after the last.

    Args:
        points: (step, value, shape) in the order of steps. The shape, "linear" or "cosine" (half a cosine, flat at
            both ends), applies to the curve from the point before. The first point's shape is not used.

    Raises:
        ValueError: for fewer than two points, steps that do not increase, or another shape.

    Example:
        >>> triangle = Piecewise(((1, 0.0, "linear"), (3, 1.0, "linear"), (5, 0.0, "linear")))
        >>> [float(triangle(step)) for step in (1, 2, 3, 4, 5, 6)]
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """

    points: tuple[tuple[float, float, str], ...]

    def __post_init__(self) -> None:
        steps = [step for step, _, _ in self.points]
        if len(steps) < 2 or sorted(set(steps)) != steps:
            raise ValueError(f"Invalid points: steps {steps} must be two or more, in increasing order")
        for _, _, shape in self.points:
            if shape not in _SHAPES:
                raise ValueError(f"Invalid shape: {shape!r}; it must be one of {', '.join(_SHAPES)}")

    def __call__(self, step: Any) -> Any:
        """The value at a step, a 0-dim float64 tensor."""
        step = torch.as_tensor(step, dtype=torch.float64, device=getattr(step, "device", "cpu"))
        value: Any = self.points[-1][1]
        for left, right in reversed(list(zip(self.points, self.points[1:]))):
            value = torch.where(step < right[0], _between(left, right, step), value)
        first_step, first_value, _ = self.points[0]
        return torch.where(step <= first_step, first_value, value)


def _between(left: tuple[float, float, str], right: tuple[float, float, str], step: torch.Tensor) -> torch.Tensor:
    done = (step - left[0]) / (right[0] - left[0])
    if right[2] == "cosine":
        return right[1] + (left[1] - right[1]) * (0.5 + 0.5 * torch.cos(math.pi * done))
    return left[1] + (right[1] - left[1]) * done


@dataclass(frozen=True)
class InverseSqrt:
    """The schedule that `inverse_sqrt` makes: linear up to `peak`, then `peak * sqrt(warmup / step)`.

    Args:
        peak: the value at step `warmup`.
        warmup: steps of the linear part, at least 1.

    Example:
        >>> float(InverseSqrt(1.0, 4)(16))
        0.5
    """

    peak: float
    warmup: int

    def __call__(self, step: Any) -> Any:
        """The value at a step, a 0-dim float64 tensor."""
        step = torch.as_tensor(step, dtype=torch.float64, device=getattr(step, "device", "cpu"))
        rising = self.peak * step / self.warmup
        return torch.where(step < self.warmup, rising, self.peak * torch.sqrt(self.warmup / step))


def _after_warmup(peak: float, warmup: int, total: int, *points: tuple[float, float, str]) -> Piecewise:
    if not 0 <= warmup < total:
        raise ValueError(f"Invalid warmup: {warmup}; it must be at least 0 and less than the total of {total} steps")
    first = ((0, 0.0, "linear"), (warmup, peak, "linear")) if warmup else ((0, peak, "linear"),)
    return Piecewise((*first, *points))


def warmup_cosine(peak: float, warmup: int, total: int, final: float = 0.0) -> Piecewise:
    """Linear warm-up `peak * step / warmup`, then half a cosine down to `final` at step `total`.

    Equal to torch's LinearLR(start_factor=1 / warmup, total_iters=warmup - 1) followed, from that milestone on, by
    CosineAnnealingLR(T_max=total - warmup, eta_min=final).

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts" (ICLR 2017), one cycle of it.

    Args:
        peak: the largest value, at step `warmup`.
        warmup: steps of warm-up; 0 for none.
        total: the step at which the schedule ends; later steps keep `final`.
        final: the last value.

    Raises:
        ValueError: unless 0 <= warmup < total.

    Example:
        >>> import torch, tilestep
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = tilestep.SGD([weight], lr=tilestep.schedule.warmup_cosine(1.0, warmup=2, total=4))
        >>> for _ in range(4):
        ...     weight.grad = torch.tensor([-1.0])
        ...     optimizer.step()
        >>> weight.item()  # 0.5 + 1.0 + 0.5 + 0.0
        2.0
    """
    return _after_warmup(peak, warmup, total, (total, final, "cosine"))


def warmup_linear(peak: float, warmup: int, total: int, final: float = 0.0) -> Piecewise:
    """Linear warm-up `peak * step / warmup`, then linear decay to `final` at step `total`.

    Source: torch's LinearLR up, and down from the milestone on.

    Args:
        peak: the largest value, at step `warmup`.
        warmup: steps of warm-up; 0 for none.
        total: the step at which the schedule ends; later steps keep `final`.
        final: the last value.

    Raises:
        ValueError: unless 0 <= warmup < total.

    Example:
        >>> curve = warmup_linear(1.0, warmup=2, total=4)
        >>> [float(curve(step)) for step in (1, 2, 3, 4)]
        [0.5, 1.0, 0.5, 0.0]
    """
    return _after_warmup(peak, warmup, total, (total, final, "linear"))


def warmup_stable_decay(
    peak: float, warmup: int, decay: int, total: int, final: float = 0.0, shape: str = "linear"
) -> Piecewise:
    """Linear warm-up, constant at `peak`, and decay to `final` over the last `decay` steps.

    Source: Hu et al., "MiniCPM: Unveiling the Potential of Small Language Models with Scalable Training Strategies"
    (2024).

    Args:
        peak: the value between warm-up and decay.
        warmup: steps of warm-up; 0 for none.
        decay: steps of the decay.
        total: the step at which the schedule ends; later steps keep `final`.
        final: the last value.
        shape: the shape of the decay, "linear" or "cosine".

    Raises:
        ValueError: unless 0 <= warmup < total - decay, and for another shape.

    Example:
        >>> curve = warmup_stable_decay(1.0, warmup=2, decay=2, total=6)
        >>> [float(curve(step)) for step in (1, 2, 3, 4, 5, 6)]
        [0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    return _after_warmup(peak, warmup, total - decay, (total - decay, peak, "linear"), (total, final, shape))


def inverse_sqrt(peak: float, warmup: int) -> InverseSqrt:
    """Linear warm-up `peak * step / warmup`, then `peak * sqrt(warmup / step)` without an end.

    Source: Vaswani et al., "Attention Is All You Need" (NeurIPS 2017), section 5.3.

    Args:
        peak: the largest value, at step `warmup`.
        warmup: steps of warm-up, at least 1.

    Raises:
        ValueError: for a warm-up of less than one step.

    Example:
        >>> curve = inverse_sqrt(1.0, warmup=4)
        >>> [float(curve(step)) for step in (2, 4, 16)]
        [0.5, 1.0, 0.5]
    """
    if warmup < 1:
        raise ValueError(f"Invalid warmup: {warmup}; it must be at least 1")
    return InverseSqrt(peak, warmup)


def one_cycle(
    peak: float, total: int, pct_start: float = 0.3, div_factor: float = 25.0, final_div_factor: float = 1e4
) -> Piecewise:
    """Half a cosine up and half a cosine down, equal to torch's OneCycleLR with these arguments.

    Source: Smith and Topin, "Super-Convergence" (2018); torch.optim.lr_scheduler.OneCycleLR.

    Args:
        peak: the largest value, torch's `max_lr`.
        total: the number of steps.
        pct_start: the fraction of steps before the peak.
        div_factor: `peak` over the first value.
        final_div_factor: the first value over the last.

    Raises:
        ValueError: if there is no step before the peak, or none after it.

    Example:
        >>> curve = one_cycle(1.0, total=11, pct_start=0.5, div_factor=10)
        >>> [round(float(curve(step)), 6) for step in (1, 11)]
        [0.1, 1e-05]
    """
    first = peak / div_factor
    top = pct_start * total
    if not 1 < top < total:
        raise ValueError(f"Invalid pct_start: {pct_start}; both halves of {total} steps need at least one step")
    return Piecewise(((1, first, "cosine"), (top, peak, "cosine"), (total, first / final_div_factor, "cosine")))
