"""Number functions that also accept 0-dim tensors, so that a rule can use `math.sqrt(1 - beta2**step)`."""

from __future__ import annotations

import builtins
import functools
import math
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import RuleError

global_reduce: ContextVar[Callable[[str, Any], Any] | None] = ContextVar("global_reduce", default=None)
"""Combines a 0-dim value over all parameters, given "sum" or "max" and the value; set by the tracer."""

precision_of: ContextVar[Callable[[Any], Any] | None] = ContextVar("precision_of", default=None)
"""The machine epsilon of the dtype that a buffer is stored in; set if the rule computes in another dtype."""

_TORCH_NAMES = {"fabs": "abs", "pow": "pow", "copysign": "copysign"}


def is_traced(value: Any) -> bool:
    """Whether torch's functions accept a value: a tensor, or a number in a traced function of floats."""
    return hasattr(type(value), "__torch_function__")


def where(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Select by a condition that may be a Python bool, a 0-dim value or a tensor; `torch.where` for all of them.

    Args:
        condition: a bool, or a bool tensor of any shape.
        if_true: a number or tensor, used where the condition holds.
        if_false: a number or tensor, used elsewhere.

    Example:
        >>> where(True, 1.0, 2.0), where(torch.tensor([True, False]), 1.0, 2.0).tolist()
        (1.0, [1.0, 2.0])
    """
    if is_traced(condition):
        return torch.where(condition, if_true, if_false)
    return if_true if condition else if_false


def decayed(grad: Any, param: Any, weight_decay: Any) -> Any:
    """Add the gradient of an L2 penalty; without a penalty return the gradient unchanged, also for infinite weights."""
    return torch.where(weight_decay == 0, grad, grad + weight_decay * param)


def sum_over_tensors(value: Any) -> Any:
    """The sum of a 0-dim value over all parameters of the optimizer; called outside an optimizer, the value itself.

    Args:
        value: a 0-dim tensor, such as a reduction over this parameter.

    Raises:
        RuleError: if the value has dimensions.

    Example:
        >>> gradient = torch.tensor([3.0, 4.0])
        >>> sum_over_tensors((gradient * gradient).sum()).sqrt()
        tensor(5.)
    """
    return _across("sum", value)


def max_over_tensors(value: Any) -> Any:
    """The maximum of a 0-dim value over all parameters of the optimizer; called outside an optimizer, the value.

    Args:
        value: a 0-dim tensor, such as a reduction over this parameter.

    Raises:
        RuleError: if the value has dimensions.

    Example:
        >>> max_over_tensors(torch.tensor([-3.0, 2.0]).abs().amax())
        tensor(3.)
    """
    return _across("max", value)


def machine_epsilon(param: Any) -> Any:
    """The machine epsilon of a parameter's storage dtype, or of its master's.

    Inside a rule every value is float32 or float64, so `torch.finfo(param.dtype)` does not describe the storage.

    Args:
        param: the rule's parameter.

    Example:
        >>> machine_epsilon(torch.ones(3, dtype=torch.bfloat16))
        0.0078125
    """
    epsilon_of = precision_of.get()
    return torch.finfo(param.dtype).eps if epsilon_of is None else epsilon_of(param)


def _across(kind: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        raise RuleError(
            f"{kind}_over_tensors requires one number per parameter, not a tensor of shape "
            f"{tuple(value.shape)}: reduce it first, for example with .sum()"
        )
    combine = global_reduce.get()
    return value if combine is None else combine(kind, value)


def _lift(number_function: Callable[..., Any], tensor_function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(number_function)
    def lifted(*args: Any) -> Any:
        if any(map(is_traced, args)):
            return tensor_function(*args)
        return number_function(*args)

    return lifted


def _extremum(builtin: Callable[..., Any], of_tensors: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(builtin)
    def extremum(*args: Any, **options: Any) -> Any:
        entries = tuple(args[0]) if len(args) == 1 and not isinstance(args[0], torch.Tensor) else args
        tensors = [entry for entry in entries if isinstance(entry, torch.Tensor)]
        if not tensors or options:
            return builtin(*args, **options)
        lifted = [entry if isinstance(entry, torch.Tensor) else torch.full_like(tensors[0], entry) for entry in entries]
        return functools.reduce(of_tensors, lifted)

    return extremum


def _lifted_math() -> dict[str, Callable[..., Any]]:
    lifted = {}
    for name in dir(math):
        tensor_function = getattr(torch, _TORCH_NAMES.get(name, name), None)
        if callable(getattr(math, name)) and callable(tensor_function):
            lifted[name] = _lift(getattr(math, name), tensor_function)
    return lifted


class _NumberType(type):
    """The metaclass of `float` in a rule: 0-dim float64 tensors, such as hyperparameters, are instances too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if not isinstance(instance, torch.Tensor):
            return isinstance(instance, builtins.float) or is_traced(instance)
        return instance.dim() == 0 and instance.dtype is torch.float64


class _Float(builtins.float, metaclass=_NumberType):
    def __new__(cls, *args: Any) -> Any:
        return args[0] if args and is_traced(args[0]) else builtins.float(*args)


_MATH = _lifted_math()
_MATH_MODULE = types.SimpleNamespace(**{**vars(math), **_MATH})
_BUILTINS = {
    "max": _extremum(builtins.max, torch.maximum),
    "min": _extremum(builtins.min, torch.minimum),
    "abs": _lift(builtins.abs, torch.abs),
    "float": _Float,
}


def scalar_globals(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with `math`, `min`, `max`, `abs` and `float` replaced by versions that accept 0-dim tensors."""
    if not isinstance(function, types.FunctionType):
        return function
    names: dict[str, Any] = dict(_BUILTINS)
    names.update(function.__globals__)
    by_identity = {id(getattr(math, name)): lifted for name, lifted in _MATH.items()}
    for name, value in function.__globals__.items():
        if value is math:
            names[name] = _MATH_MODULE
        elif id(value) in by_identity:
            names[name] = by_identity[id(value)]
    bound = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


class ScalarCalls(TorchFunctionMode):
    """Accepts 0-dim float64 tensors where torch expects numbers or equal dtypes: `alpha=`, `value=`, and `lerp`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "").rstrip("_")
        factor = kwargs.get("alpha", kwargs.get("value"))
        if isinstance(factor, torch.Tensor) and name in ("add", "sub", "addcmul", "addcdiv"):
            kwargs.pop("alpha", None)
            kwargs.pop("value", None)
            args = list(args)
            args[1] = args[1] * factor
        if name == "lerp" and "out" not in kwargs:
            operands = [*args, *(kwargs[key] for key in ("input", "end", "weight") if key in kwargs)]
            start, end, weight = operands
            if any(isinstance(operand, torch.Tensor) and operand.dtype != start.dtype for operand in (end, weight)):
                result = start + weight * (end - start)
                return start.copy_(result) if func.__name__.endswith("_") else result
        return func(*args, **kwargs)
