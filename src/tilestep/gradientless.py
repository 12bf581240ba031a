"""Methods that run without gradients, at little cost where there are none already."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")


def gradientless(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """As the decorator `torch.no_grad()`, which makes, enters and leaves a block even inside of another one.

    Example:
        >>> import torch
        >>> gradientless(torch.is_grad_enabled)()
        False
        >>> torch.is_grad_enabled()
        True
    """

    @functools.wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return called
