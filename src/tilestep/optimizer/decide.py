"""Deciding a step: what goes into it, from a scaler and from the optimizer's own limits, and what outlives it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..engine import Decision, DeviceEngine, are_built_ahead, build_ahead
from ..engine.control import MEAN, MEAN_COUNT, SKIPPED
from ..errors import GradientError

if TYPE_CHECKING:
    from ..placements import Agreement
    from .optimizer import Optimizer

__all__ = [
    "SkipPolicy",
    "TimesMean",
    "build_decision",
    "decide",
    "forget_scale",
    "needs_norm",
    "remember",
    "restore_mean",
    "save_mean",
]

_MEAN_KEYS = {"norm_mean": MEAN, "norm_mean_count": MEAN_COUNT}
"""Keys of the first group of a state_dict, and their places in the control numbers."""


@dataclass(frozen=True)
class TimesMean:
    """A limit for `skip_above`: a multiple of the running mean of the global gradient norm.

    The first norms count equally; then the mean is exponential. A norm above the limit enters the mean as the limit
    itself: one spike hardly moves it, and after a lasting rise of the norm it follows, so that skipping ends. Norms
    that are not finite do not enter.

    Args:
        factor: skip above this many times the mean; more than 1.
        decay: what a norm keeps of its weight from step to step; 0.99 averages over about 100 steps. In [0, 1).
        warmup: norms that must have entered before any step is skipped; at least 1.

    Raises:
        ValueError: for a value out of its range.

    Example:
        >>> TimesMean(3.0)
        TimesMean(factor=3.0, decay=0.99, warmup=100)
    """

    factor: float
    decay: float = 0.99
    warmup: int = 100

    def __post_init__(self) -> None:
        if not 1 < self.factor < math.inf:
            raise ValueError(f"Invalid factor: {self.factor}; a multiple of the mean norm is a number above 1")
        if not 0 <= self.decay < 1:
            raise ValueError(f"Invalid decay: {self.decay}; it must be at least 0 and below 1")
        if not self.warmup >= 1:
            raise ValueError(f"Invalid warmup: {self.warmup}; at least 1 norm must be known before it is compared with")


@dataclass(frozen=True)
class SkipPolicy:
    """Which steps an optimizer skips by itself.

    Args:
        nonfinite: those whose gradients are not finite.
        above: those whose norm is above this number, or this multiple of its mean; implies `nonfinite`.

    Raises:
        ValueError: for a number that is not positive.
    """

    nonfinite: bool = False
    above: float | TimesMean | None = None

    def __post_init__(self) -> None:
        if self.above is not None and not isinstance(self.above, TimesMean) and not self.above > 0:
            raise ValueError(f"Invalid skip_above: {self.above}; it must be a positive norm, or TimesMean(factor)")

    @property
    def needs_norm(self) -> bool:
        """Whether steps need the norm of their gradients."""
        return self.nonfinite or self.above is not None

    def decision(self) -> Decision:
        """What is the same at every step."""
        if isinstance(self.above, TimesMean):
            mean = self.above
            return Decision(
                skip_nonfinite=True,
                mean_factor=float(mean.factor),
                mean_decay=float(mean.decay),
                mean_warmup=float(mean.warmup),
            )
        above = math.inf if self.above is None else float(self.above)
        return Decision(skip_nonfinite=self.needs_norm, skip_above=above)


def decide(optimizer: Optimizer, engines: Sequence[DeviceEngine]) -> None:
    """Write the control numbers of every engine for this step; the norm pass is run if anything asks for it.

    Args:
        optimizer: its attributes `grad_scale` and `found_inf` are what a scaler has set.
        engines: its engines, prepared.

    Raises:
        GradientError: for gradients that carry a loss scale which nobody takes away; for a loss scale that is not
            positive and finite, where the host knows it.
    """
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if optimizer._gradients_scaled and scale is None and found_inf is None:
        raise GradientError(
            "the gradients still carry a loss scale: call scaler.step(optimizer) instead of optimizer.step(), "
            "or scaler.unscale_(optimizer) before it; nothing was updated"
        )
    if not engines:
        return
    agreement = optimizer.agreement
    scale, found_inf = _tensor(scale, engines[0].device), _tensor(found_inf, engines[0].device)
    if not are_built_ahead(engines, unscales=scale is not None):
        expected = replace(_limits(optimizer), grad_scale=scale, found_inf=found_inf)
        build_ahead(engines, expected, norm=needs_norm(optimizer), alone=agreement is None)
    decision = build_decision(optimizer, engines, alone=agreement is None)
    decision.grad_scale, decision.found_inf = scale, found_inf
    if agreement is not None:
        _agree(decision, agreement)
    for engine in engines:
        engine.follow(decision)
    deciders = {engine.decider: engine for engine in engines}
    for decider, engine in deciders.items():
        own = decision if len(deciders) == 1 else replace(decision)
        _bring(own, engine)
        decider.decide(own, captured=engine.captured)


def build_decision(optimizer: Optimizer, engines: Sequence[DeviceEngine], *, alone: bool = True) -> Decision:
    """What a step is decided from, but for what a scaler has set; the norm pass is run if anything asks for it.

    Args:
        optimizer: the optimizer.
        engines: its engines, prepared; at least one.
        alone: whether no other rank has to decide the same.
    """
    decision = _limits(optimizer)
    if needs_norm(optimizer):
        sources = list(dict.fromkeys(engine.norm_source for engine in engines))
        decision.partials = sources[0].norm_partials() if alone and len(sources) == 1 else None
        if decision.partials is None:
            decision.power_sum = _total(optimizer._home.power_sums(sources))
    return decision


def _limits(optimizer: Optimizer) -> Decision:
    """What the optimizer itself says of every step."""
    decision = optimizer._skip.decision()
    decision.check_overflow = optimizer._check_overflow
    return decision


def _agree(decision: Decision, agreement: Agreement) -> None:
    """Let all ranks know what each has found: the norm of all gradients, and whether one of them overflowed."""
    known = [number for number in (decision.power_sum, decision.found_inf) if number is not None]
    if not known:
        return
    device = known[0].device
    if len(known) == 1 and known[0].dtype is torch.float64 and known[0] is decision.power_sum:
        # Whoever computes it does so anew at every step, for the decision alone.
        decision.power_sum = known[0] if known[0].dim() == 1 else known[0].reshape(1)
        agreement.add(decision.power_sum)
        return
    together = torch.cat([_moved(number, device).to(torch.float64).reshape(1) for number in known])
    agreement.add(together)
    if decision.power_sum is not None:
        decision.power_sum = together[:1]
    if decision.found_inf is not None:
        decision.found_inf = together[-1].to(decision.found_inf.dtype)


def needs_norm(optimizer: Optimizer) -> bool:
    """Whether a step asks for the norm of its gradients: for a clip, for a skip, or for a scaler's overflow check."""
    clips = any(group.get("max_grad_norm") is not None for group in optimizer.param_groups)
    return clips or optimizer._check_overflow or optimizer._skip.needs_norm


def _tensor(value: Any, device: torch.device) -> torch.Tensor | None:
    """A scaler's number as a tensor; torch's scaler gives a plain 0 where no gradient was checked."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    return torch.full((), float(value), device=device)


def _total(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum over devices, on one that is not the CPU if there is one."""
    if len(sums) == 1:
        return sums[0]
    home = next((part.device for part in sums if part.device.type != "cpu"), sums[0].device)
    total = _moved(sums[0], home)
    for part in sums[1:]:
        total = total + _moved(part, home)
    return total


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # A copy to the CPU that is not waited for may be read before it has arrived.
    return tensor.to(device, non_blocking=device.type != "cpu")


def _bring(decision: Decision, engine: DeviceEngine) -> None:
    """Let a decision be made on an engine's device."""
    for name in ("power_sum", "grad_scale", "found_inf"):
        number = getattr(decision, name)
        if number is not None and number.device != engine.device:
            setattr(decision, name, _moved(number, engine.device))
    decision.overflow = engine.overflow if decision.check_overflow else None


def forget_scale(optimizer: Optimizer) -> None:
    """Take away what a scaler set for a step that failed; the next one would multiply by it again."""
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)


def remember(known: torch.Tensor | None, engines: Sequence[DeviceEngine]) -> torch.Tensor | None:
    """Carry skipped steps and mean norm over to engines built anew.

    Args:
        known: control numbers of an engine before, or None.
        engines: the new ones.

    Returns:
        The control numbers to carry over next time.
    """
    if known is not None:
        for engine in engines:
            engine.control[SKIPPED:].copy_(known[SKIPPED:])
    return engines[0].control if engines else known


def save_mean(control: torch.Tensor | None, policy: SkipPolicy, state_dict: dict[str, Any]) -> None:
    """Put the running mean of the norm into the first group of a state_dict, unread.

    Args:
        control: an engine's control numbers.
        policy: only `TimesMean` has a mean worth keeping.
        state_dict: what to add to.
    """
    if control is None or not isinstance(policy.above, TimesMean):
        return
    first = dict(state_dict["param_groups"][0])
    first.update({key: control[place].clone() for key, place in _MEAN_KEYS.items()})
    state_dict["param_groups"] = [first, *state_dict["param_groups"][1:]]


def restore_mean(engines: Sequence[DeviceEngine], groups: Sequence[dict[str, Any]], saved: Mapping[str, Any]) -> None:
    """Take the running mean of the norm out of a loaded state_dict.

    Args:
        engines: the optimizer's engines.
        groups: its param groups, which have taken every key of the state_dict's.
        saved: the state_dict's first group.
    """
    for group in groups:
        for key in _MEAN_KEYS:
            group.pop(key, None)
    for key, place in _MEAN_KEYS.items():
        for engine in engines:
            value = saved.get(key, 0.0)
            if isinstance(value, torch.Tensor):
                engine.control[place].copy_(value)
            else:
                engine.control[place].fill_(value)
