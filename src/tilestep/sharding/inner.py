"""The optimizer of one rank's pieces: an ordinary one, whose placement agrees with other ranks on sums."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
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
from ..storage import BLOCK, rows_of
from .buckets import Division, memory_order
from .groups import Deciders, Ranks
from .layout import ALIGNMENT

ANCHOR = "anchor"
"""Key of a param group that only exists so that a rank without pieces takes part in decisions."""


@rule
def unchanged(param: Any, grad: Any) -> tuple[Any, ...]:
    """Leaves parameters as they are: what a rank does that has no piece of any."""
    return (param,)


class PieceSchedule(Schedule):
    """When this rank's pieces are updated: when the optimizer that is sharded says so; all states begin together."""

    begins_together = True
    times_made = 0
    """How often tables, and with them states, were made."""

    def making_tables(self) -> AbstractContextManager[None]:
        """A block in which tables are made anew."""
        self.times_made += 1
        return super().making_tables()


def divisions_of(optimizer: Optimizer) -> dict[torch.Tensor, Division]:
    """For each parameter whether one rank must have all of it, and where else it may be cut.

    Whole are those whose rule works on more than single elements and reductions over all of them. Products of matrices
    cost as many operations for an element as the shorter side is long, as those of Muon do; what is done by rows and
    columns costs the same for every element.
    """
    found: dict[torch.Tensor, Division] = {}
    for label, _, group, param in labelled(optimizer):
        spec = spec_of(optimizer.rule_of(group), group, param, label=label)
        program, graph = spec.program, spec.program.graph
        if not (graph.slice_states or program.slices.views or program.library.scratch):
            found[param] = _in_blocks(param) if spec.has_blocks else Division()
            continue
        if program.across:
            raise RuleError(
                f"{label}: rule {graph.title} needs whole tensors, which would be spread over the ranks, and reduces "
                "over all of them; that is not supported by shard()"
            )
        is_product = program.library.scratch and param.dim() > 1
        found[param] = Division(cost=param.numel() * (min(param.shape[-2:]) if is_product else 1))
    return found


def _in_blocks(param: torch.Tensor) -> Division:
    """Where a parameter with states in blocks may be cut: between blocks, or between rows that end inside of one.

    Pieces begin at aligned addresses, so it is every sixteenth row where a row is odd. What has less than two such
    parts is not cut, and neither is what lies in memory with another dimension outside than the first.
    """
    lead, columns = rows_of(param.shape)
    order = memory_order(param)
    unit, by_rows = columns, columns % BLOCK != 0 and math.prod(lead) > 1
    if order != tuple(range(param.dim())):
        unit, by_rows = param.numel() // max(param.shape[0], 1), True
    elif not by_rows:
        unit = BLOCK
    unit = math.lcm(unit, ALIGNMENT)
    cut = param.numel() >= 2 * unit > 0 and (order[0] == 0 or not by_rows)
    return Division(None, unit, by_rows) if cut else Division(cost=param.numel())


def make_inner(
    outer: Optimizer,
    groups: Sequence[Iterable[Any]],
    ranks: Ranks,
    deciders: Deciders,
    origins: Mapping[Any, Origin],
    schedule: PieceSchedule,
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
        placement=Pieces(weakref.ref(outer), ranks, deciders, origins, has_own_names=not is_named(outer)),
        schedule=schedule,
        taps=outer.taps,
        max_grad_norm=outer.defaults.get("max_grad_norm"),
        master_weights=outer.defaults.get("master_weights", False),
        skip_nonfinite=outer.control.policy.nonfinite,
        skip_above=outer.control.policy.above,
        track_grad_norm=outer.control.policy.tracks_norm,
        **given,
    )
    made.control.joint = outer.control.joint
    made.control.history, made.workspace_limit = outer.control.history, outer.workspace_limit
    return made


def is_named(optimizer: Optimizer) -> bool:
    """Whether the user has named the parameters; torch has names in all groups or in none."""
    return any(group.get("param_names") for group in optimizer.param_groups)


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
