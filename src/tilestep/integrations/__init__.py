"""One module for each training framework: `accelerate`, `lightning`, `torchtitan`, `transformers`.

Each can be imported where its framework is installed; none is imported by tilestep itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from ..optimizer import Optimizer


def require(name: str) -> None:
    """Raise unless a framework can be imported.

    Args:
        name: of its package.

    Raises:
        ImportError: naming what to install.
    """
    try:
        importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(
            f"tilestep.integrations.{package} needs {package}: pip install {package}, or pip install "
            f"'tilestep[frameworks]' for all of them ({error})",
            name=package,
        ) from error


def plain_optimizer(optimizer: Any) -> Optimizer | None:
    """The tilestep optimizer inside a framework's wrappers, which call what they wrap `optimizer`; None for others."""
    while optimizer is not None and not isinstance(optimizer, Optimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


def set_max_grad_norm(optimizers: Iterable[Optimizer], max_norm: float | None) -> None:
    """Have optimizers clip inside their steps; groups that have a limit of their own keep it.

    Args:
        optimizers: the optimizers.
        max_norm: the largest norm; None and 0 change nothing.
    """
    for optimizer in optimizers if max_norm else ():
        for group in optimizer.param_groups:
            if group.get("max_grad_norm") is None:
                group["max_grad_norm"] = max_norm
