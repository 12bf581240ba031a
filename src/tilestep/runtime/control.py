"""The numbers that decide a step on the device: norm, skip flag, inverse loss scale, and what they remember.

The formulas, the same on every device (inputs in the order of `StepInputs`; `nan` and `inf` as in IEEE arithmetic):

    inverse  = 1 / grad_scale                                   1 without a scale
    valid    = 0 < grad_scale < inf                             true without a scale
    finite   = power_sum < inf                                  true without a norm pass; false for nan
    norm     = sqrt(power_sum) * inverse                        0 without a norm pass; inf from LARGEST_SUM on
    overflow = found_inf != 0 or (check_overflow and not finite)
    limit    = min(skip_above, mean_factor * MEAN if MEAN_COUNT >= mean_warmup and MEAN > 0 else inf)
    skip     = overflow or not valid or (skip_nonfinite and not finite) or norm > limit

    NORM, SKIP, INVERSE_SCALE = norm, skip, inverse
    UNSCALE    = a scale was given
    SKIPPED   += skip
    if there was a norm pass, and norm < inf, finite, valid and not overflow:
        MEAN       += max(1 - mean_decay, 1 / (MEAN_COUNT + 1)) * (min(norm, limit) - MEAN)
        MEAN_COUNT += 1
    overflow out = overflow

CLIP is what an adaptive limit clips to beside `max_grad_norm`, inf without one; limits with a memory of their own run
after these formulas (runtime/limits.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..control_numbers import (
    CLIP,
    CONTROL_SIZE,
    INVERSE_SCALE,
    LARGEST_SUM,
    MEAN,
    MEAN_COUNT,
    NORM,
    SKIP,
    SKIPPED,
    UNSCALE,
)
from ..errors import GradientError
from .limits import StepHistory, StepLimit


@dataclass
class StepInputs:
    """What a step is decided from."""

    power_sum: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None  # loss scale the gradients still carry, one number on the device, or None
    found_inf: torch.Tensor | None = None  # nonzero when some gradient overflowed, one number on the device, or None
    skip_nonfinite: bool = False  # whether gradients that are not finite skip the step
    check_overflow: bool = False  # whether gradients that are not finite are an overflow, as a scaler means it
    skip_above: float = math.inf  # unscaled norm above which the step is skipped
    mean_factor: float = math.inf  # multiple of the running mean of the norm above which the step is skipped
    mean_decay: float = 0.0  # what a norm keeps of its weight in the mean from step to step
    mean_warmup: float = math.inf  # norms that go into the mean before it is used
    overflow: torch.Tensor | None = None
    partials: tuple[torch.Tensor, torch.Tensor] | None = None
    limits: tuple[StepLimit, ...] = ()  # limits with a memory
    memory: StepHistory | None = None  # what they remember
    loss: torch.Tensor | None = None  # the step's loss for them, one float64 number on the device, or None
    needs_norm: bool = False  # whether anything asks for a norm pass

    @property
    def is_trivial(self) -> bool:
        """Whether there is nothing to decide."""
        numbers = self.power_sum is None and self.partials is None
        return numbers and self.grad_scale is None and self.found_inf is None

    @property
    def may_skip(self) -> bool:
        """Whether the step may be skipped, which is then known on the device alone."""
        limits = (self.skip_above, self.mean_factor)
        scaled = self.grad_scale is not None or self.found_inf is not None
        flags = scaled or self.skip_nonfinite or self.check_overflow
        return flags or any(limit < math.inf for limit in limits) or any(limit.skips for limit in self.limits)

    @property
    def has_norm(self) -> bool:
        """Whether there was a norm pass."""
        return self.power_sum is not None or self.partials is not None


def fresh_control(device: torch.device) -> torch.Tensor:
    """Control numbers of a step without clip, scale or skip, and nothing remembered: float64[8] on the device."""
    control = torch.zeros(CONTROL_SIZE, dtype=torch.float64, device=device)
    control[INVERSE_SCALE].fill_(1.0)
    control[CLIP].fill_(math.inf)
    return control


def decide_on_host(control: torch.Tensor, decision: StepInputs) -> None:
    """Write the control numbers of a CPU step."""
    known = control.tolist()
    inverse = 1.0
    if decision.grad_scale is not None:
        scale = float(decision.grad_scale)
        if not 0 < scale < math.inf:
            raise GradientError(f"the loss scale is {scale}: gradients cannot be unscaled by it; nothing was updated")
        inverse = 1 / scale
    overflow = decision.found_inf is not None and float(decision.found_inf) != 0
    power_sum = 0.0 if decision.power_sum is None else float(decision.power_sum)
    finite = power_sum < math.inf
    overflow = overflow or (decision.check_overflow and not finite)
    norm = math.inf if power_sum >= LARGEST_SUM else math.sqrt(power_sum) * inverse
    limit = decision.skip_above
    if known[MEAN_COUNT] >= decision.mean_warmup and known[MEAN] > 0:
        limit = min(limit, decision.mean_factor * known[MEAN])
    skip = overflow or (decision.skip_nonfinite and not finite) or norm > limit
    known[NORM], known[SKIP], known[INVERSE_SCALE] = norm, float(skip), inverse
    known[UNSCALE] = float(decision.grad_scale is not None)
    known[SKIPPED] += float(skip)
    if decision.power_sum is not None and finite and norm < math.inf and not overflow:
        weight = max(1 - decision.mean_decay, 1 / (known[MEAN_COUNT] + 1))
        known[MEAN] += weight * (min(norm, limit) - known[MEAN])
        known[MEAN_COUNT] += 1
    control.copy_(torch.tensor(known, dtype=torch.float64, device="cpu"))
    if decision.overflow is not None:
        decision.overflow.fill_(float(overflow))
