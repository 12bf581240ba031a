"""Write the signatures of the named optimizers for type checkers and editors: src/tilestep/optimizer/named_types.pyi.

The classes themselves are made from the rules when tilestep is imported. Run this after adding a rule or a parameter.
"""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import tilestep

TARGET = Path(__file__).resolve().parent.parent / "src" / "tilestep" / "optimizer" / "named_types.pyi"

HEADER = '''"""Signatures of the named optimizers, made by scripts/optimizer_stub.py from the rules."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ..rules.adaptive_clip import AdaGC
from ..rules.limits import Limit
from ..stats import Stats
from .masters import MasterWeights
from .optimizer import Optimizer
from .states import StateDtype

# None where the rule says what it means.
Number = float | torch.Tensor | Callable[[Any], Any] | None
'''

OWN = {**inspect.get_annotations(tilestep.Optimizer.__init__), "params": "ParamsT"}


def annotation(rule: tilestep.Rule, name: str, default: Any) -> str:
    """The type of a parameter, from its default."""
    if name in OWN:
        return OWN[name]
    if callable(rule.ranges.get(name)):
        return "Any"
    if isinstance(default, (bool, str)):
        return type(default).__name__
    if isinstance(default, (int, float)):
        return "Number"
    if isinstance(default, (tuple, list)):
        return "Sequence[Number]"
    return "Any"


def signature(optimizer: type) -> str:
    """One class with its constructor."""
    parameters = []
    starred, rule = False, tilestep.registry[optimizer.__name__]
    for name, parameter in list(inspect.signature(optimizer.__init__).parameters.items())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parameters.append("*")
            starred = True
        shown = "..." if parameter.default == math.inf else repr(parameter.default)
        default = "" if parameter.default is parameter.empty else f" = {shown}"
        parameters.append(f"{name}: {annotation(rule, name, parameter.default)}{default}")
    return f"class {optimizer.__name__}(Optimizer):\n    def __init__(self, {', '.join(parameters)}) -> None: ..."


def stub() -> str:
    """The whole file, formatted."""
    names = sorted(tilestep.registry)
    classes = [signature(getattr(tilestep, name)) for name in names]
    text = "\n\n".join([f"{HEADER}\n__all__ = {names!r}", *classes]) + "\n"
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    TARGET.write_text(stub())
