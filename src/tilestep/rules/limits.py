"""Limits: functions on floats, from a step's norm and loss to whether to skip it and the norm to clip to.

A limit is called directly if the step runs on a CPU. For other devices it is traced (backends/floats.py).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from numbers import Integral
from types import SimpleNamespace
from typing import Any, ClassVar

from ..errors import RuleError


def valid(limit: Any, /, **numbers: tuple[bool, str]) -> None:
    """Raise `ValueError` for an invalid number; per name: whether the number is valid, and the requirement."""
    for name, (holds, requirement) in numbers.items():
        if not holds:
            raise ValueError(f"Invalid {name}: {getattr(limit, name)!r}; {requirement}")


Memory = Any
"""The memory of a limit in a step: a namespace with a float or a `Window` per entry of `Limit.memory`."""


class Window:
    """The most recent numbers that a limit has seen.

    Args:
        size: number of entries; at least 2.

    Raises:
        ValueError: for a size below 2.

    Example:
        >>> window = Window(2)
        >>> for number in (5.0, 1.0, 3.0):
        ...     window.append(number)
        >>> window.count, window.mean(), round(window.std(), 3)
        (3.0, 2.0, 1.414)
    """

    def __init__(self, size: int, numbers: Sequence[float] = ()) -> None:
        if not isinstance(size, (int, Integral)) or size < 2:
            raise ValueError(f"Invalid size: {size}; a window holds at least 2 numbers")
        self.size, self.count = int(size), numbers[0] if numbers else 0.0
        self.held = list(numbers[1 : 1 + min(int(self.count), size)])

    def append(self, number: float) -> None:
        """Append a number; a full window drops its oldest."""
        place = int(self.count) % self.size
        self.held[place : place + 1] = [number]
        self.count += 1

    def mean(self) -> float:
        """The mean of the numbers in the window; NaN if it is empty."""
        return math.fsum(self.held) / len(self.held) if self.held else math.nan

    def std(self) -> float:
        """The standard deviation of the numbers in the window, as torch.std; NaN for fewer than 2."""
        if len(self.held) < 2:
            return math.nan
        mean = math.fsum(self.held) / len(self.held)
        return math.sqrt(math.fsum([(number - mean) * (number - mean) for number in self.held]) / (len(self.held) - 1))


class Limit:
    """A limit for `max_grad_norm` or `skip_above`: a frozen dataclass with a `memory` and a function `decide`.

    `decide(self, norm, loss, memory)` is plain Python on floats. On a GPU it runs inside the kernel that decides the
    step, also in CUDA graphs, and ranks that step together decide alike. It returns a pair: whether to skip the step,
    and the global norm to clip gradients to, `math.inf` for no clip.

    - `norm` is the global 2-norm of the unscaled gradients, which may be infinite; `loss` is the argument of
      `step(loss=...)`, averaged over ranks, or None.
    - `memory` has an attribute for each entry of the class's `memory`: a float, which `decide` may set, or a `Window`.
      It is saved in the `state_dict` (`limits` of the first group) under the name of the class.
    - Allowed: arithmetic, comparisons, `if`, `and`, `or`, `not`, `min`, `max`, `abs`, functions of `math` with a single
      result, loops of a known length, and the dataclass's fields. Loops with a data-dependent end, conversions of
      numbers to `int` or `str`, and random numbers are refused.
    - Results equal Python's, to the bit for `+ - * /` and `math.sqrt`; where Python raises, on a division by zero for
      example, a step on a CPU raises and a GPU computes inf or NaN.
    - `decide` is not called for steps that are already skipped, because of nonfinite gradients or another limit, nor
      for a norm of NaN, unless it has a keyword-only parameter `skipped`.

    `max_grad_norm=` takes limits that clip the groups with this value; they may also skip steps. `skip_above=` takes
    limits that only skip.

    Example:
        >>> import math, torch, tilestep
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Spikes(tilestep.Limit):
        ...     factor: float = 3.0
        ...     memory = {"mean": 0.0, "count": 0.0}
        ...
        ...     def decide(self, norm, loss, memory):
        ...         if memory.count > 2 and norm > self.factor * memory.mean:
        ...             return True, math.inf
        ...         memory.count += 1
        ...         memory.mean += (norm - memory.mean) / memory.count
        ...         return False, 2 * memory.mean
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = tilestep.SGD([weight], lr=1.0, max_grad_norm=Spikes(factor=2.0))
        >>> for size in (1.0, 1.0, 1.0, 9.0):
        ...     weight.grad = torch.full((1,), size)
        ...     optimizer.step()
        >>> weight.item(), int(optimizer.skipped_steps)
        (-3.0, 1)
    """

    memory: ClassVar[Mapping[str, float | Window]] = {}
    """The memory's entries by name, with initial values: numbers, or a `Window`; or a property that returns them."""

    decide: Callable[..., tuple[Any, Any]]

    known: ClassVar[dict[str, dict[str, type[Limit]]]] = {}
    """The classes of limits by name, then by module and qualified name, for checkpoints."""

    sees_skipped: ClassVar[bool] = False
    """Whether `decide` is also called for steps that are already skipped."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "ClassVar" not in str(inspect.get_annotations(cls).get("memory", ClassVar)):
            raise TypeError(
                f"{cls.__name__}: memory must be a class attribute, not a field: remove its type annotation"
            )
        decide = getattr(cls, "decide", None)
        cls.sees_skipped = decide is not None and "skipped" in inspect.signature(decide).parameters
        Limit.known.setdefault(cls.__name__, {})[f"{cls.__module__}.{cls.__qualname__}"] = cls

    def __new__(cls, *args: Any, **kwargs: Any) -> Limit:
        if not is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise RuleError(f"limit {cls.__name__} must be a frozen dataclass: use @dataclass(frozen=True)")
        if not hasattr(cls, "decide"):
            raise RuleError(f"limit {cls.__name__} has no method `decide(self, norm, loss, memory)`")
        return super().__new__(cls)

    def ask(self, norm: float, loss: float | None, memory: Memory, skipped: bool) -> tuple[Any, Any]:
        """Call `decide`; a step that is already skipped, or without a norm, neither skips nor clips by this limit."""
        if self.sees_skipped:
            return self.decide(norm, loss, memory, skipped=skipped)
        if skipped or norm != norm:
            return False, math.inf
        return self.decide(norm, loss, memory)

    def remembered(self, numbers: Sequence[float]) -> Memory:
        """The memory with these numbers, float64 each: a number per entry; for a `Window`, its count comes first."""
        memory, start = SimpleNamespace(), 0
        for name, _, size in layout_of(self):
            stop = start + 1 + size
            setattr(memory, name, Window(size, numbers[start:stop]) if size else numbers[start])
            start = stop
        return memory

    def numbers_of(self, memory: Memory) -> list[float]:
        """Return the numbers of a memory."""
        numbers: list[float] = []
        for name, _, size in layout_of(self):
            entry = getattr(memory, name)
            numbers += [entry.count, *entry.held, *[0.0] * (size - len(entry.held))] if size else [entry]
        return numbers


@functools.lru_cache(maxsize=256)
def layout_of(limit: Limit) -> tuple[tuple[str, float, int], ...]:
    """The entries of a limit's memory: name, initial value, and the size of a `Window`, otherwise 0."""
    try:
        return tuple(
            (name, 0.0, entry.size) if isinstance(entry, Window) else (name, float(entry), 0)
            for name, entry in limit.memory.items()
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise RuleError(f"{limit}: memory={limit.memory!r}; it must map names to numbers or Windows") from error


def first_numbers(limit: Limit) -> list[float]:
    """The initial numbers of a limit's memory."""
    return [number for _, first, size in layout_of(limit) for number in [first, *[0.0] * size]]


@dataclass(frozen=True)
class TimesMean(Limit):
    """A limit for `skip_above`: a multiple of the running mean of the global gradient norm.

    The first norms have equal weights; then the mean is exponential. A norm above the limit enters the mean as the
    limit itself: a single spike hardly moves the mean, and after a lasting rise of the norm it follows, so that
    skipping ends. Nonfinite norms do not enter.

    Args:
        factor: skip above this many times the mean; more than 1.
        decay: decay of the mean per step; 0.99 averages over about 100 steps. In [0, 1).
        warmup: number of norms to enter the mean before any step is skipped; at least 1.

    Raises:
        ValueError: for a value out of its range.

    Example:
        >>> TimesMean(3.0)
        TimesMean(factor=3.0, decay=0.99, warmup=100)
    """

    factor: float
    decay: float = 0.99
    warmup: int = 100

    memory: ClassVar[Mapping[str, float]] = {"mean": 0.0, "count": 0.0}

    def __post_init__(self) -> None:
        valid(
            self,
            factor=(1 < self.factor < math.inf, "it must be finite and greater than 1"),
            decay=(0 <= self.decay < 1, "it must be at least 0 and below 1"),
            warmup=(self.warmup >= 1, "it must be at least 1"),
        )

    def decide(self, norm: float, loss: float | None, memory: Memory, *, skipped: bool) -> tuple[bool, float]:
        """Skip a norm above the limit; every finite norm of a step that is not already skipped moves the mean."""
        limit = math.inf
        if memory.count >= self.warmup and memory.mean > 0:
            limit = self.factor * memory.mean
        if norm < math.inf and not skipped:
            memory.mean += max(1 - self.decay, 1 / (memory.count + 1)) * (min(norm, limit) - memory.mean)
            memory.count += 1
        return norm > limit, math.inf


@dataclass(frozen=True)
class Sigma(Limit):
    """A limit for `skip_above`: standard deviations above the mean of recent norms and of recent losses.

    A step is skipped if its global norm, or its loss from `step(loss=...)`, is more than `factor` standard deviations
    above the mean over the previous `window` steps. All finite norms and losses enter the window, also from skipped
    steps, so that skipping ends after a lasting rise. Ranks that step together use their mean loss, also under
    DistributedDataParallel; if gradients are summed by hand, pass the mean loss on each rank.

    Args:
        factor: standard deviations; above 0.
        window: the number of recent steps; at least 2.
        warmup: number of steps, the current one included, before any is skipped; None for 20 or half of the window,
            whichever is more.
        both_sides: whether values far below the mean also skip a step, as in the source.

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

    def __post_init__(self) -> None:
        valid(
            self,
            factor=(0 < self.factor < math.inf, "it must be finite and greater than 0"),
            window=(self.window >= 2, "a standard deviation needs at least 2 steps"),
            warmup=(self.warmup is None or self.warmup >= 3, "it must be at least 3, or None"),
        )

    @property
    def memory(self) -> Mapping[str, Window]:  # type: ignore[override]
        """A window of norms and a window of losses."""
        return {"norms": Window(self.window), "losses": Window(self.window)}

    def decide(self, norm: float, loss: float | None, memory: Memory, *, skipped: bool) -> tuple[bool, float]:
        """Skip an outlier; norm and loss enter their windows, whether the step is skipped or not."""
        above = self._enter(memory.norms, norm)
        if loss is not None:
            above = self._enter(memory.losses, loss) | above
        return above | (norm == math.inf), math.inf

    def _enter(self, window: Window, number: float) -> bool:
        """Whether a number is an outlier of a window; appends it if it is finite."""
        if not -math.inf < number < math.inf:
            return False
        distance = number - window.mean()
        distance = abs(distance) if self.both_sides else distance
        warmup = max(20, self.window // 2) if self.warmup is None else self.warmup
        outlier = (window.count + 1 >= warmup) & (distance > self.factor * window.std())
        window.append(number)
        return outlier


@dataclass(frozen=True)
class ZClip(Limit):
    """A limit for `max_grad_norm` that clips global norms that are outliers among previous norms.

    Equations (n is the norm, m and v mean and variance of norms, eps = 1e-6; the first `warmup` norms give m and v):
        z <- (n - m) / (sqrt(v) + eps)
        where z is above `z`: n <- factor * (m + z_max^2 / z * sqrt(v)), with z_max = `z`; gradients are clipped to it
        m <- decay * m + (1 - decay) * n
        v <- decay * v + (1 - decay) * (n - m)^2
    Norms of skipped steps and non-finite norms are ignored.

    Args:
        z: largest distance of a norm above the mean, in standard deviations; above 0.
        decay: decay of mean and variance per step; in [0, 1).
        warmup: number of norms that initialize mean and variance, during which only `max_norm` clips; at least 2.
        max_norm: an additional fixed limit, from the first step; None for no such limit.
        option: target norm of an outlier: "adaptive" as above, "mean" for m, "percentile" for m + z * sqrt(v).
        factor: scales the target norm of "adaptive"; above 0.

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

    memory: ClassVar[Mapping[str, float]] = {"mean": 0.0, "variance": 0.0, "count": 0.0}

    def __post_init__(self) -> None:
        valid(
            self,
            z=(0 < self.z < math.inf, "it must be finite and greater than 0"),
            decay=(0 <= self.decay < 1, "it must be at least 0 and below 1"),
            warmup=(self.warmup >= 2, "a variance needs at least 2 norms"),
            max_norm=(
                self.max_norm is None or 0 < self.max_norm < math.inf,
                "it must be finite and greater than 0, or None",
            ),
            option=(self.option in _OPTIONS, f"it must be one of {', '.join(map(repr, _OPTIONS))}"),
            factor=(0 < self.factor < math.inf, "it must be finite and greater than 0"),
        )

    def decide(self, norm: float, loss: float | None, memory: Memory, *, skipped: bool) -> tuple[bool, float]:
        """Clip an outlier; every finite norm of a step that is not skipped moves mean and variance."""
        mean, deviation, most = memory.mean, math.sqrt(memory.variance), math.inf
        is_warm = memory.count >= self.warmup
        if self.max_norm is not None:
            most = self.max_norm
        if skipped or not norm < math.inf:
            # A norm above float64's range is an outlier after any history; the norm of infinite gradients stays NaN.
            return False, min(most, mean) if is_warm and norm == math.inf and not skipped else most
        if not is_warm:
            # A sum of squared deviations until the last of these steps, by Welford's algorithm.
            memory.count += 1
            memory.mean += (norm - mean) / memory.count
            memory.variance += (norm - mean) * (norm - memory.mean)
            if memory.count == self.warmup:
                memory.variance /= memory.count
            return False, most
        z, clip = (norm - mean) / (deviation + 1e-6), mean
        if self.option == "percentile":
            clip = mean + self.z * deviation
        is_outlier = norm > clip if self.option == "percentile" else z > self.z
        if is_outlier:
            if self.option == "adaptive":
                clip = (mean + self.z * deviation / (z / self.z)) * self.factor
            norm, most = clip, min(most, clip)
        memory.mean = self.decay * mean + (1 - self.decay) * norm
        memory.variance = self.decay * memory.variance + (1 - self.decay) * (
            (norm - memory.mean) * (norm - memory.mean)
        )
        return False, most


_OPTIONS = ("adaptive", "mean", "percentile")

EARLIER_KEYS = {"TimesMean": ("norm_mean", "norm_mean_count")}
"""Keys of a state_dict's first group in which earlier versions saved the memory of limits."""
