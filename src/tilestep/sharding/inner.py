"""The optimizer of one rank's pieces: an ordinary one, whose placement agrees with other ranks on sums."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import RuleError
from ..optimizer import Optimizer
from ..optimizer.hyperparameters import GROUP_OPTIONS
from ..optimizer.parameters import labelled
from ..optimizer.schedules import Schedule
from ..optimizer.specs import spec_of
from ..placements import Origin, Pieces
from ..rules import rule
from .groups import Deciders, Ranks

ANCHOR = "anchor"
"""Key of a param group that only exists so that a rank without pieces takes part in decisions."""


@rule
def unchanged(param: Any, grad: Any) -> tuple[Any, ...]:
    """Leaves parameters as they are: what a rank does that has no piece of any."""
    return (param,)


class PieceSchedule(Schedule):
    """When this rank's pieces are updated: when the optimizer that is sharded says so; all states begin together."""

    begins_together = True


def costs_of_wholes(optimizer: Optimizer) -> dict[torch.Tensor, int | None]:
    """For each parameter whose rule works on more than single elements and reductions over all of them what it costs.

    States in blocks are such work too: blocks follow the rows of the whole tensor.

    Products of matrices cost as many operations for an element as the shorter side is long, as those of Muon do;
    what is done by rows and columns costs the same for every element.
    """
    found: dict[torch.Tensor, int | None] = {}
    for label, _, group, param in labelled(optimizer):
        spec = spec_of(optimizer.rule_of(group), group, param, label=label)
        program, graph = spec.program, spec.program.graph
        if not (graph.slice_states or program.slices.views or program.library.scratch or spec.has_blocks):
            found[param] = None
            continue
        if program.across:
            raise RuleError(
                f"{label}: rule {graph.title} needs whole tensors, which would be spread over the ranks, and reduces "
                "over all of them; that is not supported by shard()"
            )
        found[param] = param.numel() * (min(param.shape[-2:]) if program.library.scratch and param.dim() > 1 else 1)
    return found


def make_inner(
    outer: Optimizer,
    groups: Sequence[Iterable[Any]],
    ranks: Ranks,
    deciders: Deciders,
    origins: Mapping[Any, Origin],
) -> Optimizer:
    """An optimizer with the rules and hyperparameters of another one."""
    params = [_mirrored(group, outer.rule_of(group), named) for group, named in zip(outer.param_groups, groups)]
    if not any(piece.requires_grad for group in params for _, piece in group["params"]):
        device = next(param.device for group in outer.param_groups for param in group["params"])
        nothing = torch.zeros(0, device=device, requires_grad=True)
        nothing.grad = torch.zeros(0, device=device)
        params.append({"params": [(ANCHOR, nothing)], "rule": unchanged, ANCHOR: True, "master_weights": False})
    rule = outer.rule_of({})
    given = {key: outer.defaults[key] for key in rule.hyperparameters}
    made = Optimizer.composed(
        params,
        rule,
        placement=Pieces(weakref.ref(outer), ranks, deciders, origins),
        schedule=PieceSchedule(),
        taps=outer.taps,
        max_grad_norm=outer.defaults.get("max_grad_norm"),
        master_weights=outer.defaults.get("master_weights", False),
        skip_nonfinite=outer.control.policy.nonfinite,
        skip_above=outer.control.policy.above,
        track_grad_norm=outer.control.policy.tracks_norm,
        **given,
    )
    made.control.history, made.workspace_limit = outer.control.history, outer.workspace_limit
    return made


def add_pieces(
    inner: Optimizer, group: Mapping[str, Any], rule: Any, named: Iterable[Any], origins: Mapping[Any, Origin]
) -> None:
    """Take in what this rank has of a further param group."""
    placement = inner.placement
    assert isinstance(placement, Pieces)
    placement.add(origins)
    inner.add_param_group(_mirrored(group, rule, named))
    if ANCHOR in inner.param_groups[-2]:
        inner.param_groups.insert(-1, inner.param_groups.pop())


def _mirrored(group: Mapping[str, Any], rule: Any, named: Iterable[Any]) -> dict[str, Any]:
    """A param group of pieces like one of whole parameters."""
    own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    listed = list(named)
    # torch wants names in every group or in none, and finds none in an empty one.
    names: dict[str, Any] = {} if listed else {"param_names": []}
    return {**own, **names, "rule": rule, "params": listed}


def mirror(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Give param groups the hyperparameters of others."""
    for theirs, own in zip(source, target):
        for key in GROUP_OPTIONS:
            if key not in theirs:
                own.pop(key, None)
        for key, value in theirs.items():
            if key not in ("params", "param_names", "rule"):
                own[key] = value
