"""Integrations with training frameworks, and readers of checkpoints of other optimizers.

`accelerate`, `lightning`, `torchtitan` and `transformers` need their framework; tilestep does not import them.
`checkpoints` needs no other library; `import tilestep` registers its readers.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

from ..optimizer import Optimizer, named_optimizers


def require(name: str) -> None:
    """Raise unless a framework can be imported.

    Args:
        name: the name of its package.

    Raises:
        ImportError: with the package to install.
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
    """The tilestep optimizer inside a framework's wrappers, by their `optimizer`; None for other optimizers."""
    while optimizer is not None and not isinstance(optimizer, Optimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


def is_sharded(optimizer: Any) -> bool:
    """Whether an optimizer, possibly in a framework's wrapper, is a sharded tilestep optimizer."""
    own = plain_optimizer(optimizer)
    return own is not None and "shard" in own.attached


def own_optimizers(optimizers: Iterable[Any]) -> list[Optimizer]:
    """The tilestep optimizers inside a framework's optimizers."""
    return [own for own in map(plain_optimizer, optimizers) if own is not None]


def named_kind(name: str, error: type[Exception]) -> type[Optimizer]:
    """The class of an optimizer by name; raises the framework's error for an unknown name."""
    kinds = named_optimizers()
    if name not in kinds:
        raise error(f"tilestep has no optimizer {name!r}; it has {', '.join(sorted(kinds))}")
    return kinds[name]


Places = Sequence[tuple[Optimizer, int]]  # param groups by index, since loading a checkpoint replaces them


def without_limit(optimizers: Iterable[Optimizer], max_norm: float | None = None) -> Places:
    """Param groups without a limit, or with the framework's limit.

    Args:
        optimizers: the optimizers, before they load a checkpoint.
        max_norm: the framework's limit.
    """
    return [
        (optimizer, index)
        for optimizer in optimizers
        for index, group in enumerate(optimizer.param_groups)
        if group.get("max_grad_norm") in (None, max_norm)
    ]


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
