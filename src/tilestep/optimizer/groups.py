"""Param groups: allowed keys and values, and groups by parameter name."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Union

import torch

from ..backends.floats import outcome_of
from ..devices import is_host
from ..errors import RuleError, did_you_mean
from ..graph import flat_numbers
from ..linalg.scalar_values import PYTHON_TYPES, as_python
from ..rules import Rule, registry
from ..rules.limits import Limit
from ..rules.protocol import MATRIX_OPTIONS, at_step
from .masters import MASTER_KEYS, check_choice
from .matrices import check_matrix_options
from .parameters import Optimizer, check_expression, shortened
from .states import check_rounding, check_state_dtype

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
"""Options of param groups under every rule, with their defaults; the last two are for `shard`."""

OWN_KEYS = (*GROUP_OPTIONS, "rule")  # keys that torch's param groups lack; dropped from a group at their defaults


def deciding_keys(rule: Rule) -> tuple[str, ...]:
    """Return the keys of a param group that determine a step, or whether it is refused."""
    return (*rule.hyperparameters, *OWN_KEYS, *MATRIX_OPTIONS, "differentiable", *_FIXED.intersection(rule.options))


_FIXED = frozenset({"decoupled_weight_decay"})  # options that belong to the rule; no group can change them


def without_defaults(group: dict[str, Any]) -> None:
    """Remove options at their defaults from a param group, so that it has torch's keys."""
    for key, default in GROUP_OPTIONS.items():
        value = group.get(key, default)
        if value is default or (type(value) is type(default) and value == default):
            group.pop(key, None)


def find_rule(rule: Any, adopted: Mapping[str, Rule]) -> Rule:
    """Return the rule of this name, or the rule itself."""
    if isinstance(rule, str):
        if rule not in adopted and rule not in registry:
            hint = did_you_mean(rule, registry) or f"registered rules: {', '.join(sorted(registry, key=str.lower))}"
            raise ValueError(f"no rule is called {rule!r}; {hint}")
        return adopted.get(rule) or registry[rule]
    if not isinstance(rule, Rule):
        raise RuleError(f"{rule!r} is not a rule: pass a function decorated with @tilestep.rule, or a rule's name")
    if taken := MASTER_KEYS.intersection(rule.states):
        raise RuleError(f"rule {rule.name}: the state {min(taken)!r} needs another name; masters use it")
    if adopted.get(rule.name, rule) is not rule:
        raise ValueError(
            f"two different rules of one optimizer are called {rule.name}; rename one: @tilestep.rule(name=...)"
        )
    return rule


def _base_rule(rule: Rule) -> Rule:
    """Return the base of a derived rule."""
    while rule.composition is not None:
        rule = rule.composition[1]
    return rule


def fill_group(
    group: dict[str, Any], rule: Rule, first: Rule, defaults: Mapping[str, Any], given: Container[str]
) -> dict[str, Any]:
    """Fill in the missing keys of a new param group of this rule; return the rule's defaults.

    The optimizer's defaults and arguments belong to its first rule: a group with another rule takes them only if both
    rules are derived from the same base.
    """
    own = {**rule.hyperparameters, **rule.options}
    is_alike, left_out = _base_rule(rule) is _base_rule(first), []
    for key, value in own.items():
        if key in group:
            continue
        group[key] = defaults[key] if rule is first or (is_alike and key in given) else value
        if not is_alike and key in given and key in rule.hyperparameters:
            texts = [plain_value(number, waits=False) for number in (value, defaults[key])]
            left_out += [(key, *texts)] if texts[0] != texts[1] else []
    if left_out:
        taken = ", ".join(f"{key}={value}" for key, value, _ in left_out)
        ignored = ", ".join(f"{key}={value}" for key, _, value in left_out)
        warnings.warn(
            f"a param group of rule {rule.name} takes that rule's defaults, {taken}, and not the optimizer's {ignored} "
            f"for {first.name}; set them in the group",
            stacklevel=2,
        )
    return own


def check_group(rule: Rule, group: Mapping[str, Any]) -> None:
    """Raise for a hyperparameter that the rule or the optimizer rejects."""
    rule.check(_numbers_of(rule, group))
    check_flags(rule, group)


def check_flags(rule: Rule, group: Mapping[str, Any]) -> None:
    """Raise for flags that no rule supports; a param group may have changed since it was added."""
    if not isinstance(group.get("in_norm", True), bool):
        raise ValueError(f"Invalid in_norm: {group['in_norm']!r}; it must be True or False")
    check_matrix_options(group)
    check_choice(group.get("master_weights", False))
    check_state_dtype(rule, group.get("state_dtype"))
    check_rounding(group)
    for name, value in flat_numbers(_numbers_of(rule, group)):
        if not isinstance(value, torch.Tensor) and value != value:
            raise ValueError(f"Invalid {name}: nan")
    limit = _on_host(group.get("max_grad_norm"), "max_grad_norm")
    if isinstance(limit, Limit):
        if not outcome_of(limit).clips:
            raise ValueError(f"Invalid max_grad_norm: {limit} never clips: pass it as skip_above")
    elif limit is not None:
        _check_kind("max_grad_norm", limit, 1.0)
    if isinstance(limit, (int, float)) and not limit >= 0:
        raise ValueError(f"Invalid max_grad_norm: {limit}; it must be at least 0, or None")
    if group.get("fused") and group.get("foreach"):
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    for key in _FIXED.intersection(rule.options):
        expected = rule.options[key]
        if bool(group.get(key, expected)) is not expected:
            raise ValueError(f"{key}={group[key]} is not supported by {rule.name}; use tilestep.Adam for that group")
    if group.get("differentiable"):
        raise ValueError(
            "differentiable=True is not supported: autograd does not record the step; "
            "use torch.optim, or call the rule on tensors"
        )


def _numbers_of(rule: Rule, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters as the host reads them; raises for types other than the rule's defaults have."""
    # Numbers out of range are accepted later on, as in torch.
    numbers = {key: _on_host(group[key], key) for key in rule.hyperparameters if key in group}
    for key, value in numbers.items():
        if callable(rule.ranges.get(key)):
            rule.check({key: value})
            continue
        default = rule.hyperparameters[key]
        alike = type(value) is type(default) and type(value) in PYTHON_TYPES
        if not alike and (value is not None or not rule.range_of(key).or_none):
            _check_kind(key, value, default)
    return numbers


def _check_kind(key: str, value: Any, default: Any) -> None:
    """Raise `TypeError` if the type of a value differs from the default's; tuples are compared entry by entry."""
    if isinstance(default, (tuple, list)):
        is_several = isinstance(value, (tuple, list))
        if not is_several or len(value) != len(default):
            error = ValueError if is_several else TypeError
            raise error(f"Invalid {key}: {value!r}; it must have {len(default)} values")
        for index, (entry, own_default) in enumerate(zip(value, default)):
            _check_kind(f"{key}[{index}]", entry, own_default)
        return
    is_number = isinstance(default, (int, float)) and not isinstance(default, bool)
    if is_number and not isinstance(value, (int, float, torch.Tensor)) and not callable(value):
        limits = "tilestep.ZClip(...), in a new group AdaGC(...)"
        alternative = limits if key == "max_grad_norm" else "a function of the step"
        raise TypeError(f"Invalid {key}: {value!r}; it must be a number or {alternative}")
    if isinstance(default, bool) and isinstance(value, str):
        raise TypeError(f"Invalid {key}: {value!r}; it must be True or False")
    if callable(value) and (isinstance(default, (bool, str)) or key == "max_grad_norm"):
        wrong = "is a class: call it" if isinstance(value, type) else "cannot be a function of the step"
        raise TypeError(f"Invalid {key}: {value!r}; it {wrong}")


def _on_host(value: Any, key: str, depth: int = 0) -> Any:
    """Convert numpy numbers, and tensors that the host can read, to Python numbers."""
    if type(value) in PYTHON_TYPES:
        return value
    value = as_python(value)
    if isinstance(value, (tuple, list)):
        return tuple(_on_host(entry, key, depth + 1) for entry in value)
    if not isinstance(value, torch.Tensor):
        return value
    if depth > 1:
        raise TypeError(f"Invalid {key}: a tensor in a nested list; it must be a number")
    if value.numel() != 1 or value.is_complex():
        kind = f"a tensor of shape {tuple(value.shape)}" + ", complex" * value.is_complex()
        raise ValueError(f"Invalid {key}: {kind}; it must have one element, a real number")
    return float(value) if is_host(value.device) else value


def check_in_group(index: int, check: Callable[..., None], *args: Any) -> None:
    """Run a check; prefix its error with the group's index."""
    try:
        check(*args)
    except (TypeError, ValueError) as error:
        raise type(error)(f"group {index}: {error}") from None


def current_value(group: Mapping[str, Any], step: Any, name: str) -> torch.Tensor:
    """Return a number of a param group as a float64 scalar on the device of its parameters, without a device sync."""
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
        raise TypeError(f"{name} is {value!r}, not a number")
    return torch.full((), float(value), dtype=torch.float64, device=device)


def described_numbers(optimizer: Optimizer) -> Iterator[str]:
    """Yield every entry of param groups that determines a step, a line per number."""
    for index, group in enumerate(optimizer.param_groups):
        for key in deciding_keys(optimizer.rule_of(group)):
            yield f"group {index} {key}={plain_value(group.get(key, GROUP_OPTIONS.get(key)), waits=False)}"


def plain_value(value: Any, waits: bool = True) -> str:
    """Format a hyperparameter, equally in every process; a number on a GPU is read only if the call may wait for it."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(plain_value(entry, waits) for entry in value)})"
    if isinstance(value, torch.Tensor):
        return repr(value.tolist()) if waits or not value.is_cuda else "a number on the device"
    if callable(value) and not dataclasses.is_dataclass(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return repr(value)


Pattern = Union[str, "re.Pattern[str]", Callable[[str, torch.Tensor], bool]]


def param_groups(
    model: torch.nn.Module | Iterable[tuple[str, torch.Tensor]], overrides: Mapping[Pattern, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Sort a model's parameters into param groups by the first pattern that matches their name.

    Parameters without a matching pattern form the first group, with the optimizer's defaults. Frozen parameters are
    left out. Groups include the parameters' names, for messages and checkpoints.

    Args:
        model: a module, or its `named_parameters()`.
        overrides: from a pattern to the group's hyperparameters and `rule`. A pattern is a regular expression, searched
            in the name, or a function of name and parameter.

    Raises:
        ValueError: for a pattern that matches no parameter, or only parameters that earlier patterns match.

    Example:
        >>> import tilestep
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> flat = lambda name, param: param.dim() < 2
        >>> groups = param_groups(model, {r"^1\\.": {"lr": 1e-4}, flat: {"weight_decay": 0.0}})
        >>> [[name for name, _ in group["params"]] for group in groups]
        [['0.weight'], ['1.weight', '1.bias'], ['0.bias']]
        >>> len(tilestep.AdamW(groups, lr=1e-3).param_groups)
        3
    """
    named = model.named_parameters() if isinstance(model, torch.nn.Module) else model
    for pattern in overrides:
        if not callable(pattern):
            check_expression("pattern", pattern)
    taken: dict[Pattern | None, list[tuple[str, torch.Tensor]]] = {None: [], **{pattern: [] for pattern in overrides}}
    matching: dict[Pattern, str] = {}
    for name, param in named:
        if not param.requires_grad:
            continue
        matches = [
            pattern
            for pattern in overrides
            if (re.search(pattern, name) if isinstance(pattern, (str, re.Pattern)) else pattern(name, param))
        ]
        for pattern in matches:
            matching.setdefault(pattern, name)
        taken[matches[0] if matches else None].append((name, param))
    for pattern in overrides:
        if not taken[pattern]:
            label = repr(pattern.pattern if isinstance(pattern, re.Pattern) else pattern)
            if pattern in matching:
                raise ValueError(
                    f"pattern {label} gets no parameter: {matching[pattern]} and all its other matches go to earlier "
                    "patterns"
                )
            shown = shortened([name for params in taken.values() for name, _ in params]) or "none"
            raise ValueError(f"pattern {label} matches no trainable parameter; their names are {shown}")
    return [
        {**({} if pattern is None else overrides[pattern]), "params": params}
        for pattern, params in taken.items()
        if params
    ]
