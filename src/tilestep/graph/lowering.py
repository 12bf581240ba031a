"""What each ATen operation means in the graph; everything else is decomposed by torch or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .ir import Builder, Value

__all__ = ["LOWERINGS", "Lowering", "Unsupported"]

Lowering = Callable[..., Value]


class Unsupported(Exception):
    """An operation has no translation; the text says what would work."""


def _as_value(build: Builder, item: Any) -> Value:
    return item if isinstance(item, Value) else build.constant(item)


def _number(build: Builder, item: Any) -> Value:
    value = _as_value(build, item)
    if value.operation == "constant" and value.is_bool:
        return build.constant(float(value.attribute))
    return build.apply("number", value) if value.is_bool else value


def _truth(build: Builder, item: Any) -> Value:
    value = _as_value(build, item)
    return value if value.is_bool else build.apply("ne", value, build.constant(0.0))


def _numeric(operation: str) -> Lowering:
    def lower(build: Builder, *args: Any) -> Value:
        return build.apply(operation, *(_number(build, arg) for arg in args))

    return lower


def _logical(operation: str) -> Lowering:
    def lower(build: Builder, *args: Any) -> Value:
        return build.apply(operation, *(_truth(build, arg) for arg in args))

    return lower


_add, _sub, _mul, _div, _pow = (_numeric(name) for name in ("add", "sub", "mul", "div", "pow"))
_maximum, _minimum = _numeric("maximum"), _numeric("minimum")


def _is_one(number: Any) -> bool:
    return not isinstance(number, Value) and number == 1


def _scaled(build: Builder, value: Any, factor: Any) -> Value:
    return _number(build, value) if _is_one(factor) else _mul(build, value, factor)


def _lower_add(build: Builder, left: Any, right: Any, alpha: Any = 1) -> Value:
    if all(isinstance(item, bool) or (isinstance(item, Value) and item.is_bool) for item in (left, right)):
        return build.apply("or", _truth(build, left), _truth(build, right))
    return _add(build, left, _scaled(build, right, alpha))


def _lower_sub(build: Builder, left: Any, right: Any, alpha: Any = 1) -> Value:
    return _sub(build, left, _scaled(build, right, alpha))


def _lower_rsub(build: Builder, left: Any, right: Any, alpha: Any = 1) -> Value:
    return _sub(build, right, _scaled(build, left, alpha))


def _lower_div(build: Builder, left: Any, right: Any, rounding_mode: str | None = None) -> Value:
    quotient = _div(build, left, right)
    return quotient if rounding_mode is None else build.apply(rounding_mode, quotient)


def _lower_pow(build: Builder, base: Any, exponent: Any) -> Value:
    power = exponent.attribute if isinstance(exponent, Value) and exponent.operation == "constant" else exponent
    if not isinstance(power, Value):
        value = _number(build, base)
        if power == 2:
            return build.apply("mul", value, value)
        if power == 3:
            return build.apply("mul", build.apply("mul", value, value), value)
        if power == 0.5:
            return build.apply("sqrt", value)
        if power == -1:
            return _div(build, 1.0, value)
        if power == -0.5:
            return _div(build, 1.0, build.apply("sqrt", value))
    return _pow(build, base, exponent)


def _lower_lerp(build: Builder, start: Any, end: Any, weight: Any) -> Value:
    return _add(build, start, _mul(build, weight, _sub(build, end, start)))


def _lower_addcmul(build: Builder, value: Any, left: Any, right: Any, *, value_: Any = 1) -> Value:
    return _add(build, value, _mul(build, _scaled(build, left, value_), right))


def _lower_addcdiv(build: Builder, value: Any, left: Any, right: Any, *, value_: Any = 1) -> Value:
    return _add(build, value, _scaled(build, _div(build, left, right), value_))


def _lower_clamp(build: Builder, value: Any, low: Any = None, high: Any = None, **named: Any) -> Value:
    low, high = named.get("min", low), named.get("max", high)
    result = _number(build, value)
    if low is not None:
        result = _maximum(build, result, low)
    if high is not None:
        result = _minimum(build, result, high)
    return result


def _lower_where(build: Builder, condition: Any, if_true: Any, if_false: Any) -> Value:
    return build.apply("where", _truth(build, condition), _number(build, if_true), _number(build, if_false))


def _reciprocal(build: Builder, value: Any) -> Value:
    return _div(build, 1.0, value)


def _sigmoid(build: Builder, value: Any) -> Value:
    return _div(build, 1.0, _add(build, 1.0, build.apply("exp", build.apply("neg", _number(build, value)))))


def _isfinite(build: Builder, value: Any) -> Value:
    number = _number(build, value)
    return build.apply("not", build.apply("or", build.apply("isnan", number), build.apply("isinf", number)))


def _nan_to_num(build: Builder, value: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Value:
    largest = torch.finfo(torch.float32).max
    number = _number(build, value)
    bounded = _lower_clamp(build, number, -largest if neginf is None else None, largest if posinf is None else None)
    for limit, sign in ((posinf, "gt"), (neginf, "lt")):
        if limit is not None:
            infinite = build.apply("and", build.apply("isinf", number), build.apply(sign, number, build.constant(0.0)))
            bounded = build.apply("where", infinite, build.constant(limit), bounded)
    return build.apply("where", build.apply("isnan", number), build.constant(nan or 0.0), bounded)


def _same(build: Builder, value: Any, *_: Any, **__: Any) -> Value:
    return _as_value(build, value)


def _filled(number: float | None) -> Lowering:
    def lower(build: Builder, value: Any, fill: Any = None, *_: Any, **__: Any) -> Value:
        return _as_value(build, fill if number is None else number)

    return lower


def _cast(build: Builder, value: Any, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Value:
    if dtype in (torch.float16, torch.bfloat16):
        raise Unsupported("a cast to a 16-bit type inside a rule; leave rounding to the storage of the buffer")
    if dtype is torch.bool:
        return _truth(build, value)
    if dtype is None:
        return _as_value(build, value)
    number = _number(build, value)
    return number if dtype.is_floating_point else build.apply("trunc", number)


def _copy(build: Builder, value: Any, source: Any, *_: Any, **__: Any) -> Value:
    return _number(build, source)


LOWERINGS: dict[str, Lowering] = {
    **{name: _numeric(name) for name in ("neg", "abs", "sqrt", "exp", "exp2", "expm1", "log", "log2", "log1p", "sin")},
    **{name: _numeric(name) for name in ("cos", "tanh", "erf", "floor", "ceil", "round", "trunc", "sign", "mul")},
    **{name: _numeric(name) for name in ("remainder", "fmod", "atan2", "copysign", "maximum", "minimum", "isnan")},
    **{name: _numeric(name) for name in ("isinf", "lt", "le", "gt", "ge", "eq", "ne")},
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_not": _logical("not"),
    "logical_xor": lambda build, left, right: _logical("or")(
        build,
        _logical("and")(build, left, _logical("not")(build, right)),
        _logical("and")(build, right, _logical("not")(build, left)),
    ),
    "bitwise_and": _logical("and"),
    "bitwise_or": _logical("or"),
    "bitwise_not": _logical("not"),
    "sgn": _numeric("sign"),
    "add": _lower_add,
    "sub": _lower_sub,
    "rsub": _lower_rsub,
    "div": _lower_div,
    "pow": _lower_pow,
    "square": lambda build, value: _mul(build, value, value),
    "rsqrt": _numeric("rsqrt"),
    "reciprocal": _reciprocal,
    "sigmoid": _sigmoid,
    "relu": lambda build, value: _maximum(build, value, 0.0),
    "lerp": _lower_lerp,
    "addcmul": lambda build, base, left, right, value=1: _lower_addcmul(build, base, left, right, value_=value),
    "addcdiv": lambda build, base, left, right, value=1: _lower_addcdiv(build, base, left, right, value_=value),
    "clamp": _lower_clamp,
    "clamp_min": lambda build, value, low: _maximum(build, value, low),
    "clamp_max": lambda build, value, high: _minimum(build, value, high),
    "where": _lower_where,
    "masked_fill": lambda build, value, mask, fill: _lower_where(build, mask, fill, value),
    "isfinite": _isfinite,
    "nan_to_num": _nan_to_num,
    **{name: _same for name in ("clone", "detach", "alias", "lift_fresh", "lift_fresh_copy", "contiguous")},
    "_to_copy": _cast,
    "copy": _copy,
    "empty_like": _filled(math.nan),  # whatever is read before it is written
    "zeros_like": _filled(0.0),
    "ones_like": _filled(1.0),
    "full_like": _filled(None),
    "zero": _filled(0.0),
    "fill": _filled(None),
    "scalar_tensor": _same,
}
"""Name of an ATen operation to its meaning; in-place spellings use the entry of the out-of-place one."""
