"""Deciding a step: what goes into it, from a scaler and from the optimizer's own limits, and what outlives it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..combinations import FSDP1, refusal, split_kind
from ..engine import Decision, DeviceEngine, are_built_ahead, build_ahead
from ..engine.control import CONTROL_SIZE, MEAN, MEAN_COUNT, NORM, SKIPPED
from ..engine.limits import Sigma, StepLimit, ZClip
from ..errors import GradientError
from ..placements.local import local_part
from .parameters import labelled
from .specs import spec_of

if TYPE_CHECKING:
    from ..engine.decider import JointNorm
    from ..placements import Agreement
    from .protocol import Optimizer

__all__ = [
    "SkipPolicy",
    "TimesMean",
    "build_decision",
    "decide",
    "flat_part",
    "forget_scale",
    "needs_norm",
    "remember",
    "restore_mean",
    "save_mean",
]

LIMITS_KEY = "limits"
"""Key of the first group of a state_dict for what adaptive limits remember."""

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
        above: those whose norm is above this number, or this multiple of its mean, or so many standard deviations above
            the mean of the last ones; implies `nonfinite`.
        tracks_norm: whether steps find the norm out even if nothing needs it.

    Raises:
        ValueError: for a number that is not positive.
    """

    nonfinite: bool = False
    above: float | TimesMean | Sigma | None = None
    tracks_norm: bool = False

    def __post_init__(self) -> None:
        above = self.above
        if above is None or isinstance(above, (TimesMean, Sigma)):
            return
        if isinstance(above, StepLimit) or not above > 0:
            raise ValueError(
                f"Invalid skip_above: {above}; it must be a positive norm, TimesMean(factor) or Sigma(factor)"
            )

    @property
    def needs_norm(self) -> bool:
        """Whether steps need the norm of their gradients."""
        return self.nonfinite or self.above is not None or self.tracks_norm

    @property
    def skips(self) -> bool:
        """Whether steps may be skipped."""
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
        if isinstance(self.above, Sigma):
            return Decision(skip_nonfinite=True, limits=(self.above,))
        above = math.inf if self.above is None else float(self.above)
        return Decision(skip_nonfinite=self.skips, skip_above=above)


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
    optimizer._history.has_norm = decision.has_norm
    if decision.limits:
        decision.loss, optimizer._history.loss = optimizer._history.loss, None
        if decision.loss is not None:
            decision.loss = _moved(decision.loss, engines[0].device)
    if optimizer._joint is not None:
        scaled = scale is not None or found_inf is not None or decision.check_overflow
        decision.skip_nonfinite |= scaled or optimizer._joint.skips
    if agreement is not None:
        _agree(decision, agreement, has_whole_norm=optimizer._joint is not None)
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
    if not needs_norm(optimizer):
        return decision
    if optimizer._flat_part:
        raise GradientError(f"{optimizer._flat_part} {refusal('a norm of the gradients', [FSDP1])}")
    if optimizer._joint is not None:
        decision.power_sum = optimizer._joint.power_sum(optimizer)
        return decision
    sources = _norm_sources(engines)
    decision.partials = sources[0].norm_partials() if alone and len(sources) == 1 else None
    if decision.partials is None:
        decision.power_sum = _total(optimizer._home.power_sums(sources))
    return decision


def _norm_sources(engines: Sequence[DeviceEngine]) -> list[DeviceEngine | JointNorm]:
    return list(dict.fromkeys(engine.norm_source for engine in engines))


def total_power_sum(optimizer: Optimizer, engines: Sequence[DeviceEngine]) -> torch.Tensor | None:
    """The sum of squares of an optimizer's gradients on all its devices and ranks, float64[1]; None without engines."""
    if not engines:
        return None
    total = _total(optimizer._home.power_sums(_norm_sources(engines))).reshape(1)
    if optimizer.agreement is not None:
        total = total.clone()
        optimizer.agreement.add(total)
    return total


def flat_part(optimizer: Optimizer) -> str:
    """What messages call the first parameter that is a piece of one of FSDP1's flat parameters; empty without any.

    Raises:
        GradientError: for such a parameter with a rule that reduces over it.
    """
    first = ""
    for label, _, group, param in labelled(optimizer):
        if not split_kind(param):
            continue
        first = first or label
        program = spec_of(optimizer.rule_of(group), group, param).program
        reduces = program.across or any(tile and (tile.reductions or tile.parts) for tile in program.tiles)
        if reduces or program.library.scratch or program.slices.views or program.graph.slice_states:
            raise GradientError(f"{label} {refusal('a reduction', [FSDP1])}")
    return first


def _limits(optimizer: Optimizer) -> Decision:
    """What the optimizer itself says of every step."""
    decision = optimizer._skip.decision()
    decision.check_overflow = optimizer._check_overflow
    decision.limits += adaptive_clips(optimizer.param_groups)
    decision.memory = optimizer._history
    return decision


def take_loss(optimizer: Optimizer, loss: Any) -> None:
    """Let the next decision know the loss of its step.

    Raises:
        TypeError: for something that is no number.
    """
    if not any(isinstance(limit, Sigma) for limit in optimizer._skip.decision().limits):
        return
    if isinstance(loss, torch.Tensor):
        if loss.numel() != 1:
            raise TypeError(f"Invalid loss: a tensor of shape {tuple(loss.shape)}; it must have one element")
        optimizer._history.loss = local_part(loss.detach()).to(torch.float64).reshape(1)
    elif isinstance(loss, (int, float)):
        optimizer._history.loss = torch.tensor([float(loss)], dtype=torch.float64, device="cpu")
    else:
        raise TypeError(f"Invalid loss: {loss!r}; it must be a number or a tensor of one element")


def require_no_loss(optimizer: Optimizer) -> None:
    """Raise if a loss was given for a step that had been decided before."""
    loss, optimizer._history.loss = optimizer._history.loss, None
    if loss is not None and optimizer.param_groups and optimizer._current():
        raise RuntimeError(
            "step(loss=...): the step was decided before it was called, in backward or without gradients, so its loss "
            "was not compared by skip_above=Sigma(...); leave the loss out, or let the step decide"
        )


def adaptive_clips(groups: Sequence[Mapping[str, Any]]) -> tuple[ZClip, ...]:
    """The adaptive clip of param groups, at most one.

    Raises:
        ValueError: for groups with different ones: there is one global norm.
    """
    clips = tuple(dict.fromkeys(g["max_grad_norm"] for g in groups if isinstance(g.get("max_grad_norm"), ZClip)))
    if len(clips) > 1:
        raise ValueError(
            f"Invalid max_grad_norm: {clips[0]} in one param group and {clips[1]} in another; all groups are clipped "
            "by one global norm, so give them the same limit, or None"
        )
    return clips


def _agree(decision: Decision, agreement: Agreement, *, has_whole_norm: bool) -> None:
    """Let all ranks know what each has found: the norm of all gradients, and whether one of them overflowed.

    Args:
        decision: of this rank; it becomes that of all.
        agreement: the ranks.
        has_whole_norm: whether its sum of squares is that of all ranks already.
    """
    if has_whole_norm:
        whole, decision.power_sum = decision.power_sum, None
        _agree(decision, agreement, has_whole_norm=False)
        decision.power_sum = whole
        return
    known = [number for number in (decision.power_sum, decision.loss, decision.found_inf) if number is not None]
    if not known:
        return
    device = known[0].device
    if len(known) == 1 and known[0].dtype is torch.float64 and known[0] is decision.power_sum:
        # Whoever computes it does so anew at every step, for the decision alone.
        decision.power_sum = known[0] if known[0].dim() == 1 else known[0].reshape(1)
        agreement.add(decision.power_sum)
        return
    if decision.loss is not None:
        # The ranks' losses are averaged.
        known.append(torch.ones_like(decision.loss))
    together = torch.cat([_moved(number, device).to(torch.float64).reshape(1) for number in known])
    agreement.add(together)
    if decision.loss is not None:
        *together, ranks = together.split(1)
        together = torch.cat(together)
        decision.loss = together[int(decision.power_sum is not None) :][:1] / ranks
    if decision.power_sum is not None:
        decision.power_sum = together[:1]
    if decision.found_inf is not None:
        decision.found_inf = together[-1].to(decision.found_inf.dtype)


def needs_norm(optimizer: Optimizer) -> bool:
    """Whether a step asks for the norm of its gradients: for a clip, for a skip, or for a scaler's overflow check."""
    clips = any(group.get("max_grad_norm") is not None for group in optimizer.param_groups)
    return clips or optimizer._joint is not None or optimizer._check_overflow or optimizer._skip.needs_norm


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
    for name in ("power_sum", "grad_scale", "found_inf", "loss"):
        number = getattr(decision, name)
        if number is not None and number.device != engine.device:
            setattr(decision, name, _moved(number, engine.device))
    decision.overflow = engine.overflow if decision.check_overflow else None


def forget_scale(optimizer: Optimizer) -> None:
    """Take away what a scaler set for a step that failed; the next one would multiply by it again."""
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)


def remember(known: torch.Tensor | None, engines: Sequence[DeviceEngine]) -> torch.Tensor | None:
    """Carry the norm, skipped steps and mean norm over to engines built anew.

    Args:
        known: control numbers of an engine before, or None.
        engines: the new ones.

    Returns:
        The control numbers to carry over next time.
    """
    if known is not None:
        for engine in engines:
            engine.control[SKIPPED:].copy_(known[SKIPPED:])
            engine.control[NORM].copy_(known[NORM])
    return engines[0].control if engines else known


def limits_of(optimizer: Optimizer) -> tuple[StepLimit, ...]:
    """An optimizer's limits that remember something."""
    return optimizer._skip.decision().limits + adaptive_clips(optimizer.param_groups)


def save_limits(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Put what adaptive limits remember into the first group of a state_dict, unread, and name them by plain values."""
    saved = optimizer._history.save(limits_of(optimizer))
    for place, group in enumerate(state_dict["param_groups"]):
        own: dict[str, Any] = {LIMITS_KEY: saved} if saved and place == 0 else {}
        clip = group.get("max_grad_norm")
        if isinstance(clip, ZClip):
            own["max_grad_norm"] = {"ZClip": asdict(clip)}
        if own:
            state_dict["param_groups"][place] = {**group, **own}


def with_limits(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state_dict with the limits that `save_limits` has named by plain values."""
    groups = [
        {**group, "max_grad_norm": ZClip(**group["max_grad_norm"]["ZClip"])}
        if isinstance(group.get("max_grad_norm"), dict)
        else group
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def restore_limits(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Take what adaptive limits remember out of a loaded state_dict, whose first group is given."""
    for group in optimizer.param_groups:
        group.pop(LIMITS_KEY, None)
    optimizer._history.load(limits_of(optimizer), saved.get(LIMITS_KEY, {}))


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


def restore_mean(
    control: torch.Tensor | None,
    policy: SkipPolicy,
    groups: Sequence[dict[str, Any]],
    saved: Sequence[Mapping[str, Any]],
) -> torch.Tensor | None:
    """Take the running mean of the norm out of a loaded state_dict.

    Args:
        control: the control numbers that were known so far.
        policy: only `TimesMean` has a mean.
        groups: the optimizer's param groups, which have taken every key of the state_dict's.
        saved: the state_dict's groups.

    Returns:
        The control numbers that the next engines carry on with.
    """
    for group in groups:
        for key in _MEAN_KEYS:
            group.pop(key, None)
    if not isinstance(policy.above, TimesMean):
        return control
    first = saved[0] if saved else {}
    known = torch.zeros(CONTROL_SIZE, dtype=torch.float64, device="cpu") if control is None else control.clone()
    for key, place in _MEAN_KEYS.items():
        known[place] = first.get(key, 0.0)
    return known
