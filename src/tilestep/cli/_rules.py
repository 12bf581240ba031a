"""Parsing what the command line names: rules and their hyperparameters, dtypes, backends."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    import torch

    from ..rules import Rule


def chosen_device(name: str) -> torch.device:
    """Return the named device; the empty name means the GPU if there is one, else the CPU."""
    import torch

    available = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    name = name or available[0]
    if name.split(":")[0] not in available:
        raise typer.BadParameter(f"{name} is not here; choose {' or '.join(available)}", param_hint="--device")
    return torch.device(name)


def require_plotting() -> None:
    """Check that pictures can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("the picture needs matplotlib: pip install matplotlib")


def load_rule(name: str) -> Rule:
    """The rule of this name."""
    from ..rules import Rule, registry, rule

    if ":" not in name:
        names = {key.lower(): key for key in registry}
        if name.lower() in names:
            return registry[names[name.lower()]]
        close = difflib.get_close_matches(name.lower(), names, n=3)
        hint = f"did you mean {' or '.join(names[key] for key in close)}?" if close else "name it module:function?"
        raise typer.BadParameter(f"no rule is called {name!r}; {hint}", param_hint="RULE")
    imported = _imported(*name.split(":", 1))
    return imported if isinstance(imported, Rule) else rule(imported)


def _imported(module_name: str, attributes: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports something that is not
        raise typer.BadParameter(f"no module is called {module_name!r}", param_hint="RULE") from None
    for attribute in attributes.split("."):
        if not hasattr(value, attribute):
            raise typer.BadParameter(f"{module_name} has no {attributes!r}", param_hint="RULE")
        value = getattr(value, attribute)
    if not callable(value):
        raise typer.BadParameter(f"{module_name}:{attributes} is no function", param_hint="RULE")
    return value


def parse_settings(settings: Sequence[str], rule: Rule) -> dict[str, Any]:
    """Hyperparameters from `name=value` words."""
    values = {}
    for word in settings:
        key, equals, text = word.partition("=")
        if not equals or key not in rule.hyperparameters:
            names = ", ".join(rule.hyperparameters)
            raise typer.BadParameter(f"{word!r}: give name=value, with a name of {names}", param_hint="--set")
        values[key] = _value(text)
    return values


def parse_formats(state_dtype: str, master_weights: str, rounding: str = "nearest") -> dict[str, Any]:
    """What options say of storage formats."""
    from ..optimizer.masters import check_choice
    from ..optimizer.states import check_rounding
    from ..storage import state_format

    masters = {"true": True, "": False, "false": False}.get(master_weights.lower(), master_weights)
    try:
        check_choice(masters)
        check_rounding({"rounding": rounding})
        if state_dtype:
            state_format(state_dtype)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return {"state_dtype": state_dtype or None, "master_weights": masters, "rounding": rounding}


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "inf": float("inf")}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
