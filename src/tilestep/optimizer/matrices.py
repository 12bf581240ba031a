"""The matrices that parameters hold, by the options of their groups, and the rules' graphs for them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import GradientError, MatrixError
from ..graph import Graph, combines, is_matrix_work, stacked
from ..graph.partition import MatrixProgram
from ..linalg.views import Matrices, find_matrices, leading_dims
from ..placement import Share, is_distributed, is_whole
from ..placement.local import sharded_dims
from ..rules import Rule
from ..rules.protocol import MATRIX_OPTIONS
from ..runtime import graph_for
from ..runtime.batches import work_of
from ..storage import Storage, codec_of
from .parameters import Optimizer, check_expression, name_in, shortened


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


_OPTION_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "flatten": ("True or False", bool.__instancecheck__),
    "heads": ("a number of blocks of rows", _is_size),
    "splits": (
        "sizes of blocks of rows",
        lambda value: isinstance(value, (tuple, list)) and len(value) > 0 and all(map(_is_size, value)),
    ),
}


def check_matrix_options(group: Mapping[str, Any]) -> None:
    """Raise for invalid values of `flatten`, `heads` and `splits`."""
    for key, (what, fits) in _OPTION_KINDS.items():
        value = group.get(key)
        by_pattern = value if isinstance(value, Mapping) else {"": value}
        for pattern, one in by_pattern.items():
            if one is not None and not fits(one):
                raise ValueError(
                    f"Invalid {key}: {one!r}; it must be {what}, or a mapping from patterns to such values"
                )
            if not isinstance(pattern, str):  # checkpoints store the patterns
                raise ValueError(f"Invalid {key}: pattern {pattern!r} must be a string")
            check_expression(key, pattern)


def matrix_options(group: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return a group's matrix options for a parameter; the first pattern that matches the label's name wins."""
    options: dict[str, Any] = {}
    for key in MATRIX_OPTIONS:
        value = group.get(key)
        if isinstance(value, Mapping):
            name = name_in(label)
            value = next((own for pattern, own in value.items() if name and re.search(pattern, name)), None)
        if value:
            options[key] = tuple(value) if isinstance(value, list) else value
    return options


def check_patterns(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise for a pattern of `flatten`, `heads` or `splits` that matches no parameter of its groups."""
    for key in MATRIX_OPTIONS:
        names: dict[str, tuple[Mapping[Any, Any], list[str]]] = {}
        for group in groups:
            if isinstance(value := group.get(key), Mapping):
                names.setdefault(repr(value), (value, []))[1].extend(group.get("param_names", ()))
        for value, listed in names.values():
            if not listed:
                raise ValueError(f"{key}: patterns need names of parameters: pass model.named_parameters()")
            for pattern in value:
                if not any(re.search(pattern, name) for name in listed):
                    raise ValueError(
                        f"{key}: pattern {pattern!r} matches no parameter; their names are {shortened(listed)}"
                    )


class RuleView(NamedTuple):
    """A parameter, or some of its rows, as a rule sees it, with the graph for it."""

    graph: Graph
    matrices: Matrices | None = None  # the matrices that the rule sees; None: the rule sees the parameter itself


def rule_views(
    rule: Rule, group: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype = torch.float32, label: str = ""
) -> list[RuleView]:
    """Return the parts in which a rule sees a parameter: the whole, or the matrices in it for a rule of matrices."""
    hyperparameters = {key: group[key] for key in rule.hyperparameters}
    options = matrix_options(group, label)
    if len(shape) < 3:
        options.pop("flatten", None)
    if not options:
        try:
            return [RuleView(graph_for(rule, hyperparameters, len(shape), shape, dtype))]
        except MatrixError:
            if len(shape) < 3:
                raise
    if len(shape) < 2:
        raise MatrixError(f"{rule.name} works on matrices, and the parameter has {len(shape)} dimensions")
    try:
        found = find_matrices(shape, **options)
    except ValueError as error:
        raise GradientError(str(error)) from None
    return [RuleView(_graph_of_matrices(rule, hyperparameters, one, shape, dtype, options), one) for one in found]


def _graph_of_matrices(
    rule: Rule,
    hyperparameters: Mapping[str, Any],
    matrices: Matrices,
    shape: torch.Size,
    dtype: torch.dtype,
    options: Mapping[str, Any],
) -> Graph:
    """Return a rule's graph for matrices inside a parameter of this shape."""
    graph = graph_for(rule, hyperparameters, 2, (matrices.rows, matrices.columns), dtype)
    if not any(map(is_matrix_work, graph.values())):
        raise GradientError(f"{rule.name} does not work on matrices: leave {' and '.join(options)} out of its group")
    if not combines(graph):
        return graph
    # Per-row states stay contiguous, also for a block of rows, unless the block is split into several groups.
    cut = matrices.cut
    in_place = "flatten" not in options and (cut is None or (cut.groups == 1 and len(shape) == 2))
    rows = {name for name, over in graph.slice_states.items() if over == (1, 2) and in_place}
    by_shape = {*graph.slice_states, *graph.matrix_states} - rows
    if by_shape and options:
        raise GradientError(
            f"{rule.name} keeps {min(by_shape)!r} per row or column of the parameter: leave {' and '.join(options)} "
            "out of its group"
        )
    if cut is not None and graph.scalar_states:
        raise GradientError(
            f"{rule.name} keeps one {graph.scalar_states[0]!r} for all splits: leave splits out of its group"
        )
    return graph if matrices.rows * matrices.columns == shape.numel() else stacked(graph)


def matrix_work(
    program: MatrixProgram, group: Mapping[str, Any], shape: Sequence[int], matrices: Matrices | None
) -> float:
    """Return the floating-point operations of a step for such matrices inside a tensor of this shape."""
    rows, columns = shape[-2:] if matrices is None else (matrices.rows, matrices.columns)
    count = math.prod(shape) / max(rows * columns, 1)
    if matrices is not None and matrices.cut is not None:
        count = math.prod(shape[: matrices.cut.dim])
    return count * work_of(program, group, rows, columns)


def check_matrices(share: Share, rule: Rule, seen: Sequence[RuleView]) -> None:
    """Raise for matrices inside a DTensor that are split over ranks and cannot be gathered."""
    param: Any = share.holder
    if not is_distributed(param) or is_whole(param):
        return
    graph, lead = seen[0].graph, leading_dims(seen[0].matrices, param.shape)
    are_here = lead == param.dim() - 2 and all(dim < lead for dim in sharded_dims(param))
    is_here = are_here and graph.dims in (2, param.dim())
    cut = None if seen[0].matrices is None else seen[0].matrices.cut
    if combines(graph) and not (is_here and cut is None):
        raise GradientError(
            f"it is a DTensor with placements {tuple(param.placements)}, and {rule.name} reduces over matrices split "
            "over ranks: shard a stack along its first dimension, make each split a parameter, or put it in a param "
            "group with another rule"
        )
    parts = 1 if cut is None else sharded_dims(param).get(cut.dim, 1)
    if cut is not None and cut.groups > 1 and cut.groups % parts:
        raise GradientError(
            f"it is a DTensor with placements {tuple(param.placements)}, and its {cut.groups} groups of splits are not "
            f"divisible by {parts} ranks: make each split a parameter, or shard another dimension"
        )


def check_cut(
    optimizer: Optimizer, share: Share, rule: Rule, seen: Sequence[RuleView], formats: Mapping[str, Storage]
) -> None:
    """Raise for splits of several sizes, which have an entry per size, where a parameter must have a single entry."""
    reasons = {
        "stats and track_changes do not support": optimizer.reports is not None,
        "offload does not support": not optimizer.memory.on_device,
        "blockwise states do not support": any(codec_of(one).has_blocks for one in formats.values()),
        f"{rule.name} gives different states": any(one.graph.states != seen[0].graph.states for one in seen),
    }
    for reason, holds in reasons.items():
        if holds:
            raise GradientError(
                f"{share.label} has splits of several sizes, which {reason}; make each split a parameter, or leave "
                "splits out of its group"
            )
