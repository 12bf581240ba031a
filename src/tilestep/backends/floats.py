"""Functions of floats as graphs: a function runs once for each path through its branches; selects join the paths."""

from __future__ import annotations

import copy
import functools
import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ..errors import RuleError
from ..graph import OPERATIONS, Builder, Level, Value, ancestors
from ..graph.tracer import places_of, refusing_randomness, rule_place
from ..rules.limits import Limit, Window, first_numbers, layout_of
from ..rules.scalars import scalar_globals
from ..storage import Term

MAX_PATHS = 256
"""Ways through a function: each is a part of the kernel's text."""

MAX_BRANCHES = 64
"""Branches of one path; a loop that ends by what its numbers are has more."""


def _refuse(reason: str) -> RuleError:
    return RuleError(f"{rule_place().line}: {reason}")


def _binary(operation: str) -> Any:
    return lambda self, other: self.function(operation, other)


def _reflected(operation: str) -> Any:
    return lambda self, other: self._like(other).function(operation, self)


class Number(Term):
    """A float64 number or a truth value in a traced function."""

    def _like(self, other: Any) -> Number:
        if isinstance(other, Number):
            return other
        if not isinstance(other, (numbers.Real, np.bool_)):
            raise _refuse(f"a number is combined with a {type(other).__name__}; use floats only")
        is_truth = isinstance(other, (bool, np.bool_))
        return Number(self.build, self.build.constant(bool(other) if is_truth else float(other)))

    def function(self, operation: str, *others: Any, dtype: str | None = None) -> Number:
        args = [self, *map(self._like, others)]
        if operation not in ("and", "or", "not", "where", "number"):
            args = [arg.number() for arg in args]
        return Number(self.build, self.build.apply(operation, *(arg.value for arg in args)))

    def number(self) -> Number:
        """A truth value as 1 or 0."""
        return self.function("number")

    def __bool__(self) -> bool:
        return _path.get().answer(self)

    def _read(self, *_: Any) -> Any:
        raise _refuse(
            "numbers cannot be read while `decide` is traced for a device: call functions of math in `decide` itself, "
            "and math.floor for an integer"
        )

    __float__ = __int__ = __index__ = __round__ = __trunc__ = __floordiv__ = __rfloordiv__ = __divmod__ = _read
    __lshift__ = __rshift__ = __xor__ = _read
    __eq__, __ne__, __le__, __ge__, __mod__, __pow__ = map(_binary, ("eq", "ne", "le", "ge", "remainder", "pow"))
    __rmod__, __rpow__, __rand__, __ror__ = map(_reflected, ("remainder", "pow", "and", "or"))
    __hash__ = object.__hash__

    def __neg__(self) -> Number:
        return self.function("neg")

    def __abs__(self) -> Number:
        return self.function("abs")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Functions of math, which `scalar_globals` makes torch's."""
        name, like = func.__name__, next(arg for arg in args if isinstance(arg, Number))
        first, *others = map(like._like, args)
        if name == "isfinite":
            return abs(first) < math.inf
        if OPERATIONS.get(name) is None or kwargs:
            raise _refuse(f"{name} is not supported in `decide`")
        return first.function(name, *others)


def input_of(build: Builder, place: str, name: str = "") -> Number:
    """A number that kernels read from a place in memory."""
    number = Number(build, build.hyper(place))
    number.value.name = name or place
    return number


def number_of(build: Builder, number: Any) -> Number:
    """A float or a traced number as a traced number; a truth value as 1 or 0."""
    return Number(build, build.constant(0.0))._like(number).number()


class _Path:
    """One path through a function: the answers to its conditions."""

    def __init__(self, answers: Sequence[bool], max_branches: int) -> None:
        self.conditions: list[Value] = []
        self.answers, self._max_branches = list(answers), max_branches
        self._known: dict[int, bool] = {}

    def answer(self, condition: Number) -> bool:
        """The answer to a condition; true for a condition that is new."""
        value = condition.value if condition.value.is_bool else (condition != 0).value
        if value.operation == "constant":
            return bool(value.attribute)
        if id(value) not in self._known:
            place = len(self.conditions)
            if place == self._max_branches:
                raise _refuse(
                    f"more than {MAX_BRANCHES} branches in a row, or {MAX_PATHS} paths in all: use loops of constant "
                    "length, and sums of products instead of branches"
                )
            self.conditions.append(value)
            if place == len(self.answers):
                self.answers.append(True)
            self._known[id(value)] = self.answers[place]
        return self._known[id(value)]


_path: ContextVar[_Path] = ContextVar("path")


def joined(build: Builder, function: Callable[[], Sequence[Any]]) -> list[Number]:
    """The results of a function of traced numbers, over all paths through its branches."""
    paths: list[tuple[_Path, list[Value]]] = []
    answers, like = list[bool](), Number(build, build.constant(0.0))
    while True:
        path = _Path(answers, len(answers) if len(paths) >= MAX_PATHS - 1 else MAX_BRANCHES)
        token = _path.set(path)
        try:
            results = function()
        finally:
            _path.reset(token)
        paths.append((path, [like._like(result).value for result in results]))
        answers = list(path.answers)
        while answers and not answers[-1]:
            answers.pop()
        if not answers:
            return [Number(build, value) for value in _merged(build, paths, 0)]
        answers[-1] = False


def _merged(build: Builder, paths: Sequence[tuple[_Path, list[Value]]], depth: int) -> list[Value]:
    first, results = paths[0]
    if depth == len(first.conditions):
        return results
    condition = first.conditions[depth]
    sides = [[each for each in paths if each[0].answers[depth] is answer] for answer in (True, False)]
    chosen = (_merged(build, side, depth + 1) for side in sides)
    return [_choice(build, condition, *pair) for pair in zip(*chosen, strict=True)]


def _choice(build: Builder, condition: Value, left: Value, right: Value) -> Value:
    """Select between two values by a condition."""
    if left is right or not (left.is_bool and right.is_bool):
        return build.apply("where", condition, left, right)
    opposite = build.apply("not", condition)
    if left.operation == "constant":
        return build.apply("or", condition, right) if left.attribute else build.apply("and", opposite, right)
    if right.operation == "constant":
        return build.apply("or", opposite, left) if right.attribute else build.apply("and", condition, left)
    return build.apply("or", build.apply("and", condition, left), build.apply("and", opposite, right))


class TracedWindow:
    """A `Window` in device memory: a range of an array."""

    def __init__(self, build: Builder, array: str, start: int, size: int, name: str) -> None:
        self.size, self.before = size, input_of(build, f"{array} + {start}", f"{name}_count")
        self.appended: Any = False
        self.number: Any = 0.0
        # Elements: a name, and their count.
        self._places = Number(build, build.load(f"place:{size}"))
        self._values = Number(build, build.load(f"{array} + {start + 1}:{size}"))
        self._values.value.name = name

    @property
    def count(self) -> Any:
        return self.before + self.appended

    def append(self, number: Any) -> None:
        if self.appended is not False:
            raise _refuse("a window takes one number per step; append once")
        self.appended, self.number = True, number

    def mean(self) -> Any:
        return self._sums()[0]

    def std(self) -> Any:
        _, squares, held = self._sums()
        return (held > 1).function("where", (squares / (held - 1)).function("sqrt"), math.nan)

    def _sums(self) -> tuple[Any, Any, Any]:
        """The mean of the numbers, the sum of squared differences from the mean, and the count."""
        if self.appended is not False:
            raise _refuse("a window is read after the append of this step; read it before")
        held = (self.before < self.size).function("where", self.before, self.size)
        inside = self._places < held
        numbers = inside.function("where", self._values, 0.0)
        mean = _sum(numbers) / held
        away = inside.function("where", numbers - mean, 0.0)
        return mean, _sum(away * away), held


def _sum(number: Any) -> Number:
    return Number(number.build, number.build.apply("reduce_sum", number.value, level=Level.TENSOR))


class Store(NamedTuple):
    """A number that a kernel writes."""

    place: str  # in an array: "control + 0"
    number: Number
    offset: Number | None = None  # offset from that place
    condition: Number | None = None  # whether it is written


class TracedLimit:
    """A limit on traced numbers. Kernels read its float64 numbers from memory; the rest is part of their source.

    `array` is the name of the array of its memory; its numbers begin at index `start` of the array `numbers`.
    """

    def __init__(self, build: Builder, limit: Limit, array: str = "memory", start: int = 0) -> None:
        self.limit, self.memory, self._traced = limit, SimpleNamespace(), copy.copy(limit)
        self._build, self._array, place = build, array, 0
        self._cells: list[tuple[Any, str]] = []
        """What `decide` changes: an object, and an attribute of it."""
        for name, _, size in layout_of(limit):
            window = TracedWindow(build, array, place, size, name) if size else None
            self._cells += [(window, "appended"), (window, "number")] if window else [(self.memory, name)]
            setattr(self.memory, name, window or input_of(build, f"{array} + {place}", name))
            place += 1 + size
        named = {name: input_of(build, f"numbers + {at}", name) for at, name in enumerate(floats_of(limit), start)}
        decide = functools.partial(scalar_globals(type(limit).decide), self._traced)
        vars(self._traced).update(named, decide=decide)

    def ask(self, norm: Any, loss: Any, memory: SimpleNamespace, skipped: Any) -> tuple[Any, Any]:
        """The limit's decision, over all paths; it changes the memory."""
        before = self.remembered

        def one_path() -> list[Any]:
            self._take(before)
            results = _results(self.limit, self._traced.ask, norm, loss, memory, skipped)
            return [*results, *self.remembered]

        skips, clip, *after = joined(self._build, one_path)
        self._take([number.number() for number in after])
        return skips, clip

    @property
    def remembered(self) -> list[Any]:
        """The memory's contents; for a window whether a number was appended, and which."""
        return [getattr(*cell) for cell in self._cells]

    def _take(self, remembered: Sequence[Any]) -> None:
        for cell, number in zip(self._cells, remembered):
            setattr(*cell, number)

    def stores(self) -> Iterator[Store]:
        """The stores that keep the memory after the decision."""
        place = 0
        for name, _, size in layout_of(self.limit):
            entry, array = getattr(self.memory, name), f"{self._array} + {place}"
            if not size:
                yield Store(array, entry)
            elif not _is(entry.appended, 0.0):
                yield Store(array, entry.count)
                yield Store(f"{self._array} + {place + 1}", entry.number, entry.before % size, entry.appended)
            place += 1 + size


def floats_of(limit: Limit) -> dict[str, float]:
    """The numbers of a limit that its kernel reads from memory: limits that differ only in these share a kernel."""
    values = {field.name: getattr(limit, field.name) for field in fields(limit)}  # type: ignore[arg-type]
    return {name: number for name, number in values.items() if type(number) is float}


def _results(limit: Limit, ask: Callable[..., Any], norm: Any, loss: Any, memory: Any, skipped: Any) -> tuple[Any, Any]:
    """The decision of a limit's code; errors name its file, line and function."""
    where, name = _code_of(limit), type(limit).__name__
    try:
        skips, clip = ask(norm, loss, memory, skipped)
    except RuleError:
        raise
    except Exception as error:
        raise RuleError(
            f"{[where, *places_of(error)][-1]}: limit {name}: {type(error).__name__}: {error}; `decide` takes floats "
            "and a loss that may be None, and must return a pair: whether to skip, and the norm to clip to"
        ) from error
    is_truth = skips.value.is_bool if isinstance(skips, Number) else isinstance(skips, (bool, np.bool_))
    wrong = "" if is_truth else f"whether to skip is {skips!r}; return a comparison of two numbers"
    if isinstance(clip, bool) or not isinstance(clip, (Number, numbers.Real)):
        wrong = f"the norm to clip to is {clip!r}; return math.inf for no clip"
    kinds = {entry: (Window, TracedWindow) if size else (Number, numbers.Real) for entry, _, size in layout_of(limit)}
    for entry, value in vars(memory).items():
        if not isinstance(value, kinds.get(entry, ())):
            wrong = f"memory.{entry} is {value!r}; entries must be in the class's `memory` and keep their type"
    if wrong:
        raise RuleError(f"{where}: limit {name}: {wrong}")
    return skips, clip


def _code_of(limit: Limit) -> str:
    code = type(limit).decide.__code__  # type: ignore[attr-defined]
    return f"{code.co_filename}:{code.co_firstlineno}"


class Outcome(NamedTuple):
    """The effects that a limit may have."""

    skips: bool  # it may skip a step
    clips: bool  # it may clip a step
    reads_loss: bool  # its decision depends on the loss


@functools.lru_cache(maxsize=256)
def outcome_of(limit: Limit) -> Outcome:
    """The effects that a limit may have; raises `RuleError` for a limit that a device cannot run."""
    kind = type(limit)
    decisions = []
    with refusing_randomness([kind.decide], f"in limit {kind.__name__}"):
        for loss in (None, 1.0):
            # Run a first step on the host: Python raises where devices do not, as for a division by zero.
            _results(limit, limit.ask, 1.0, loss, limit.remembered(first_numbers(limit)), False)
            build = Builder()
            traced, given = TracedLimit(build, limit), None if loss is None else input_of(build, "loss")
            results = traced.ask(input_of(build, "norm"), given, traced.memory, input_of(build, "skipped") != 0)
            decisions.append((*results, *traced.remembered))
    return Outcome(
        skips=any(not _is(skips, False) for skips, *_ in decisions),
        clips=any(not _is(clip, math.inf) for _, clip, *_ in decisions),
        reads_loss=any(value.attribute == "loss" for value in ancestors(part.value for part in decisions[1])),
    )


def _is(number: Number, constant: float | bool) -> bool:
    return number.value.operation == "constant" and number.value.attribute == constant
