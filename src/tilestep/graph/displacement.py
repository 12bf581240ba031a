"""How far a rule moves its parameter, taken from its formula rather than by subtracting two nearly equal numbers."""

from __future__ import annotations

import torch

from .ir import Builder, Level, Value
from .lowering import LOWERINGS


@torch.library.custom_op("tilestep::displacement", mutates_args=(), schema="(Tensor new, Tensor old) -> Tensor")
def _displacement(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return new - old


@_displacement.register_fake
def _(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return new - old


def displacement(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`new - old`; in a kernel, what the rule added to `old`, without the rounding of adding and subtracting it.

    Example:
        >>> displacement(torch.tensor([3.0]), torch.tensor([1.0]))
        tensor([2.])
    """
    return _displacement(new, old)


def difference(build: Builder, new: Value, old: Value) -> Value:
    """The value of `new - old`, simplified where `new` is `old`, scaled and added to.

    Example:
        >>> build = Builder()
        >>> param, update = build.load("param"), build.load("update")
        >>> difference(build, build.apply("sub", param, update), param) is build.apply("neg", update)
        True
    """
    moved = _moved(build, new, old)
    return build.apply("sub", new, old) if moved is None else moved


def _moved(build: Builder, value: Value, old: Value) -> Value | None:
    """`value - old`, or None where `value` is not `old` with something done to it."""
    if value is old:
        return build.constant(0.0)
    if value.operation == "add":
        return _sum_moved(build, value.args, old)
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


def _sum_moved(build: Builder, terms: tuple[Value, ...], old: Value) -> Value | None:
    pairs = [terms, terms[::-1]]
    for base, added in sorted(pairs, key=lambda pair: pair[0] is not old):
        moved = _moved(build, base, old)
        if moved is not None:
            return added if _is_zero(moved) else build.apply("add", moved, added)
    return None


def _scaled_moved(build: Builder, value: Value, old: Value) -> Value | None:
    """(old + d) * f - old = old * (f - 1) + d * f, and (old + d) / f - old = (d - old * (f - 1)) / f."""
    is_product = value.operation == "mul"
    for base, factor in (value.args, value.args[::-1]) if is_product else (value.args,):
        moved = _moved(build, base, old) if factor.level <= Level.TENSOR else None
        if moved is None:
            continue
        pulled = build.apply("mul", old, _less_one(build, factor))
        if not is_product:
            return build.apply("div", _subtract(build, moved, pulled), factor)
        return pulled if _is_zero(moved) else build.apply("add", pulled, build.apply("mul", moved, factor))
    return None


def _less_one(build: Builder, factor: Value) -> Value:
    if factor.operation == "sub" and _is_one(factor.args[0]):
        return build.apply("neg", factor.args[1])
    if factor.operation == "add" and any(map(_is_one, factor.args)):
        return factor.args[1] if _is_one(factor.args[0]) else factor.args[0]
    return build.apply("sub", factor, build.constant(1.0))


def _subtract(build: Builder, left: Value, right: Value) -> Value:
    return build.apply("neg", right) if _is_zero(left) else build.apply("sub", left, right)


def _is_zero(value: Value) -> bool:
    return value.operation == "constant" and value.attribute == 0.0


def _is_one(value: Value) -> bool:
    return value.operation == "constant" and value.attribute == 1.0


LOWERINGS["displacement"] = difference
