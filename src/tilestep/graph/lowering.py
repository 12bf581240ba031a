"""What each ATen operation means in the graph; everything else is decomposed by torch or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .ir import Builder, Value

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
    if rounding_mode == "floor":
        return _floor_div(build, _number(build, left), _number(build, right))
    quotient = _div(build, left, right)
    return quotient if rounding_mode is None else build.apply(rounding_mode, quotient)


def _floor_div(build: Builder, left: Value, right: Value) -> Value:
    """As Python's `//`: of the exact quotient, which may be rounded up to a whole number otherwise."""
    zero, one = build.constant(0.0), build.constant(1.0)
    rest = build.apply("fmod", left, right)
    quotient = _div(build, _sub(build, left, rest), right)
    signs_differ = build.apply("ne", _to_number(build, "lt", right, zero), _to_number(build, "lt", rest, zero))
    below = build.apply("and", build.apply("ne", rest, zero), signs_differ)
    quotient = build.apply("where", below, _sub(build, quotient, one), quotient)
    floored = build.apply("floor", quotient)
    too_low = build.apply("gt", _sub(build, quotient, floored), build.constant(0.5))
    floored = build.apply("where", too_low, _add(build, floored, one), floored)
    plain = _div(build, left, right)
    floored = build.apply("where", build.apply("eq", quotient, zero), build.apply("copysign", zero, plain), floored)
    return build.apply("where", build.apply("eq", right, zero), plain, floored)


def _to_number(build: Builder, comparison: str, left: Value, right: Value) -> Value:
    return build.apply("number", build.apply(comparison, left, right))


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


def _silu(build: Builder, value: Any) -> Value:
    return _div(build, value, _add(build, 1.0, build.apply("exp", build.apply("neg", _number(build, value)))))


def _hard_sigmoid(build: Builder, value: Any) -> Value:
    return _div(build, _lower_clamp(build, _add(build, value, 3.0), 0.0, 6.0), 6.0)


def _logit(build: Builder, value: Any, eps: Any = None) -> Value:
    inside = _number(build, value) if eps is None else _lower_clamp(build, value, eps, 1.0 - eps)
    return build.apply("log", _div(build, inside, _sub(build, 1.0, inside)))


def _rounded(build: Builder, value: Any, decimals: int = 0) -> Value:
    if not decimals:
        return build.apply("round", _number(build, value))
    power = float(10 ** abs(decimals))
    up, down = (_mul, _div) if decimals > 0 else (_div, _mul)
    return down(build, build.apply("round", up(build, value, power)), power)


def _hypot(build: Builder, left: Any, right: Any) -> Value:
    """By the larger of the two, so that no square overflows."""
    left, right = (build.apply("abs", _number(build, side)) for side in (left, right))
    large, small = _maximum(build, left, right), _minimum(build, left, right)
    ratio = _div(build, small, large)
    length = _mul(build, large, build.apply("sqrt", _add(build, 1.0, _mul(build, ratio, ratio))))
    endless = build.apply("or", build.apply("isinf", left), build.apply("isinf", right))
    length = build.apply("where", build.apply("eq", large, build.constant(0.0)), large, length)
    return build.apply("where", endless, build.constant(math.inf), length)


def _logaddexp(function: str, correction: float) -> Lowering:
    def lower(build: Builder, left: Any, right: Any) -> Value:
        larger = _maximum(build, left, right)
        gap = build.apply("neg", build.apply("abs", _sub(build, left, right)))
        more = _mul(build, build.apply("log1p", build.apply(function, gap)), correction)
        return build.apply("where", build.apply("isinf", larger), larger, _add(build, larger, more))

    return lower


def _unless_nan(extremum: Lowering) -> Lowering:
    """The extremum of what is a number."""

    def lower(build: Builder, left: Any, right: Any) -> Value:
        left, right = _number(build, left), _number(build, right)
        both = build.apply("where", build.apply("isnan", right), left, extremum(build, left, right))
        return build.apply("where", build.apply("isnan", left), right, both)

    return lower


def _signbit(build: Builder, value: Any) -> Value:
    return build.apply("lt", build.apply("copysign", build.constant(1.0), _number(build, value)), build.constant(0.0))


def _angle(build: Builder, value: Any) -> Value:
    number, zero = _number(build, value), build.constant(0.0)
    angle = build.apply("where", build.apply("lt", number, zero), build.constant(math.pi), zero)
    return build.apply("where", build.apply("isnan", number), number, angle)


def _polynomial(build: Builder, value: Value, coefficients: Sequence[float]) -> Value:
    """By Horner's scheme, from the highest power."""
    total = build.constant(coefficients[0])
    for coefficient in coefficients[1:]:
        total = _add(build, _mul(build, total, value), coefficient)
    return total


_ERFINV = (
    ((-0.140543331, 0.914624893, -1.645349621, 0.886226899), (0.012229801, -0.329097515, 1.442710462, -2.118377725, 1)),
    ((1.641345311, 3.429567803, -1.624906493, -1.970840454), (1.637067800, 3.543889200, 1)),
)
"""Rational functions of the middle and of the tails, as in torch's aten/src/ATen/native/Math.h."""


def _erfinv(build: Builder, value: Any) -> Value:
    """A rational function and two of Newton's steps."""
    number = _number(build, value)
    magnitude = build.apply("abs", number)
    far = build.apply("sqrt", build.apply("neg", build.apply("log", _div(build, _sub(build, 1.0, magnitude), 2.0))))
    quotients = [
        _div(build, *(_polynomial(build, argument, side) for side in sides))
        for argument, sides in zip((_mul(build, number, number), far), _ERFINV)
    ]
    tail = build.apply("copysign", quotients[1], number)
    near = build.apply("le", magnitude, build.constant(0.7))
    root = build.apply("where", near, _mul(build, number, quotients[0]), tail)
    for _ in range(2):
        slope = _mul(build, 2 / math.sqrt(math.pi), build.apply("exp", build.apply("neg", _mul(build, root, root))))
        root = _sub(build, root, _div(build, _sub(build, build.apply("erf", root), number), slope))
    pole = build.apply("eq", magnitude, build.constant(1.0))
    return build.apply("where", pole, build.apply("copysign", build.constant(math.inf), number), root)


def _normal_distribution(build: Builder, value: Any) -> Value:
    return _mul(build, 0.5, build.apply("erfc", _mul(build, value, -math.sqrt(0.5))))


_DIGAMMA = (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)
"""Bernoulli's numbers over twice their index, from the seventh."""


def _digamma(build: Builder, value: Any) -> Value:
    """Reflected to the right of zero, moved beyond ten, and by its asymptotic series there."""
    number, zero = _number(build, value), build.constant(0.0)
    is_left = build.apply("lt", number, zero)
    right = build.apply("where", is_left, _sub(build, 1.0, number), number)
    moved: Value = build.constant(0.0)
    for distance in range(10):
        moved = _add(build, moved, _div(build, 1.0, _add(build, right, float(distance))))
    beyond = _add(build, right, 10.0)
    inverse = _div(build, 1.0, beyond)
    squared = _mul(build, inverse, inverse)
    series = _mul(build, squared, _polynomial(build, squared, _DIGAMMA))
    total = _sub(build, build.apply("log", beyond), _mul(build, 0.5, inverse))
    total = _sub(build, _sub(build, total, series), moved)
    angle = _mul(build, math.pi, _sub(build, number, build.apply("round", number)))
    reflected = _sub(build, total, _div(build, math.pi, build.apply("tan", angle)))
    whole = build.apply("eq", number, build.apply("floor", number))
    reflected = build.apply("where", whole, build.constant(math.nan), reflected)
    result = build.apply("where", is_left, reflected, total)
    pole = build.apply("copysign", build.constant(math.inf), build.apply("neg", number))
    return build.apply("where", build.apply("eq", number, zero), pole, result)


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
    **{name: _numeric(name) for name in ("cos", "tanh", "erf", "floor", "ceil", "trunc", "sign", "mul")},
    **{name: _numeric(name) for name in ("remainder", "fmod", "atan2", "copysign", "maximum", "minimum", "isnan")},
    **{name: _numeric(name) for name in ("isinf", "lt", "le", "gt", "ge", "eq", "ne", "log10", "tan", "asin", "acos")},
    **{name: _numeric(name) for name in ("atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erfc", "lgamma")},
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
    "round": _rounded,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "hardsigmoid": _hard_sigmoid,
    "hardswish": lambda build, value: _mul(build, value, _hard_sigmoid(build, value)),
    "logit": _logit,
    "hypot": _hypot,
    "logaddexp": _logaddexp("exp", 1.0),
    "logaddexp2": _logaddexp("exp2", 1 / math.log(2)),
    "fmax": _unless_nan(_maximum),
    "fmin": _unless_nan(_minimum),
    "signbit": _signbit,
    "angle": _angle,
    "ldexp": lambda build, value, power: _mul(build, value, build.apply("exp2", _number(build, power))),
    "erfinv": _erfinv,
    "digamma": _digamma,
    "special_ndtr": _normal_distribution,
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

_OTHER_NAMES = {
    **{"true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "negative": "neg", "fix": "trunc"},
    **{"absolute": "abs", "clip": "clamp", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le"},
    **{"not_equal": "ne", "arctan2": "atan2", "special_expit": "sigmoid", "special_expm1": "expm1"},
}
LOWERINGS.update({other: LOWERINGS[name] for other, name in _OTHER_NAMES.items()})
