"""The typed graph of a rule: operations, values with their levels, and a builder that folds constants."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch


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


def _to_whole(function: Callable[[float], float]) -> Callable[[float], float]:
    def apply(number: float) -> float:
        return math.copysign(function(number), number) if math.isfinite(number) else number

    return apply


def _total(function: Callable[[float], float], pole: float = math.nan) -> Callable[[float], float]:
    """Return IEEE results where Python raises: infinity on overflow and at a pole, NaN outside the domain."""

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


_NUMERIC: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "neg")},
    **{name: getattr(math, name) for name in ("atan2", "copysign", "atan", "tanh", "asinh", "erf", "erfc")},
    **{
        name: _total(getattr(math, name))
        for name in ("sqrt", "exp", "expm1", "sin", "cos", "tan", "asin", "acos", "acosh", "cosh")
    },
    **{name: _total(getattr(math, name), pole=0.0) for name in ("log", "log2", "log10")},
    **{name: _to_whole(getattr(math, name)) for name in ("floor", "ceil", "trunc")},
    "div": _divide,
    "pow": _power,
    "remainder": _remainder,
    "fmod": _fmod,
    "maximum": _maximum,
    "minimum": _minimum,
    "abs": abs,
    "rsqrt": lambda number: _divide(1.0, _total(math.sqrt)(number)),
    "exp2": _total(lambda number: 2.0**number),
    "log1p": _total(math.log1p, pole=-1.0),
    "sinh": lambda number: math.copysign(_total(math.sinh)(abs(number)), number),
    "atanh": lambda number: math.copysign(math.inf, number) if abs(number) == 1 else _total(math.atanh)(number),
    "lgamma": lambda number: math.inf if number <= 0 and number % 1 == 0 else _total(math.lgamma)(number),
    "sign": lambda number: float((number > 0) - (number < 0)),
    "round": _to_whole(round),
    "number": float,
    "where": lambda condition, if_true, if_false: if_true if condition else if_false,
}
_TRUTHS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    "and": lambda left, right: bool(left) and bool(right),
    "or": lambda left, right: bool(left) or bool(right),
    "not": operator.not_,
    "isnan": math.isnan,
    "isinf": math.isinf,
}

REDUCTIONS = frozenset({"reduce_sum", "reduce_amax", "reduce_amin"})  # from elements to a number per tensor

GLOBAL_REDUCTIONS = frozenset({"global_sum", "global_max"})
"""From a number per tensor to a number for all tensors of the optimizer."""

_OF_FORMATS = """
widen narrow bits of_bits whole real shift_left shift_right bit_and bit_or bit_xor block_max nibble pack
quotient root within rough_ceiling rough_root fused float8_number float8_element
"""
"""Operations of storage formats.

`widen` and `narrow` convert between an element in memory and a number, `bits` and `of_bits` between either and a 32-bit
integer of the same bits, `whole` and `real` between numbers and integers. `block_max` maps integers to the largest of
their block, `nibble` and `pack` convert between two 4-bit integers and a byte. `quotient` and `root` are `div` and
`sqrt` of numbers far from the limits of float32; `rough_` operations may be off by units in the last place; `within` is
a minimum that only corrects rounding errors; `fused` is a product and a sum, rounded once. The last two return their
first argument, or compute the same bits from the second with a hardware instruction.
"""

OPERATIONS: dict[str, Callable[..., Any] | None] = {
    **_NUMERIC,
    **_TRUTHS,
    **dict.fromkeys((*sorted(REDUCTIONS | GLOBAL_REDUCTIONS), *_OF_FORMATS.split())),
}
"""How to evaluate an operation on Python numbers; None for reductions, and operations of formats and matrices."""


class Level(IntEnum):
    """What a value depends on, from least to most.

    CONSTANT: nothing. GROUP: hyperparameters and the step count. TENSOR: a reduction over one tensor (or all).
    SLICE: a reduction over some neighbouring dimensions, such as a number per row. ELEMENT: the elements themselves.
    MATRIX: a matrix of another shape than its parameter, which only operations on whole matrices use.
    """

    CONSTANT = 0
    GROUP = 1
    TENSOR = 2
    SLICE = 3
    ELEMENT = 5
    MATRIX = 6


SCALAR_LEVELS = (Level.CONSTANT, Level.GROUP, Level.TENSOR)  # levels of values that are a number per tensor

Over = tuple[int, int]  # a block of neighbouring dimensions: first, and last plus 1


def join(values: Iterable[Value]) -> tuple[Level, Over | None]:
    """Return the level of a value computed from these values, and the dimensions along which it is constant."""
    listed = list(values)
    level = max((value.level for value in listed), default=Level.CONSTANT)
    if level is not Level.SLICE:
        return level, None
    overs = [value.over for value in listed if value.over is not None]
    first, stop = max(over[0] for over in overs), min(over[1] for over in overs)
    return (Level.SLICE, (first, stop)) if first < stop else (Level.ELEMENT, None)


@dataclass(eq=False)
class Value:
    """A value of the graph: an operation on other values."""

    operation: str
    args: tuple[Value, ...] = ()  # its operands
    attribute: Any = None  # a constant's number, or the name of a buffer or hyperparameter
    level: Level = Level.CONSTANT  # what it depends on
    is_bool: bool = False  # whether it is a truth value, not a number
    space: tuple[str, str] | None = None
    over: Over | None = None  # at slice level, the block of dimensions along which it is constant
    name: str = ""  # the rule's variable, or empty
    line: str = ""  # `file:line` in the rule, for messages
    dtype: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether the device computes it from data: it loads a buffer or reduces."""
        return self.operation not in ("hyper", "constant") and (
            self.operation == "load" or OPERATIONS[self.operation] is None
        )

    def __repr__(self) -> str:
        inside = ", ".join([*(arg.name or arg.operation for arg in self.args), repr(self.attribute)])
        return f"<{self.name or '_'} = {self.operation}({inside}) {self.level.name.lower()}>"


Condition = tuple[Value, bool]  # a truth value of hyperparameters, sizes or the step, and its required value


@dataclass(eq=False)
class Graph:
    """A traced rule."""

    title: str  # the rule's name
    outputs: dict[str, Value]  # new value of each buffer that changes, by buffer name (the parameter's name is `param`)
    guards: list[Condition] = field(default_factory=list)  # the rule's branches: the graph is valid while all hold
    states: tuple[str, ...] = ()  # names of the state buffers that are read or written, in the rule's order
    scalar_states: tuple[str, ...] = ()  # the states that hold a number per tensor
    slice_states: dict[str, Over] = field(default_factory=dict)
    matrix_states: dict[str, tuple[str, str]] = field(default_factory=dict)
    state_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    dims: int = 1  # dimensions of the traced parameter
    reads_shape: bool = False  # whether the rule read the shape: the graph is valid for this number of dimensions only
    dtype: torch.dtype = torch.float32  # the dtype of the rule's values in the trace
    reads_dtype: bool = False  # whether the rule read the dtype: the graph is valid for this dtype only
    specs: dict[Any, Any] = field(default_factory=dict, repr=False)
    stack: Graph | None = field(default=None, repr=False)  # the graph of a stack of matrices, once made

    def values(self) -> list[Value]:
        """Every value that the outputs need, in dependency order."""
        return ancestors(self.outputs.values())

    @cached_property
    def branches_on_sizes(self) -> bool:
        """Whether a guard reads the parameter's sizes."""
        return any(condition.level is Level.TENSOR for condition, _ in self.guards)

    @cached_property
    def slice_ends(self) -> set[int]:
        """Dimensions at which the columns of elementwise passes may begin.

        The dimension after a reduced block, or the first of the block if it is the last.
        """
        overs = {*self.slice_states.values(), *(value.over for value in self.values() if value.level is Level.SLICE)}
        return {over[1] if over[1] < self.dims else over[0] for over in overs if over is not None}

    def reduced_dims(self, dims: int) -> dict[str, Over]:
        """The dimensions that row and column states reduce, of a parameter with `dims`: matrices are its last two."""
        shift = dims - self.dims
        return {name: (start + shift, stop + shift) for name, (start, stop) in self.slice_states.items()}

    def loads(self) -> list[str]:
        """Return the names of the buffers that are read."""
        return [value.attribute for value in self.values() if value.operation == "load"]

    def hypers(self) -> list[str]:
        """Return the names of the numbers that the scalar pass reads, in order of first use."""
        return [value.attribute for value in self.values() if value.operation == "hyper"]


def ancestors(roots: Iterable[Value], is_leaf: Callable[[Value], bool] = lambda value: False) -> list[Value]:
    """The roots and all values that they depend on, in dependency order; stops at values for which `is_leaf` holds."""
    order: list[Value] = []
    seen: set[int] = set()
    stack = [(root, False) for root in reversed([*roots])]
    while stack:
        value, is_done = stack.pop()
        if is_done:
            order.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            stack.append((value, True))
            stack += [] if is_leaf(value) else [(arg, False) for arg in reversed(value.args)]
    return order


def folded(roots: Iterable[Value], apply: Callable[[Value, list[Any]], Any]) -> dict[int, Any]:
    """The results of `apply` on each value and its operands' results, by id, for the roots and their ancestors."""
    results: dict[int, Any] = {}
    for value in ancestors(roots):
        results[id(value)] = apply(value, [results[id(arg)] for arg in value.args])
    return results


def evaluate(value: Value, numbers: Mapping[str, float]) -> float | bool:
    """Evaluate a value as a Python number, given the hyperparameters and sizes that it depends on."""

    def apply(node: Value, args: list[Any]) -> Any:
        if node.operation in ("constant", "hyper"):
            return node.attribute if node.operation == "constant" else numbers[node.attribute]
        function = OPERATIONS[node.operation]
        if function is None:
            raise KeyError(f"{node.operation} is not a number before the step")
        return function(*args)

    return folded([value], apply)[id(value)]


IF_NOT_ZERO = {"ne": True, "gt": True, "eq": False, "le": False}
"""Results of comparisons with zero for a number that the host cannot read and that is assumed positive."""


def outcome(condition: Value, numbers: Mapping[str, float], unread: Collection[str] = ()) -> bool | None:
    """Return the outcome of a branch; None if it is not known before the step."""
    reached = ancestors([condition])
    needed = [node for node in reached if node.operation == "hyper" and node.attribute not in numbers]
    if any(node.is_measured for node in reached):
        return None
    if not needed:
        return bool(evaluate(condition, numbers))
    if any(node.attribute not in unread for node in needed):
        return None
    if needed == [condition]:
        return True
    left, *rest = condition.args
    against_zero = left is needed[0] and [value.attribute for value in rest] == [0.0]
    return IF_NOT_ZERO.get(condition.operation) if against_zero else None


class Builder:
    """Builds values: equal operations on equal values give the same value, and constants are folded."""

    def __init__(self, dims: int = 1, dtype: torch.dtype = torch.float32) -> None:
        self.dims = dims
        self.dtype = dtype
        self.shape: tuple[int, ...] = ()
        """Traced shape of the first operand of the operation being lowered: 1 along reduced dimensions."""
        self.reads_shape = False  # whether a value is valid for this number of dimensions only
        self.reads_dtype = False  # whether a value is valid for this dtype only
        self._values: dict[tuple[Any, ...], Value] = {}

    def constant(self, number: float | bool) -> Value:
        """Return a constant number or truth value."""
        attribute = number if isinstance(number, bool) else float(number)
        key = ("constant", repr(attribute))  # not the number: 0.0 == -0.0, and NaN != NaN
        return self._values.setdefault(key, Value("constant", attribute=attribute, is_bool=isinstance(number, bool)))

    def integer(self, number: int) -> Value:
        """Return a constant 32-bit integer."""
        return self._intern(Value("constant", attribute=number, dtype="int32"))

    def load(self, buffer: str, level: Level = Level.ELEMENT, over: Over | None = None, dtype: str = "") -> Value:
        """Return the stored value of a buffer; with a dtype, the raw element in memory."""
        return self._intern(Value("load", attribute=buffer, level=level, name=buffer, over=over, dtype=dtype))

    def hyper(self, name: str, level: Level = Level.GROUP) -> Value:
        """A number of the scalar pass: a hyperparameter, `step`, `gradient_scale`, `numel`, `machine_epsilon`."""
        return self._intern(Value("hyper", attribute=name, level=level, name=name.replace(".", "_")))

    def apply(
        self,
        operation: str,
        *args: Value,
        attribute: Any = None,
        level: Level | None = None,
        over: Over | None = None,
        dtype: str = "",
    ) -> Value:
        """Return an operation on values, folded if its operands are constants or it is an identity."""
        function = OPERATIONS[operation]
        if function and args and all(arg.operation == "constant" and not arg.dtype for arg in args):
            return self.constant(function(*(arg.attribute for arg in args)))
        unchanged = _identity(operation, args)
        if unchanged is not None:
            return unchanged
        if operation == "div" and (divided := self._divided_slices(*args)) is not None:
            return divided
        if level is None:
            level, over = join(args)
        space = next((arg.space for arg in args if arg.level is Level.MATRIX), None) if level is Level.MATRIX else None
        return self._intern(Value(operation, args, attribute, level, operation in _TRUTHS, space, over, dtype=dtype))

    def _divided_slices(self, product: Value, divisor: Value) -> Value | None:
        """Rewrite `(row * column) / number` as `(row / number) * column`: a division per row instead of per element."""
        if product.operation != "mul" or product.level is not Level.ELEMENT:
            return None
        for left, right in (product.args, product.args[::-1]):
            if join([left, divisor])[0] is Level.SLICE:
                return self.apply("mul", self.apply("div", left, divisor), right)
        return None

    def _intern(self, value: Value) -> Value:
        args = tuple(id(arg) for arg in value.args)
        key = (value.operation, args, value.attribute, value.level, value.over, value.dtype)
        return self._values.setdefault(key, value)


_NEUTRAL = {"mul": 1.0, "div": 1.0, "pow": 1.0, "sub": 0.0}


def _identity(operation: str, args: tuple[Value, ...]) -> Value | None:
    def is_number(value: Value, number: float) -> bool:
        return value.operation == "constant" and repr(value.attribute) == repr(number)

    if operation in _NEUTRAL and is_number(args[1], _NEUTRAL[operation]):
        return args[0]
    if operation == "mul" and is_number(args[0], 1.0):
        return args[1]
    if operation == "neg" and args[0].operation == "neg":
        return args[0].args[0]
    if operation == "where":
        if args[0].operation == "constant":
            return args[1] if args[0].attribute else args[2]
        return args[1] if args[1] is args[2] else None
    if operation == "number" and not args[0].is_bool:
        return args[0]
    if operation in ("and", "or"):
        for constant, other in (args, args[::-1]):
            if constant.operation == "constant" and constant.is_bool:
                return other if constant.attribute is (operation == "and") else constant
    return None
