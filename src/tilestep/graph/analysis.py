"""Static analysis of graphs: which states are never negative, and the change of the parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .ir import GLOBAL_REDUCTIONS, REDUCTIONS, Builder, Graph, Level, Value, ancestors
from .lowering import LOWERINGS

Bounds = tuple[float, float]  # lower and upper bound of a number

_ANY: Bounds = (-math.inf, math.inf)
_POSITIVE: Bounds = (0.0, math.inf)


_KEEP_THE_SIGN = {"number", "round", "floor", "trunc", "ceil", "sign", *REDUCTIONS, *GLOBAL_REDUCTIONS}


def never_negative(graph: Graph, state: str, hypers: Mapping[str, Bounds] | None = None) -> bool:
    """Whether a state stays non-negative once it is: a composition of sums, products and maxima of squares."""
    output = graph.outputs.get(state)
    if output is None:
        return False
    bounds: dict[int, Bounds] = {}
    for value in ancestors([output]):
        bounds[id(value)] = _bounds(value, bounds, state, hypers or {})
    return bounds[id(output)][0] >= 0


def _bounds(value: Value, bounds: Mapping[int, Bounds], state: str, hypers: Mapping[str, Bounds]) -> Bounds:
    operation = value.operation
    args = [bounds[id(arg)] for arg in value.args]
    if operation == "constant":
        return (float(value.attribute), float(value.attribute)) if not math.isnan(value.attribute) else _ANY
    if operation == "load":
        return _POSITIVE if value.attribute == state else _ANY
    if operation == "hyper":
        if value.attribute == "step":
            return (1.0, math.inf)
        return hypers.get(value.attribute, _POSITIVE if value.attribute in ("gradient_scale", "numel") else _ANY)
    if operation in ("abs", "sqrt", "exp", "exp2", "rsqrt"):
        return _POSITIVE
    if operation in _KEEP_THE_SIGN and args[0][0] >= 0:
        return _POSITIVE if operation != "number" else args[0]
    if operation == "neg":
        return (-args[0][1], -args[0][0])
    if operation == "add":
        mixed = _mixed(value, bounds)
        return mixed or (_sum(args[0][0], args[1][0]), _sum(args[0][1], args[1][1]))
    if operation == "sub":
        return (_sum(args[0][0], -args[1][1]), _sum(args[0][1], -args[1][0]))
    if operation == "mul":
        return _product(value, args, bounds)
    if operation == "div":
        return _POSITIVE if args[0][0] >= 0 and args[1][0] >= 0 else _ANY
    if operation == "pow":
        is_even = value.args[1].operation == "constant" and value.args[1].attribute % 2 == 0
        return _POSITIVE if is_even or args[0][0] >= 0 else _ANY
    if operation == "maximum":
        return (max(args[0][0], args[1][0]), max(args[0][1], args[1][1]))
    if operation == "minimum":
        return (min(args[0][0], args[1][0]), min(args[0][1], args[1][1]))
    if operation == "where":
        return (min(args[1][0], args[2][0]), max(args[1][1], args[2][1]))
    return _ANY


def _sum(left: float, right: float) -> float:
    total = left + right
    return -math.inf if math.isnan(total) else total


def _product(value: Value, args: list[Bounds], bounds: Mapping[int, Bounds]) -> Bounds:
    """A product: non-negative if every factor is, apart from factors that occur in pairs."""
    single: dict[int, Value] = {}
    for factor in _factors(value):
        if single.pop(id(factor), None) is None:
            single[id(factor)] = factor
    if not all(bounds[id(factor)][0] >= 0 for factor in single.values()):
        return _ANY
    if len(single) < len(_factors(value)):
        return _POSITIVE
    (low, high), (other_low, other_high) = args
    if low < 0 or other_low < 0:
        return _POSITIVE
    return (low * other_low, high * other_high) if math.isfinite(high * other_high) else _POSITIVE


def _factors(value: Value) -> list[Value]:
    if value.operation != "mul":
        return [value]
    return [factor for arg in value.args for factor in _factors(arg)]


def _mixed(value: Value, bounds: Mapping[int, Bounds]) -> Bounds | None:
    """Bounds of a linear interpolation: a + weight * (b - a) with a weight from 0 to 1."""
    for begin, moved in (value.args, value.args[::-1]):
        if moved.operation != "mul":
            continue
        for weight, way in (moved.args, moved.args[::-1]):
            low, high = bounds[id(weight)]
            if way.operation == "sub" and way.args[1] is begin and low >= 0 and high <= 1:
                ends = (bounds[id(begin)], bounds[id(way.args[0])])
                return (min(low for low, _ in ends), max(high for _, high in ends))
    return None


def difference(build: Builder, new: Value, old: Value) -> Value:
    """Return `new - old`, simplified if `new` is `old` scaled or with a term added."""
    moved = _moved(build, new, old)
    return build.apply("sub", new, old) if moved is None else moved


def _moved(build: Builder, value: Value, old: Value) -> Value | None:
    """Return `value - old`, or None if `value` is not derived from `old`."""
    if value is old:
        return build.constant(0.0)
    if value.operation == "add":
        for base, added in sorted([value.args, value.args[::-1]], key=lambda pair: pair[0] is not old):
            moved = _moved(build, base, old)
            if moved is not None:
                return added if _is_number(moved, 0.0) else build.apply("add", moved, added)
        return None
    if value.operation == "sub":
        moved = _moved(build, value.args[0], old)
        return None if moved is None else _subtract(build, moved, value.args[1])
    if value.operation in ("mul", "div"):
        return _scaled_moved(build, value, old)
    if value.operation == "where":
        condition, *branches = value.args
        if_true, if_false = (_moved(build, branch, old) for branch in branches)
        return None if if_true is None or if_false is None else build.apply("where", condition, if_true, if_false)
    return None


def _scaled_moved(build: Builder, value: Value, old: Value) -> Value | None:
    """(old + d) * f - old = old * (f - 1) + d * f, and (old + d) / f - old = (d - old * (f - 1)) / f."""
    is_product = value.operation == "mul"
    for base, factor in (value.args, value.args[::-1]) if is_product else (value.args,):
        moved = _moved(build, base, old) if factor.level <= Level.TENSOR else None
        if moved is None:
            continue
        less_one = build.apply("sub", factor, build.constant(1.0))
        if factor.operation == "sub" and _is_number(factor.args[0], 1.0):
            less_one = build.apply("neg", factor.args[1])
        elif factor.operation == "add" and any(_is_number(arg, 1.0) for arg in factor.args):
            less_one = factor.args[_is_number(factor.args[0], 1.0)]
        # A factor of 1 moves nothing, not even an infinite number, whose product with 0 would be NaN.
        zero = build.constant(0.0)
        kept = build.apply("where", build.apply("eq", less_one, zero), zero, old)
        pulled = build.apply("mul", kept, less_one)
        if not is_product:
            return build.apply("div", _subtract(build, moved, pulled), factor)
        return pulled if _is_number(moved, 0.0) else build.apply("add", pulled, build.apply("mul", moved, factor))
    return None


def _subtract(build: Builder, left: Value, right: Value) -> Value:
    return build.apply("neg", right) if _is_number(left, 0.0) else build.apply("sub", left, right)


def _is_number(value: Value, number: float) -> bool:
    return value.operation == "constant" and value.attribute == number


LOWERINGS["displacement"] = difference
