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
from ..storage import MASTER_FORMATS, Storage, is_coarse, kept_in_blocks, shape_of_entries, stored_in, values_of

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
            name: _numbers(param, state, name).detach().clone()
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


def _numbers(param: torch.Tensor, state: Mapping[str, Any], name: str) -> torch.Tensor:
    """A state's values, whatever it is kept in."""
    blocks = kept_in_blocks(state, name)
    return state[name] if blocks is None else values_of(blocks, state, name, shape=param.shape)


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
    found = {"param": exact, **{name: _numbers(param, state, name) for name in rule.state_names if name in state}}
    precision = max(torch.finfo(exact.dtype).eps, _master_eps(param, state))
    old = {"param": before.param, **before.states}
    for name, value in found.items():
        if name not in wanted:
            raise CheckFailure(f"{name} of {label} is kept, but the rule returns None for it", name)
        shaped = wanted[name].to(value.device).expand(value.shape)
        blocks = None if name == "param" else kept_in_blocks(state, name)
        if blocks is not None:
            _close_in_blocks(name, label, blocks, value, shaped, before.step)
            continue
        spread = (rough[name].to(value.device).expand(value.shape) - shaped).abs()
        if coarse and spread.numel():
            spread = spread.amax().expand(value.shape)
        previous = old[name].to(value.device).double()
        kept = precision if name == "param" else torch.finfo(value.dtype).eps
        _close(name, label, value.detach(), shaped, previous, spread, kept, compute, before.step)
    has_master = not MASTER_KEYS.isdisjoint(state)
    if has_master and not torch.equal(param.detach(), exact.to(param.device, param.dtype)):
        raise CheckFailure(f"{label} is not its float32 master rounded to {param.dtype}", "param")


def _master_eps(param: torch.Tensor, state: Mapping[str, Any]) -> float:
    """The relative precision of a parameter with a master of fewer bits than float32 has; 0 for others."""
    kinds = [kind for kind in MASTER_FORMATS.values() if kind.key in state and is_coarse(kind.storage(param.dtype))]
    return 2.0**-16 if kinds else 0.0


def _close_in_blocks(
    name: str, label: str, blocks: Storage, found: torch.Tensor, wanted: torch.Tensor, step: float
) -> None:
    """Raise if a state in blocks is much further from the formula than the format is from it."""
    shapes = {array.name: shape_of_entries(found.shape, array.elements) for array in blocks.arrays(name)}
    kept = {
        array.name: torch.empty(shapes[array.name], dtype=array.dtype, device=found.device)
        for array in blocks.arrays(name)
    }
    stored_in(blocks, kept, name, wanted.float(), shape=found.shape)
    rounded = values_of(blocks, kept, name, shape=found.shape).double()
    own, off = float((rounded - wanted).square().sum()), float((found.double() - wanted).square().sum())
    if not off <= 2 * own + 1e-12 * float(wanted.square().sum()):
        raise CheckFailure(
            f"{name} of {label}, kept as {blocks}, is off by {off:.3g} at step {step:g} (a sum of squares), where the "
            f"format alone is by {own:.3g}",
            name,
        )


def _close(
    name: str,
    label: str,
    found: torch.Tensor,
    wanted: torch.Tensor,
    old: torch.Tensor,
    spread: torch.Tensor,
    eps: float,
    compute: torch.dtype,
    step: float,
) -> None:
    kept, found = torch.finfo(found.dtype), found.double()
    scale = wanted.abs() + old.abs() + (wanted - old).abs()
    computed = 64 * torch.finfo(compute).eps * scale
    allowed = eps * wanted.abs() + kept.smallest_normal * kept.eps + computed + 8 * spread
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
