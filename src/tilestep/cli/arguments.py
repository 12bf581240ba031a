"""Arguments of commands: rules and hyperparameters, storage formats, devices, sizes, and their options."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import did_you_mean

if TYPE_CHECKING:
    import torch

    from ..rules import Rule


Dtype = Literal["fp32", "fp64", "bf16", "fp16"]


def torch_dtype(name: Dtype) -> torch.dtype:
    """The dtype with this name."""
    import torch

    return {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


RULE_HELP = "A rule's name in any case, or module:function."
RuleName = Annotated[str, typer.Argument(help=RULE_HELP)]
RuleOption = Annotated[str, typer.Option(help=RULE_HELP)]
ParamDtype = Annotated[Dtype, typer.Option(help="Dtype of the parameters.")]
Words = Annotated[
    list[str] | None, typer.Option("--set", help="Set a hyperparameter: amsgrad=true.", metavar="NAME=VALUE")
]
Device = Annotated[str, typer.Option(help="cuda or cpu; by default the GPU if there is one.")]
MasterWeights = Annotated[bool, typer.Option(help="Keep float32 masters and state.")]
Remainder = Annotated[bool, typer.Option(help="Keep masters as 16-bit remainders of bf16 parameters.")]
Masters = Annotated[str, typer.Option(help="Format of masters: true, remainder, kahan or int8.")]
StateDtype = Annotated[str, typer.Option(help="Format of states: int8, bfloat16, ...")]
Rounding = Annotated[str, typer.Option(help="nearest or stochastic.")]


def chosen_device(name: str) -> torch.device:
    """Return the named device; the empty name means the GPU if there is one, else the CPU."""
    import torch

    available = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    name = name or available[0]
    if name.split(":")[0] not in available:
        raise typer.BadParameter(f"{name} is not available; choose {' or '.join(available)}", param_hint="--device")
    return torch.device(name)


def require_plotting() -> None:
    """Check that pictures can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("the picture needs matplotlib: pip install matplotlib")


def require_output(out: Path) -> None:
    """Check that pictures can be drawn, and results written to a folder, before minutes of measurements."""
    require_plotting()
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise typer.BadParameter(f"{existing} is a file, not a folder; choose another", param_hint="--out")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"the folder {existing} cannot be written to; choose another", param_hint="--out")


def load_rule(name: str, option: str = "RULE") -> Rule:
    """The rule with this name, from the value of an option."""
    from ..rules import Rule, registry, rule

    if ":" not in name:
        names = {key.lower(): key for key in registry}
        if name.lower() in names:
            return registry[names[name.lower()]]
        hint = did_you_mean(name, registry) or "pass your own rule as module:function"
        raise typer.BadParameter(f"no rule is called {name!r}; {hint}", param_hint=option)
    module_name, _, attributes = name.partition(":")
    imported = _imported(module_name, attributes, option)
    return imported if isinstance(imported, Rule) else rule(imported)


def _imported(module_name: str, attributes: str, option: str) -> Any:
    refused = partial(typer.BadParameter, param_hint=option)
    file = Path(module_name)
    if file.suffix == ".py" or module_name.startswith(".") or not (module_name and attributes):
        parts = [part.removesuffix(".py") for part in file.parts]
        name = ".".join(part for part in parts if part.isidentifier())
        raise refused(f"name the module and the function: {name or 'module'}:{attributes or 'function'}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, and an import inside it failed
        raise refused(f"no module is called {module_name!r}, in this folder or installed") from None
    except SystemExit as error:
        raise refused(f"the code of {module_name} ends the process when it is imported") from error
    for attribute in attributes.split("."):
        if not hasattr(value, attribute):
            hint = did_you_mean(attribute, dir(value))
            raise refused(f"{module_name} has no {attributes!r}{hint and f'; {hint}'}")
        value = getattr(value, attribute)
    if not callable(value):
        raise refused(f"{module_name}:{attributes} is not a function")
    return value


def parse_settings(settings: Sequence[str] | None, rule: Rule) -> dict[str, Any]:
    """Hyperparameters from `name=value` words."""
    values = {}
    for word in settings or ():
        key, equals, text = word.partition("=")
        if not equals or key not in rule.hyperparameters:
            names = ", ".join(rule.hyperparameters)
            raise typer.BadParameter(f"{word!r}: pass name=value; the names are {names}", param_hint="--set")
        values[key] = _value(text)
    return values


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "inf": float("inf")}
    try:
        return words[text.lower()] if text.lower() in words else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_formats(
    state_dtype: str,
    masters: str,
    rounding: str = "nearest",
    master_weights: bool = False,
    remainder: bool = False,
    masters_option: str = "--masters",
) -> dict[str, Any]:
    """Storage formats from options; `masters` overrides `remainder`, which overrides `master_weights`."""
    from ..optimizer.masters import check_choice
    from ..optimizer.states import check_rounding
    from ..storage import state_format

    kind = {"true": True, "": False, "false": False}.get(masters.lower(), masters)
    checks: list[tuple[str, Callable[[Any], object], Any]] = [
        (masters_option, check_choice, kind),
        ("--rounding", check_rounding, {"rounding": rounding}),
        *([("--state-dtype", state_format, state_dtype)] if state_dtype else []),
    ]
    for option, check, value in checks:
        try:
            check(value)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=option) from None
    kind = kind or ("remainder" if remainder else master_weights)
    return {"state_dtype": state_dtype or None, "master_weights": kind, "rounding": rounding}


_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def _read(pattern: str, text: str, refusal: str, option: str) -> re.Match[str]:
    match = re.fullmatch(pattern, text.strip().upper())
    if match is None:
        raise typer.BadParameter(f"{text!r}{refusal}", param_hint=option)
    return match


def elements_of(text: str) -> float:
    """Parse a number of elements."""
    refusal = " is not a number of elements, such as 1.2B, 350M or 7e9"
    match = _read(r"((?:\d[\d,_]*\.?[\d,_]*|\.\d[\d,_]*)(?:E[+-]?\d+)?)\s*([KMBGT]?)", text, refusal, "SIZE")
    return float(re.sub("[,_]", "", match[1])) * _UNITS[match[2]]


def matrices_of(text: str) -> list[tuple[int, int, int]]:
    """Parse counts, rows and columns of matrices: `48x2048x2048,24x512x2048`."""
    refusal = ": matrices are written as their number x rows x columns, such as 48x2048x2048"
    found = _read(r"(?:\s*\d+X\d+X\d+\s*(?:,|$))*", text, refusal, "--matrices")
    return [(int(a), int(b), int(c)) for a, b, c in re.findall(r"(\d+)X(\d+)X(\d+)", found[0])]


def mesh_of(text: str) -> tuple[int, int]:
    """Parse the ranks that shard the state, and its replicas: `8`, `8x4`."""
    refusal = " is not a mesh: pass ranks that shard the state x replicas, such as 8 or 8x4"
    match = _read(r"(0*[1-9]\d*)(?:X(0*[1-9]\d*))?", text, refusal, "--mesh")
    return int(match[1]), int(match[2] or 1)
