"""Calls that `torch.compile` does not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")


def opaque(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """A Python function as one call that compilers leave alone; compilers are not imported before it is called.

    Where torch has no such wrapper, they are imported at once.

    Example:
        >>> opaque(lambda one, other: one + other)(1, 2)
        3
    """
    lazily = getattr(torch, "_disable_dynamo", None)
    return torch.compiler.disable(function) if lazily is None else lazily(function)
