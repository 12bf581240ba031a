"""What the state of a parameter is kept in: what its group's `state_dtype` says, and what stays in float32."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import StateError
from ..graph import Graph, never_negative
from ..placements.local import sharded_dims
from ..rules import Interval, Rule
from ..storage import BLOCK, Plain, Stochastic, Storage, codec_of, dtype_name, rows_of, state_format
from .masters import master_kind

StateDtype = torch.dtype | str | Mapping[str, Any] | Callable[[str], Any] | None
"""What `Optimizer` takes as `state_dtype`."""

SMALLEST = 4096
"""Elements from which a parameter's state is kept as `state_dtype` says: of smaller ones little can be saved."""

SHORTEST = 32
"""Elements of a row from which it is worth its scales: of shorter ones, blocks would be little more than those."""

_EMBEDDING = re.compile(r"emb|wte|wpe|vocab", re.IGNORECASE)
_NAME = re.compile(r"\((.*)\)$")


def compute_dtype(param: torch.Tensor) -> torch.dtype:
    """The type a parameter's update is computed in: float64 for float64, else float32."""
    return torch.float64 if param.dtype is torch.float64 else torch.float32


def check_state_dtype(rule: Rule, choice: Any) -> None:
    """Raise for what `state_dtype` cannot say.

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
    param: torch.Tensor, group: Mapping[str, Any], graph: Graph, rule: Rule, label: str, shape: Sequence[int]
) -> dict[str, Storage]:
    """The formats of a parameter's states that are like it, by name.

    A state keeps what its rule declares, one that begins as a copy of the parameter and squares of an embedding's
    gradients float32, unless the group names the state; parameters of fewer than `SMALLEST` elements keep float32, and
    so do those whose rows are shorter than `SHORTEST` in place of blocks. A function that chooses by the parameter's
    name has the last word.
    """
    named = _NAME.search(label)
    name = named[1] if named else ""
    choice = group.get("state_dtype")
    is_chosen_by_name = callable(choice)
    if callable(choice):
        choice = choice(name)
        check_state_dtype(rule, choice)
    default = Plain(param.dtype if master_kind(param.dtype, group) is None else torch.float32)
    formats: dict[str, Storage] = {}
    for state in graph.states:
        if state in graph.scalar_states or state in graph.matrix_states:
            continue
        kept = _kept_as(state, rule, graph, choice, name, shape, exactly=is_chosen_by_name)
        if kept is None:
            declared = graph.state_dtypes.get(state)
            formats[state] = default if declared is None else Plain(declared)
            continue
        declared_sign = rule.states[state].signed
        signed = not _is_positive(state, rule, graph) if declared_sign is None else declared_sign
        chosen = state_format(kept, signed)
        if codec_of(chosen).has_blocks:
            chosen = _in_blocks(chosen, kept, signed, shape, graph, label, exactly=is_chosen_by_name)
        formats[state] = Plain(compute_dtype(param)) if chosen == Plain(torch.float32) else chosen
    return formats


_EXACT = "float32"


def _kept_as(
    state: str, rule: Rule, graph: Graph, choice: Any, name: str, shape: Sequence[int], *, exactly: bool
) -> Any:
    """The dtype or format's name that a state is to be kept in; None for what its rule says."""
    is_named = isinstance(choice, Mapping)
    kept = choice.get(state) if is_named else choice
    declared = graph.state_dtypes.get(state)
    if kept is None or (declared is not None and not is_named) or state in graph.slice_states:
        return None
    begins_as_param = rule.states[state].init == "param"
    is_square = state.endswith(("_sq", "_square", "_squared")) and _EMBEDDING.search(name) is not None
    if not exactly and not is_named and (begins_as_param or is_square):
        return _EXACT
    return _EXACT if not exactly and math.prod(shape) < SMALLEST else kept


def _is_positive(state: str, rule: Rule, graph: Graph) -> bool:
    """Whether a state has no negative elements, by the ranges of hyperparameters; one without is where it begins."""
    bounds: dict[str, tuple[float, float]] = {}
    for key, default in rule.hyperparameters.items():
        ranges, entries = rule.ranges.get(key), default if isinstance(default, tuple) else (default,)
        for index, entry in enumerate(entries):
            interval = ranges[index] if isinstance(ranges, tuple) and index < len(ranges) else ranges
            place = f"{key}.{index}" if isinstance(default, tuple) else key
            low, high = (interval.low, interval.high) if isinstance(interval, Interval) else (-math.inf, math.inf)
            if isinstance(entry, (int, float)) and 0 <= entry <= 1:
                # What is not said is taken to be as by default; were it not, NaN would say so.
                low, high = max(low, 0.0), min(high, 1.0)
            bounds[place] = (low, high)
    init = rule.states[state].init
    least = bounds.get(init, (-math.inf, math.inf))[0] if isinstance(init, str) else init
    if least < 0:
        return False
    return never_negative(graph, state, bounds)


def _in_blocks(
    chosen: Storage, kept: Any, signed: bool, shape: Sequence[int], graph: Graph, label: str, *, exactly: bool
) -> Storage:
    """A format of blocks where they can lie, and what is kept in its place where not."""
    if graph.has_slices:
        raise StateError(
            f"{label}: {graph.title} reduces over rows or columns, and passes over these do not read blocks yet: keep "
            f"its states as 'float32', 'bfloat16' or 'float16' in place of {kept!r}"
        )
    columns = rows_of(shape)[1]
    if columns < SHORTEST and not exactly:
        return Plain(torch.float32)
    is_packed = codec_of(chosen).is_packed
    if is_packed and (not shape or shape[-1] % 2 or shape[-1] != columns):
        return state_format("int8", signed)
    return chosen


ROUNDINGS = ("nearest", "stochastic")
"""What `rounding` can say."""


def check_rounding(group: Mapping[str, Any]) -> None:
    """Raise for what `rounding` and `seed` cannot say.

    Example:
        >>> check_rounding({"rounding": "up"})
        Traceback (most recent call last):
        ValueError: Invalid rounding: 'up'; it must be 'nearest' or 'stochastic'
    """
    rounding, seed = group.get("rounding", ROUNDINGS[0]), group.get("seed", 0)
    if rounding not in ROUNDINGS:
        raise ValueError(f"Invalid rounding: {rounding!r}; it must be 'nearest' or 'stochastic'")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise ValueError(f"Invalid seed: {seed!r}; it must be an integer from 0 to 2**64 - 1, the same on all ranks")


def rounded_as_said(formats: Mapping[str, Storage], group: Mapping[str, Any], graph: Graph) -> dict[str, Storage]:
    """Formats of a parameter without a master and its states, rounded as the group's `rounding` says.

    Numbers of rows and columns are few: they are kept in float32 where others are rounded at random.
    """
    if group.get("rounding", ROUNDINGS[0]) == ROUNDINGS[0]:
        return dict(formats)
    rounded: dict[str, Storage] = {}
    for name, storage in formats.items():
        is_coarse = codec_of(storage).has_blocks or storage.precision in (torch.bfloat16, torch.float16)
        if name in graph.slice_states:
            rounded[name] = Plain(torch.float32) if is_coarse else storage
        else:
            rounded[name] = Stochastic(storage) if is_coarse else storage  # type: ignore[arg-type]
    return rounded


def check_cut_blocks(label: str, param: torch.Tensor, formats: Mapping[str, Storage]) -> None:
    """Raise for a DTensor whose parts do not hold whole blocks."""
    blocks = next((str(storage) for storage in formats.values() if codec_of(storage).has_blocks), None)
    if blocks is None:
        return
    lead, columns = rows_of(param.shape)
    for dim, parts in sharded_dims(param).items():
        if dim < len(lead) or (dim == param.dim() - 1 == len(lead) and columns % (BLOCK * parts) == 0):
            continue
        if dim == param.dim() - 1 == len(lead):
            size = -(-columns // (BLOCK * parts)) * BLOCK * parts
            remedy = f"make its last dimension {size}, a multiple of {BLOCK} for each of {parts} parts"
        else:
            remedy = f"shard it along dimension 0: its rows of blocks are all of its dimensions from {len(lead)} on"
        raise StateError(
            f"{label} of shape {tuple(param.shape)} is sharded along dimension {dim}, which cuts blocks of {BLOCK} "
            f"elements ({blocks}): {remedy}, or keep its states as 'bfloat16'"
        )


def saved_choice(choice: Any) -> Any:
    """What a checkpoint says of a group's `state_dtype`: names of formats; None for a function."""
    if isinstance(choice, Mapping):
        return {state: saved_choice(kept) for state, kept in choice.items()}
    if callable(choice):
        return None
    return dtype_name(choice) if isinstance(choice, torch.dtype) else choice
