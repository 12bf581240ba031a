"""What `shard`, `overlap` and `offload` attach to an optimizer: its class stays the one that the user has made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .optimizer import Optimizer


class AttachedType(type):
    """A kind of optimizers by what is attached to them: `isinstance` asks for that, and it makes no objects."""

    # Its classes name in `attached_as` what `combinations.REFUSED` calls it.

    attached_as: Iterable[str] = ()

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Optimizer) and any(name in instance.attached for name in cls.attached_as)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{cls.__name__} is what an optimizer is called to which something is attached: {cls.__doc__}")


def resolve_optimizer(caller: str, optimizer: Optimizer | Callable[[], Optimizer]) -> Optimizer:
    """An optimizer, or what a function makes."""
    if not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer):
        optimizer = optimizer()
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{caller}() takes an optimizer of tilestep's, not {type(optimizer).__name__}")
    return optimizer
