"""The inputs of a step's decision, and limits that depend on previous norms and losses.

A limit runs after the control numbers of a step are written (optimizer/control.py). It may set CLIP, the norm to which
the step's gradients are clipped where a param group asks for it, and it may skip the step. Its formulas stand in
`on_host`; backends/triton/support.py has them as one kernel each, for one program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.spec import CLIP, NORM, SKIP, SKIPPED


class StepLimit:
    """A limit with a memory. Subclasses are frozen dataclasses of numbers."""

    kernel = ""  # the name of its kernel in backends/triton/support.py
    skips = False  # whether it may skip steps

    @property
    def size(self) -> int:
        """Numbers that it remembers, float64 each, all 0 at the beginning."""
        raise NotImplementedError

    def numbers(self) -> list[float]:
        """The numbers that its kernel reads, float64 each."""
        raise NotImplementedError

    def constants(self) -> dict[str, Any]:
        """The constants of its kernel."""
        return {}

    def on_host(self, control: list[float], memory: list[float], loss: float | None) -> None:
        """Decide a step of a CPU."""
        raise NotImplementedError


@dataclass(frozen=True)
class ZClip(StepLimit):
    """A limit for `max_grad_norm` that clips global norms that are outliers among previous norms.

    Equations (n is the norm, m and v mean and variance of norms, eps = 1e-6; the first `warmup` norms give m and v):
        z <- (n - m) / (sqrt(v) + eps)
        where z is above `z`: n <- factor * (m + z_max^2 / z * sqrt(v)), with z_max = `z`; gradients are clipped to it
        m <- decay * m + (1 - decay) * n
        v <- decay * v + (1 - decay) * (n - m)^2
    Norms of skipped steps and non-finite norms are ignored.

    Args:
        z: how many standard deviations above the mean a norm may be; above 0.
        decay: what mean and variance keep from step to step; in [0, 1).
        warmup: norms from which mean and variance begin, during which only `max_norm` clips; at least 2.
        max_norm: a limit that holds beside it, from the first step; None for none.
        option: what an outlier is clipped to: "adaptive" as above, "mean" to m, "percentile" to m + z * sqrt(v).
        factor: scales what "adaptive" clips to; above 0.

    Raises:
        ValueError: for a value out of its range.

    Source: Kumar et al., "ZClip: Adaptive Spike Mitigation for LLM Pre-Training" (2025), with the defaults of the
    authors' bluorion-com/ZClip (`z_thresh`, `alpha`, `warmup_steps`, `max_grad_norm`, `clip_option`, `clip_factor`).

    Example:
        >>> ZClip(z=2.5, decay=0.97).max_norm
        1.0
    """

    z: float = 2.5
    decay: float = 0.97
    warmup: int = 25
    max_norm: float | None = 1.0
    option: str = "adaptive"
    factor: float = 1.0

    kernel = "limit_by_z_score"

    def __post_init__(self) -> None:
        if not 0 < self.z < math.inf:
            raise ValueError(f"Invalid z: {self.z}; it must be a number above 0")
        if not 0 <= self.decay < 1:
            raise ValueError(f"Invalid decay: {self.decay}; it must be at least 0 and below 1")
        if not self.warmup >= 2:
            raise ValueError(f"Invalid warmup: {self.warmup}; a variance needs at least 2 norms")
        if self.max_norm is not None and not 0 < self.max_norm < math.inf:
            raise ValueError(f"Invalid max_norm: {self.max_norm}; it must be a norm above 0, or None")
        if self.option not in _OPTIONS:
            raise ValueError(f"Invalid option: {self.option!r}; it must be one of {', '.join(map(repr, _OPTIONS))}")
        if not 0 < self.factor < math.inf:
            raise ValueError(f"Invalid factor: {self.factor}; it must be a number above 0")

    @property
    def size(self) -> int:
        return 3

    def numbers(self) -> list[float]:
        return [self.z, self.decay, self.warmup, self.factor, _EPS, 1.0]

    def constants(self) -> dict[str, Any]:
        return {"OPTION": _OPTIONS.index(self.option)}

    def on_host(self, control: list[float], memory: list[float], loss: float | None) -> None:
        norm, (mean, variance, count) = control[NORM], memory
        control[CLIP] = math.inf
        if control[SKIP] or not norm < math.inf:
            # A norm above float64's range is an outlier whatever came before; one of infinite gradients stays NaN.
            if norm == math.inf and not control[SKIP] and count >= self.warmup:
                control[CLIP] = mean
            return
        if count < self.warmup:
            count += 1
            moved = mean + (norm - mean) / count
            # Sums of squares until the last of them: Welford's way.
            variance += (norm - mean) * (norm - moved)
            memory[:] = moved, variance / count if count == self.warmup else variance, count
            return
        deviation = math.sqrt(variance)
        z = (norm - mean) / (deviation + _EPS)
        if self.option == "percentile":
            outlier, clip = norm > mean + self.z * deviation, mean + self.z * deviation
        elif self.option == "mean":
            outlier, clip = z > self.z, mean
        else:
            outlier = z > self.z
            clip = (mean + self.z * deviation / (z / self.z)) * self.factor if outlier else math.inf
        if outlier:
            norm = control[CLIP] = clip
        mean = self.decay * mean + (1 - self.decay) * norm
        variance = self.decay * variance + (1 - self.decay) * (norm - mean) ** 2
        memory[:] = mean, variance, count


_OPTIONS = ("adaptive", "mean", "percentile")
_EPS = 1e-6


@dataclass(frozen=True)
class Sigma(StepLimit):
    """A limit for `skip_above`: standard deviations above the mean of recent norms and of recent losses.

    A step is skipped if its global norm, or the loss that `step(loss=...)` was given, is more than `factor` standard
    deviations above the mean of those of the `window` steps before. All finite norms and losses enter the window, those
    of skipped steps too, so that skipping ends after a lasting rise. Ranks that step together use their mean loss, also
    those of a DistributedDataParallel; where gradients are summed by hand, give each rank the mean.

    Args:
        factor: standard deviations; above 0.
        window: the number of recent steps; at least 2.
        warmup: steps that must have been seen, the present one counted, before any is skipped; None for 20 or half of
            the window, what is more.
        both_sides: whether values far below the mean skip a step too, as in the source.

    Raises:
        ValueError: for a value out of its range.

    Source: `SkipStepOptimizer` of allenai/OLMo-core, which has both sides; Team OLMo, "2 OLMo 2 Furious" (2025).

    Example:
        >>> Sigma(6, window=128)
        Sigma(factor=6, window=128, warmup=None, both_sides=False)
    """

    factor: float = 6.0
    window: int = 128
    warmup: int | None = None
    both_sides: bool = False

    kernel = "limit_by_window"
    skips = True

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ValueError(f"Invalid factor: {self.factor}; it must be a number above 0")
        if not self.window >= 2:
            raise ValueError(f"Invalid window: {self.window}; a deviation needs at least 2 steps")
        if self.warmup is not None and not self.warmup >= 3:
            raise ValueError(f"Invalid warmup: {self.warmup}; at least 2 steps must lie before one that is skipped")

    @property
    def size(self) -> int:
        # A count and a window for norms, and for losses.
        return 2 * (1 + self.window)

    @property
    def seen(self) -> int:
        """Steps that must have been seen before one is skipped."""
        return max(20, self.window // 2) if self.warmup is None else self.warmup

    def numbers(self) -> list[float]:
        return [self.factor, self.seen, 1.0]

    def constants(self) -> dict[str, Any]:
        block = 1 << (self.window - 1).bit_length()
        return {"WINDOW": self.window, "BLOCK": block, "BOTH_SIDES": self.both_sides}

    def on_host(self, control: list[float], memory: list[float], loss: float | None) -> None:
        span = 1 + self.window
        above = self._enter(memory, 0, control[NORM]) or control[NORM] == math.inf
        if loss is not None:
            above = self._enter(memory, span, loss) or above
        if above and not control[SKIP]:
            control[SKIP] = 1.0
            control[SKIPPED] += 1

    def _enter(self, memory: list[float], start: int, value: float) -> bool:
        """Whether a value is an outlier among those of a window; it enters the window."""
        if not abs(value) < math.inf:
            return False
        count = int(memory[start])
        first = start + 1
        before = memory[first : first + min(count, self.window)]
        outlier = False
        if count + 1 >= self.seen and len(before) > 1:
            mean = math.fsum(before) / len(before)
            deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in before) / (len(before) - 1))
            distance = value - mean
            outlier = (abs(distance) if self.both_sides else distance) > self.factor * deviation
        memory[first + count % self.window] = value
        memory[start] = count + 1
        return outlier


def clip_code(limit: Any) -> float:
    """`max_grad_norm` of a group, or another number, as kernels read it; below 0 if CLIP limits the norm too."""
    if not isinstance(limit, ZClip):
        return float(limit)
    return -math.inf if limit.max_norm is None else -float(limit.max_norm)


class StepHistory:
    """What is kept between an optimizer's steps: the numbers of its limits, the same on each of its devices."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[StepLimit, torch.device], torch.Tensor] = {}
        self.loss: torch.Tensor | None = None
        """The loss of the step that is decided next, float64[1], if there is one."""
        self.has_norm = False  # whether the last step computed the norm of its gradients

    def of(self, limit: StepLimit, device: torch.device) -> torch.Tensor:
        """The numbers of a limit on a device, float64[limit.size]; they begin as a copy of another device's."""
        key = (limit, device)
        if key not in self._numbers:
            elsewhere = next((numbers for (other, _), numbers in self._numbers.items() if other == limit), None)
            zeros = torch.zeros(limit.size, dtype=torch.float64, device=device)
            self._numbers[key] = zeros if elsewhere is None else zeros.copy_(elsewhere)
        return self._numbers[key]

    @property
    def numbers(self) -> list[torch.Tensor]:
        """The numbers of all limits, in the order in which they began."""
        return list(self._numbers.values())

    def save(self, limits: Iterable[StepLimit]) -> dict[str, torch.Tensor]:
        """Copies of the numbers of these limits, by the name of their class; the host does not read them."""
        saved = {}
        for limit in limits:
            numbers = next((numbers for (other, _), numbers in self._numbers.items() if other == limit), None)
            if numbers is not None:
                saved[type(limit).__name__] = numbers.clone()
        return saved

    def load(self, limits: Iterable[StepLimit], saved: Mapping[str, Any]) -> None:
        """Take over the result of `save`; limits that are not in it, or have another size, begin anew."""
        for limit in limits:
            numbers = saved.get(type(limit).__name__)
            if not isinstance(numbers, torch.Tensor) or numbers.numel() != limit.size:
                numbers = None
            own = [tensor for (other, _), tensor in self._numbers.items() if other == limit]
            if not own and numbers is not None:
                own = [self.of(limit, numbers.device)]
            for tensor in own:
                tensor.zero_() if numbers is None else tensor.copy_(numbers)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "loss": None}


@dataclass
class StepInputs:
    """The inputs of a step's decision."""

    power_sum: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None  # the loss scale of the gradients, one number on the device, or None
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
        return not self.has_norm and self.grad_scale is None and self.found_inf is None

    @property
    def may_skip(self) -> bool:
        """Whether the step may be skipped; then only the device knows whether it is."""
        limits = (self.skip_above, self.mean_factor)
        scaled = self.grad_scale is not None or self.found_inf is not None
        flags = scaled or self.skip_nonfinite or self.check_overflow
        return flags or any(limit < math.inf for limit in limits) or any(limit.skips for limit in self.limits)

    @property
    def has_norm(self) -> bool:
        """Whether there was a norm pass."""
        return self.power_sum is not None or self.partials is not None
