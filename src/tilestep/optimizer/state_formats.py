"""What the state of a parameter is kept in: what its group's `state_dtype` says, and what stays in float32."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..graph import Graph
from ..rules import Rule
from ..storage import Plain, Storage, dtype_name, state_format
from .masters import master_kind

__all__ = ["SMALLEST", "StateDtype", "check_state_dtype", "compute_dtype", "saved_choice", "state_formats"]

StateDtype = torch.dtype | str | Mapping[str, Any] | Callable[[str], Any] | None
"""What `Optimizer` takes as `state_dtype`."""

SMALLEST = 4096
"""Elements from which a parameter's state is kept as `state_dtype` says: of smaller ones little can be saved."""

_EMBEDDING = re.compile(r"emb|wte|wpe|vocab", re.IGNORECASE)
_NAME = re.compile(r"\((.*)\)$")


def compute_dtype(param: torch.Tensor) -> torch.dtype:
    """The type a parameter's update is computed in: float64 for float64, else float32."""
    return torch.float64 if param.dtype is torch.float64 else torch.float32


def check_state_dtype(rule: Rule, choice: Any) -> None:
    """Raise for what `state_dtype` cannot say.

    Args:
        rule: the group's rule.
        choice: a dtype, a format's name, a mapping from names of states to them, a function that gives any of these for
            a parameter's name, or None.

    Raises:
        ValueError: listing what is possible.

    Example:
        >>> from tilestep.rules import registry
        >>> check_state_dtype(registry["AdamW"], {"exp_avg": torch.bfloat16, "exp_avg_sq": "float32"})
        >>> check_state_dtype(registry["Lion"], {"momentum": torch.bfloat16})
        Traceback (most recent call last):
        ValueError: Invalid state_dtype: Lion has no state 'momentum' like its parameters; it has 'exp_avg'
    """
    if isinstance(choice, Mapping):
        possible = [name for name, state in rule.states.items() if state.shape == "param"]
        for name, kept in choice.items():
            if name not in possible:
                known = ", ".join(map(repr, possible)) or "none"
                raise ValueError(
                    f"Invalid state_dtype: {rule.name} has no state {name!r} like its parameters; it has {known}"
                )
            state_format(kept)
    elif choice is not None and not callable(choice):
        state_format(choice)


def state_formats(
    param: torch.Tensor, group: Mapping[str, Any], graph: Graph, rule: Rule, label: str, numel: int
) -> dict[str, Storage]:
    """The formats of a parameter's states that are like it, by name.

    A state keeps what its rule declares, one that begins as a copy of the parameter and squares of an embedding's
    gradients float32, unless the group names the state; parameters of fewer than `SMALLEST` elements keep float32. A
    function that chooses by the parameter's name has the last word.

    Args:
        param: the parameter, or what of it is here.
        group: its param group.
        graph: the rule traced for it.
        rule: the rule.
        label: how messages call it, with its name in parentheses at the end.
        numel: elements of the whole parameter.
    """
    named = _NAME.search(label)
    name = named[1] if named else ""
    choice = group.get("state_dtype")
    is_chosen_by_name = callable(choice)
    if callable(choice):
        choice = choice(name)
        check_state_dtype(rule, choice)
    default = param.dtype if master_kind(param.dtype, group) is None else torch.float32
    return {
        state: _format_of(
            state, rule, graph, choice, default, compute_dtype(param), name, numel, exactly=is_chosen_by_name
        )
        for state in graph.states
        if state not in graph.scalar_states and state not in graph.matrix_states
    }


def _format_of(
    state: str,
    rule: Rule,
    graph: Graph,
    choice: Any,
    default: torch.dtype,
    compute: torch.dtype,
    name: str,
    numel: int,
    *,
    exactly: bool,
) -> Storage:
    is_named = isinstance(choice, Mapping)
    kept = choice.get(state) if is_named else choice
    declared = graph.state_dtypes.get(state)
    if kept is None or (declared is not None and not is_named):
        return Plain(declared or default)
    if state in graph.slice_states:
        return Plain(default)
    begins_as_param = rule.states[state].init == "param"
    is_square = state.endswith(("_sq", "_square", "_squared")) and _EMBEDDING.search(name) is not None
    if not exactly and not is_named and (begins_as_param or is_square):
        return Plain(compute)
    if not exactly and numel < SMALLEST:
        return Plain(compute)
    chosen = state_format(kept)
    return Plain(compute) if chosen == Plain(torch.float32) else chosen


def saved_choice(choice: Any) -> Any:
    """What a checkpoint says of a group's `state_dtype`: names of formats; None for a function."""
    if isinstance(choice, Mapping):
        return {state: saved_choice(kept) for state, kept in choice.items()}
    if callable(choice):
        return None
    return dtype_name(choice) if isinstance(choice, torch.dtype) else choice
