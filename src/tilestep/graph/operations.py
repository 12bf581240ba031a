"""The operations a graph may hold, with their meaning on Python numbers; backends give each its spelling."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Operation:
    """One operation: how to compute it on numbers (None for reductions) and whether it yields a truth value."""

    evaluate: Callable[..., Any] | None
    is_bool: bool = False


def _sign(number: float) -> float:
    return float((number > 0) - (number < 0))


def _maximum(left: float, right: float) -> float:
    return left if left > right or math.isnan(left) else right


def _minimum(left: float, right: float) -> float:
    return left if left < right or math.isnan(left) else right


def _divide(left: float, right: float) -> float:
    if right == 0:
        return math.nan if left == 0 or math.isnan(left) else math.copysign(math.inf, left) * math.copysign(1, right)
    return left / right


def _fmod(left: float, right: float) -> float:
    return math.nan if right == 0 or math.isinf(left) else math.fmod(left, right)


def _remainder(left: float, right: float) -> float:
    rest = _fmod(left, right)
    return rest + right if rest != 0 and (rest < 0) != (right < 0) else rest


def _power(base: float, exponent: float) -> float:
    infinity = math.copysign(math.inf, base) if exponent % 2 == 1 else math.inf
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return infinity
    except ValueError:
        return infinity if base == 0 else math.nan


def _whole(function: Callable[[float], float]) -> Callable[[float], float]:
    def apply(number: float) -> float:
        return math.copysign(function(number), number) if math.isfinite(number) else number

    return apply


def _total(function: Callable[[float], float], pole: float = math.nan) -> Callable[[float], float]:
    """The function with IEEE results where Python raises: infinity on overflow and at the pole, NaN off its domain."""

    def apply(number: float) -> float:
        if number == pole:
            return -math.inf
        try:
            return function(number)
        except OverflowError:
            return math.inf
        except ValueError:
            return math.nan

    return apply


def _hyperbolic(function: Callable[[float], float], odd: bool) -> Callable[[float], float]:
    def apply(number: float) -> float:
        try:
            return function(number)
        except OverflowError:
            return math.copysign(math.inf, number) if odd else math.inf

    return apply


def _atanh(number: float) -> float:
    return math.copysign(math.inf, number) if abs(number) == 1 else _total(math.atanh)(number)


def _lgamma(number: float) -> float:
    return math.inf if number <= 0 and number % 1 == 0 else _total(math.lgamma)(number)


OPERATIONS: dict[str, Operation] = {
    "add": Operation(operator.add),
    "sub": Operation(operator.sub),
    "mul": Operation(operator.mul),
    "div": Operation(_divide),
    "pow": Operation(_power),
    "remainder": Operation(_remainder),
    "fmod": Operation(_fmod),
    "atan2": Operation(math.atan2),
    "copysign": Operation(math.copysign),
    "maximum": Operation(_maximum),
    "minimum": Operation(_minimum),
    "neg": Operation(operator.neg),
    "abs": Operation(abs),
    "sqrt": Operation(_total(math.sqrt)),
    "rsqrt": Operation(lambda number: _divide(1.0, _total(math.sqrt)(number))),
    "exp": Operation(_total(math.exp)),
    "exp2": Operation(_total(lambda number: 2.0**number)),
    "expm1": Operation(_total(math.expm1)),
    "log": Operation(_total(math.log, pole=0.0)),
    "log2": Operation(_total(math.log2, pole=0.0)),
    "log1p": Operation(_total(math.log1p, pole=-1.0)),
    "log10": Operation(_total(math.log10, pole=0.0)),
    "sin": Operation(_total(math.sin)),
    "cos": Operation(_total(math.cos)),
    "tan": Operation(_total(math.tan)),
    "asin": Operation(_total(math.asin)),
    "acos": Operation(_total(math.acos)),
    "atan": Operation(math.atan),
    "sinh": Operation(_hyperbolic(math.sinh, odd=True)),
    "cosh": Operation(_hyperbolic(math.cosh, odd=False)),
    "tanh": Operation(math.tanh),
    "asinh": Operation(math.asinh),
    "acosh": Operation(_total(math.acosh)),
    "atanh": Operation(_atanh),
    "erf": Operation(math.erf),
    "erfc": Operation(math.erfc),
    "lgamma": Operation(_lgamma),
    "sign": Operation(_sign),
    "floor": Operation(_whole(math.floor)),
    "ceil": Operation(_whole(math.ceil)),
    "round": Operation(_whole(round)),
    "trunc": Operation(_whole(math.trunc)),
    "number": Operation(float),
    "where": Operation(lambda condition, if_true, if_false: if_true if condition else if_false),
    "lt": Operation(operator.lt, is_bool=True),
    "le": Operation(operator.le, is_bool=True),
    "gt": Operation(operator.gt, is_bool=True),
    "ge": Operation(operator.ge, is_bool=True),
    "eq": Operation(operator.eq, is_bool=True),
    "ne": Operation(operator.ne, is_bool=True),
    "and": Operation(lambda left, right: bool(left) and bool(right), is_bool=True),
    "or": Operation(lambda left, right: bool(left) or bool(right), is_bool=True),
    "not": Operation(operator.not_, is_bool=True),
    "isnan": Operation(math.isnan, is_bool=True),
    "isinf": Operation(math.isinf, is_bool=True),
    "reduce_sum": Operation(None),
    "reduce_amax": Operation(None),
    "reduce_amin": Operation(None),
    "across_sum": Operation(None),
    "across_max": Operation(None),
    "widen": Operation(None),
    "narrow": Operation(None),
    "bits": Operation(None),
    "of_bits": Operation(None),
    "whole": Operation(None),
    "real": Operation(None),
    "shift_left": Operation(None),
    "shift_right": Operation(None),
    "bit_and": Operation(None),
    "bit_or": Operation(None),
    "bit_xor": Operation(None),
    "block_max": Operation(None),
    "nibble": Operation(None),
    "pack": Operation(None),
    "quotient": Operation(None),
    "root": Operation(None),
}
"""The last sixteen are for storage formats: `widen` and `narrow` between an element in memory and a number, `bits` and
`of_bits` between either and a 32-bit integer of the same bits, `whole` and `real` between numbers and integers,
`block_max` from integers to the largest of their block, `nibble` and `pack` between two of four bits and a byte;
`quotient` and `root` are `div` and `sqrt` of numbers that are far from the ends of float32, as their caller knows."""

REDUCTIONS = frozenset({"reduce_sum", "reduce_amax", "reduce_amin"})
"""From elements to one number per tensor."""

ACROSS = frozenset({"across_sum", "across_max"})
"""From one number per tensor to one for all tensors of the optimizer."""
