"""Param groups by the names of parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Union

import torch

Pattern = Union[str, "re.Pattern[str]", Callable[[str, torch.Tensor], bool]]


def param_groups(
    model: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
    overrides: Mapping[Pattern, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Sort a model's parameters into param groups; each goes to the first pattern that fits its name.

    Parameters that no pattern fits form the first group, which takes the optimizer's defaults. Frozen parameters are
    left out. Groups have their parameters' names, so messages and checkpoints have them too.

    Args:
        model: a module, or its `named_parameters()`.
        overrides: pattern to what the group says: hyperparameters, or a `rule` of its own. A pattern is a regular
            expression that is searched for in the name, or a function of name and parameter.

    Raises:
        ValueError: for a pattern that fits no parameter, or only such as earlier patterns have taken.

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
    rest: list[tuple[str, torch.Tensor]] = []
    taken: dict[Pattern, list[tuple[str, torch.Tensor]]] = {pattern: [] for pattern in overrides}
    fitting: dict[Pattern, str] = {}
    for name, param in named:
        if not param.requires_grad:
            continue
        fits = [pattern for pattern in overrides if _fits(pattern, name, param)]
        for pattern in fits:
            fitting.setdefault(pattern, name)
        (taken[fits[0]] if fits else rest).append((name, param))
    names = [name for params in (rest, *taken.values()) for name, _ in params]
    for pattern, params in taken.items():
        if not params:
            raise ValueError(_unused(pattern, fitting.get(pattern), names))
    first = [{"params": rest}] if rest else []
    return first + [{**overrides[pattern], "params": params} for pattern, params in taken.items()]


def _fits(pattern: Pattern, name: str, param: torch.Tensor) -> bool:
    if isinstance(pattern, (str, re.Pattern)):
        return re.search(pattern, name) is not None
    return bool(pattern(name, param))


def _unused(pattern: Pattern, fitting: str | None, names: list[str]) -> str:
    label = repr(pattern.pattern if isinstance(pattern, re.Pattern) else pattern)
    if fitting is not None:
        return f"pattern {label} gets no parameter: {fitting} and all others it fits go to earlier patterns"
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"pattern {label} fits no parameter that trains; their names are {shown or 'none'}"
