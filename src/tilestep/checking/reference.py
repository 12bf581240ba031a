"""One step of a rule by its own formula in float64, and how far a kernel may be from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..optimizer.masters import MASTER_KEYS, exact_values, master_kind
from ..optimizer.states import TRAINING, shape_of
from ..rules import Rule
from ..rules.protocol import at_step
from ..rules.scalars import precision_of

_STRAY = 2000
"""One element in so many may be further off: where a rule has a jump, rounding decides on which side it falls."""


class CheckFailure(Exception):
    """Something is not as it should be; the text says what, in plain words."""

    def __init__(self, text: str, buffer: str = "") -> None:
        super().__init__(text)
        self.buffer = buffer


@dataclass
class Snapshot:
    """A parameter, its gradient and its state before a step, as copies."""

    param: torch.Tensor  # what the step starts from: the master where there is one
    grad: torch.Tensor  # its gradient
    states: dict[str, torch.Tensor]  # its state buffers by name
    step: float  # the count that the step will have

    @classmethod
    def of(cls, param: torch.Tensor, state: Mapping[str, Any]) -> Snapshot:
        """A snapshot of a parameter that has a gradient."""
        assert param.grad is not None
        buffers = {
            name: value.detach().clone()
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and name not in ("step", *MASTER_KEYS, TRAINING)
        }
        return cls(exact_values(param, state), param.grad.detach().clone(), buffers, float(state["step"]) + 1)

    @classmethod
    def first(cls, param: torch.Tensor, rule: Rule, group: Mapping[str, Any]) -> Snapshot:
        """A snapshot before the first step, when there is no state yet: as the rule declares that it begins."""
        assert param.grad is not None
        wide = torch.float64 if param.dtype is torch.float64 else torch.float32
        buffers = {}
        for name, start in rule.states.items():
            if start.shape not in ("param", "scalar") and param.dim() < 2:
                continue
            shape = () if start.shape == "scalar" else shape_of(start, param, param.shape)
            buffer = param.detach().new_empty(shape, dtype=start.dtype or wide)
            if start.init == "param":
                buffers[name] = buffer.copy_(param.detach())
            else:
                value = group[start.init] if isinstance(start.init, str) else start.init
                buffers[name] = buffer.fill_(float(at_step(value, 1.0)))
        exact = exact_values(param, {}) if master_kind(param.dtype, group) is None else param.detach().float()
        return cls(exact, param.grad.detach().clone(), buffers, 1.0)


def expected(
    rule: Rule, before: Snapshot, hyperparameters: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The new parameter and states by the rule's own code, in float64."""
    buffers: list[torch.Tensor | None] = [before.param.to(dtype), before.grad.to(dtype)]
    for name in rule.state_names:
        known = before.states.get(name)
        wide = torch.float64 if rule.states[name].shape == "scalar" else dtype
        buffers.append(None if known is None else known.to(wide, copy=True))
    kept = precision_of.set(lambda _: torch.finfo(before.param.dtype).eps)
    try:
        copies = [None if each is None else each.clone() for each in buffers]
        results = rule(*copies, **hyperparameters, step=before.step)
    finally:
        precision_of.reset(kept)
    named = dict(zip(("param", *rule.state_names), results))
    return {name: value.double() for name, value in named.items() if value is not None}


def compare(
    rule: Rule,
    label: str,
    param: torch.Tensor,
    state: Mapping[str, Any],
    before: Snapshot,
    hyperparameters: Mapping[str, Any],
    coarse: bool = False,
) -> None:
    """Raise if a parameter or its state after a step is not what the formula gives.

    Each value may be off by rounding to the type it is stored in, and by a few roundings of the type that is computed
    in, or a few times what the rule's own code is off in that type.
    """
    if not param.numel():
        return  # formulas with extrema are not defined there
    compute = torch.float64 if param.dtype is torch.float64 else torch.float32
    wanted = expected(rule, before, hyperparameters, torch.float64)
    rough = expected(rule, before, hyperparameters, compute)
    exact = exact_values(param, state)
    found = {"param": exact, **{name: state[name] for name in rule.state_names if name in state}}
    old = {"param": before.param, **before.states}
    for name, value in found.items():
        if name not in wanted:
            raise CheckFailure(f"{name} of {label} is kept, but the rule returns None for it", name)
        shaped = wanted[name].to(value.device).expand(value.shape)
        spread = (rough[name].to(value.device).expand(value.shape) - shaped).abs()
        if coarse and spread.numel():
            spread = spread.amax().expand(value.shape)
        previous = old[name].to(value.device).double()
        _close(name, label, value.detach().double(), shaped, previous, spread, value.dtype, compute, before.step)
    has_master = not MASTER_KEYS.isdisjoint(state)
    if has_master and not torch.equal(param.detach(), exact.to(param.device, param.dtype)):
        raise CheckFailure(f"{label} is not its float32 master rounded to {param.dtype}", "param")


def _close(
    name: str,
    label: str,
    found: torch.Tensor,
    wanted: torch.Tensor,
    old: torch.Tensor,
    spread: torch.Tensor,
    stored: torch.dtype,
    compute: torch.dtype,
    step: float,
) -> None:
    kept, computed = torch.finfo(stored), torch.finfo(compute)
    scale = wanted.abs() + old.abs() + (wanted - old).abs()
    allowed = kept.eps * wanted.abs() + kept.smallest_normal * kept.eps + 64 * computed.eps * scale + 8 * spread
    strays = ~((found - wanted).abs() <= allowed) & ~(found == wanted) & ~(found.isnan() & wanted.isnan())
    count = int(strays.sum())
    if count <= found.numel() // _STRAY:
        return
    place = int(strays.flatten().nonzero()[0])
    what = f"{'the parameter' if name == 'param' else name} of {label}"
    raise CheckFailure(
        f"{what} is {found.flatten()[place].item():.9g} at step {step:g}, where the formula gives "
        f"{wanted.flatten()[place].item():.9g} (element {place}; {count} of {found.numel()} are off)",
        name,
    )
