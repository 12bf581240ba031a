"""Integrations with training frameworks, and readers of checkpoints of other optimizers.

`accelerate`, `lightning`, `torchtitan` and `transformers` need their framework; tilestep does not import them.
`checkpoints` needs no other library; `import tilestep` registers its readers.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
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
    """The tilestep optimizer inside a framework's wrappers, which have an `optimizer`; None for other optimizers."""
    while optimizer is not None and not isinstance(optimizer, Optimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


Places = Sequence[tuple[Optimizer, int]]  # param groups by index, since loading a checkpoint replaces them


def without_limit(optimizers: Iterable[Optimizer], max_norm: float | None = None) -> Places:
    """Param groups without a limit, or with the framework's limit.

    Args:
        optimizers: the optimizers, before they load a checkpoint.
        max_norm: the framework's limit.
    """
    own = [(optimizer, index, group) for optimizer in optimizers for index, group in enumerate(optimizer.param_groups)]
    return [(optimizer, index) for optimizer, index, group in own if group.get("max_grad_norm") in (None, max_norm)]


def set_max_grad_norm(places: Places, max_norm: float | None) -> None:
    """Set the framework's limit on groups, which overrides the limit of a checkpoint.

    Args:
        places: the groups.
        max_norm: the largest norm; None and 0 clip nothing.
    """
    for optimizer, index in places:
        group = optimizer.param_groups[index]
        group.pop("max_grad_norm", None)
        if max_norm:
            group["max_grad_norm"] = max_norm
