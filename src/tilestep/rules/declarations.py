"""What a rule's declaration must not say: names that mean something else, states that begin at what is not there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..errors import RuleError

_SHAPES = ("param", "scalar", "row", "column", "left", "right")

_NOT_FOR_STATES = {
    "param": "the parameter",
    "grad": "the gradient",
    "master_param": "a float32 master",
    "remainder_param": "what a bfloat16 parameter lacks of a float32 one",
    "training_param": "the weights that train while the averages are in the parameters",
}
NOT_FOR_HYPERPARAMETERS = {
    "numel": "the number of elements",
    "rows": "a size of the parameter",
    "columns": "a size of the parameter",
    "gradient_scale": "what clipping and loss scaling multiply gradients by",
    "machine_epsilon": "that of the parameter",
    "max_grad_norm": "the optimizer's clip",
    "master_weights": "the optimizer's argument",
    "state_dtype": "the optimizer's argument",
    "rounding": "the optimizer's argument",
    "seed": "the optimizer's argument",
    "skip_nonfinite": "the optimizer's argument",
    "skip_above": "the optimizer's argument",
    "rule": "the param group's rule",
    "params": "the param group's parameters",
    "param_names": "the param group's names",
}
"""Names that no hyperparameter can have, with what they are."""


def check_start(init: Any, shape: str) -> None:
    """Raise for a state that begins or lies in a way there is not.

    Example:
        >>> check_start(0.0, "rows")
        Traceback (most recent call last):
        ...
        tilestep.errors.RuleError: State(shape='rows'): it must be one of param, scalar, row, column, left, right
    """
    if shape not in _SHAPES:
        raise RuleError(f"State(shape={shape!r}): it must be one of {', '.join(_SHAPES)}")
    if not isinstance(init, (int, float, str)):
        raise RuleError(f"State({init!r}): it begins at a number, at 'param', or at a hyperparameter by its name")


def check_names(where: str, states: Mapping[str, Any], hyperparameters: Mapping[str, Any]) -> None:
    """Raise for names that mean something else, defaults that no hyperparameter can have, and unknown beginnings."""
    for kind, names, taken in (
        ("state", states, _NOT_FOR_STATES),
        ("hyperparameter", hyperparameters, NOT_FOR_HYPERPARAMETERS),
    ):
        for name in names:
            if name in taken:
                raise RuleError(f"{where}: the {kind} {name!r} needs another name: that one is {taken[name]}")
    for name, default in hyperparameters.items():
        if isinstance(default, (dict, set)):
            raise RuleError(
                f"{where}: hyperparameter {name!r} is a {type(default).__name__}; it must be a number, a flag, a "
                "string, None, or a tuple of such"
            )
    for name, start in states.items():
        if isinstance(start.init, str) and start.init not in ("param", *hyperparameters):
            raise RuleError(
                f"{where}: state {name!r} begins at {start.init!r}, which is no hyperparameter, nor 'param'"
            )


def check_range_names(where: str, ranges: Collection[str], hyperparameters: Collection[str]) -> None:
    """Raise for ranges of hyperparameters that a rule does not have."""
    unknown = sorted(set(ranges) - set(hyperparameters))
    if unknown:
        raise RuleError(
            f"{where}: ranges= names {unknown}, which are not hyperparameters ({', '.join(hyperparameters)})"
        )
