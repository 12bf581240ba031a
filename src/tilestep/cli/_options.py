"""What several commands need: the `--device` option, and matplotlib before the work rather than after it."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import torch


def chosen_device(name: str) -> torch.device:
    """Return the named device; the empty name means the GPU if there is one, else the CPU.

    >>> chosen_device("cpu")
    device(type='cpu')
    """
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
