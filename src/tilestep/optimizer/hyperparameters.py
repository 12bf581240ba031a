"""Checking what a param group says: its rule and its hyperparameters."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..devices import is_host
from ..engine.limits import ZClip
from ..errors import RuleError
from ..rules import Rule, registry
from ..rules.protocol import at_step
from ..rules.scalars import PYTHON_TYPES, as_python
from .masters import MASTER_KEYS, check_choice
from .state_formats import check_rounding, check_state_dtype

GROUP_OPTIONS: Mapping[str, Any] = {
    "max_grad_norm": None,
    "master_weights": False,
    "state_dtype": None,
    "rounding": "nearest",
    "seed": 0,
    "in_norm": True,
    "grad_sync_dtype": None,
    "param_sync_dtype": None,
}
"""What a param group may say for any rule, and what a group means that does not say it; the last two for `shard`."""

OWN_KEYS = (*GROUP_OPTIONS, "rule")
"""Keys of a param group that torch's optimizers do not have; a group has none of them at its default."""


def deciding_keys(rule: Rule) -> tuple[str, ...]:
    """What of a param group decides what a step does, or that it is refused.

    Example:
        >>> "differentiable" in deciding_keys(registry["SGD"])
        True
    """
    return (*rule.hyperparameters, *OWN_KEYS, "differentiable", *_FIXED.intersection(rule.options))


_FIXED = frozenset({"decoupled_weight_decay"})
"""Options that are part of what a rule is: a group cannot have another value."""


def without_defaults(group: dict[str, Any]) -> None:
    """Take the options that are at their defaults out of a param group, which then has torch's keys.

    Example:
        >>> group = {"lr": 0.1, "max_grad_norm": None, "master_weights": "remainder"}
        >>> without_defaults(group)
        >>> group
        {'lr': 0.1, 'master_weights': 'remainder'}
    """
    for key, default in GROUP_OPTIONS.items():
        value = group.get(key, default)
        if value is default or (type(value) is type(default) and value == default):
            group.pop(key, None)


def find_rule(rule: Any, known: Mapping[str, Rule]) -> Rule:
    """The rule that is meant.

    Example:
        >>> find_rule("Lion", {}).name
        'Lion'
    """
    if isinstance(rule, str):
        if rule not in known and rule not in registry:
            names = {name.lower(): name for name in sorted(registry)}
            close = [names[name] for name in difflib.get_close_matches(rule.lower(), names, n=3)]
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names.values())}"
            raise ValueError(f"no rule is called {rule!r}; {hint}")
        return known.get(rule) or registry[rule]
    if not isinstance(rule, Rule):
        raise RuleError(f"{rule!r} is not a rule: give a function made by @tilestep.rule, or the name of a rule")
    taken = MASTER_KEYS.intersection(rule.states)
    if taken:
        raise RuleError(
            f"rule {rule.name}: the state {min(taken)!r} needs another name: masters are kept under that one"
        )
    if known.get(rule.name, rule) is not rule:
        raise ValueError(
            f"two different rules of one optimizer are called {rule.name}; call one otherwise: @tilestep.rule(name=...)"
        )
    return rule


def check_group(rule: Rule, group: Mapping[str, Any]) -> None:
    """Raise for a hyperparameter that the rule or the optimizer refuses."""
    given = {
        key: group[key] if type(group[key]) in PYTHON_TYPES else _on_host(group[key], key)
        for key in rule.hyperparameters
        if key in group
    }
    for key, value in given.items():
        default = rule.hyperparameters[key]
        alike = type(value) is type(default) and type(value) in PYTHON_TYPES
        if not alike and (value is not None or not rule.range_of(key).or_none):
            _check_kind(key, value, default)
    rule.check(given)
    limit = group.get("max_grad_norm")
    limit = limit if type(limit) in PYTHON_TYPES else _on_host(limit, "max_grad_norm")
    if isinstance(limit, ZClip):
        limit = limit.max_norm
    if limit is not None:
        _check_kind("max_grad_norm", limit, 1.0)
    check_flags(rule, group)


def check_flags(rule: Rule, group: Mapping[str, Any]) -> None:
    """Raise for what no rule can do, in a param group that may have been changed since it was added."""
    if not isinstance(group.get("in_norm", True), bool):
        raise ValueError(f"Invalid in_norm: {group['in_norm']!r}; True, or False for a group left out of the norm")
    check_choice(group.get("master_weights", False))
    check_state_dtype(rule, group.get("state_dtype"))
    check_rounding(group)
    limit = group.get("max_grad_norm")
    if isinstance(limit, (int, float)) and not limit >= 0:
        raise ValueError(f"Invalid max_grad_norm: {limit}; it must be at least 0, or None")
    if group.get("fused") and group.get("foreach"):
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    for key in _FIXED.intersection(rule.options):
        wanted = rule.options[key]
        if bool(group.get(key, wanted)) is not wanted:
            raise ValueError(f"{key}={group[key]} is not what {rule.name} does: take tilestep.Adam for that group")
    if group.get("differentiable"):
        raise ValueError(
            "differentiable=True is not supported: the step writes behind autograd's back; "
            "use torch.optim, or call the rule itself on tensors"
        )


def _check_kind(key: str, value: Any, default: Any) -> None:
    """Raise `TypeError` for something else than a number where the default is one; a tuple entry by entry."""
    if isinstance(default, (tuple, list)):
        if not isinstance(value, (tuple, list)):
            raise TypeError(f"Invalid {key}: {value!r}; it takes {len(default)} values")
        for index, (entry, known) in enumerate(zip(value, default)):
            _check_kind(f"{key}[{index}]", entry, known)
        return
    is_number = isinstance(default, (int, float)) and not isinstance(default, bool)
    if is_number and not isinstance(value, (int, float, torch.Tensor)) and not callable(value):
        raise TypeError(f"Invalid {key}: {value!r}; it must be a number or a function of the step")
    if callable(value) and (isinstance(default, (bool, str)) or key == "max_grad_norm"):
        raise TypeError(f"Invalid {key}: {value!r}; it cannot be a function of the step")


def _on_host(value: Any, key: str) -> Any:
    """A value with every tensor that the host can read as the number it holds, and Python's numbers for numpy's."""
    if type(value) in PYTHON_TYPES:
        return value
    value = as_python(value)
    if isinstance(value, (tuple, list)):
        return tuple(_on_host(entry, key) for entry in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"Invalid {key}: a tensor of shape {tuple(value.shape)}; it must have one element")
    return float(value) if is_host(value.device) else value


def about_group(index: int, check: Callable[[], None]) -> None:
    """Run a check and say in its error which group it is about."""
    try:
        check()
    except (TypeError, ValueError) as error:
        raise type(error)(f"group {index}: {error}") from None


def current_value(group: Mapping[str, Any], step: Any, name: str) -> torch.Tensor:
    """A number of a param group as a float64 scalar on the device of its parameters, without a wait.

    Args:
        step: the last one that was taken; None before any.
        name: the key, with `[index]` for an entry of a tuple.
    """
    key, _, index = name.partition("[")
    if key not in group or key in ("params", "param_names"):
        numbers = ", ".join(sorted(set(group) - {"params", "param_names"}))
        raise KeyError(f"the param group has no {key!r}; it has {numbers}")
    value = group[key][int(index.rstrip("]"))] if index else group[key]
    device = next((param.device for param in group["params"]), torch.device("cpu"))
    if callable(value):
        step = step if isinstance(step, torch.Tensor) else torch.full((), float(step or 0), device=device)
        value = at_step(value, step.to(torch.float64).clamp(min=1), name)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().to(device, torch.float64, copy=True, non_blocking=not is_host(device)).reshape(())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}, which is no number")
    return torch.full((), float(value), dtype=torch.float64, device=device)
