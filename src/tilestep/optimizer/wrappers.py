"""Wrappers whose class a framework derives from the optimizer's class: they forward to the wrapped optimizer."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..placement.combinations import WRAPPED

_SET_BY_SCALERS = ("grad_scale", "found_inf")


def forward_to_wrapped(kind: type) -> None:
    """Forward attributes to the wrapped optimizer, in a class whose method resolution order has a wrapper first.

    Lightning and Fabric create such classes so that `isinstance` holds. Their objects have no attributes of an
    optimizer and forward missing attributes in `__getattr__`; methods and defaults of the optimizer's class are not
    missing, and would read and set attributes of the wrapper.
    """
    optimizers = [base for base in kind.__mro__ if issubclass(base, torch.optim.Optimizer) and base is not kind]
    wrappers = kind.__mro__[1 : kind.__mro__.index(optimizers[0])]
    if not any({"__init__", "__getattr__"} <= vars(base).keys() for base in wrappers):
        return
    defined = {name for base in wrappers for name in vars(base)}
    names = {name for base in optimizers for name in vars(base) if not name.startswith("__")}
    for name in names.union(_SET_BY_SCALERS) - defined:
        setattr(kind, name, _forwarded(name))


def _forwarded(name: str) -> property:
    def get(wrapper: Any) -> Any:
        value = getattr(_bound(wrapper).__self__, name)
        return (WRAPPED, *value) if name == "attached" else value

    return property(
        get,
        lambda wrapper, value: setattr(_bound(wrapper).__self__, name, value),
        lambda wrapper: delattr(_bound(wrapper).__self__, name),
    )


_bound = operator.methodcaller("__getattr__", "add_param_group")
