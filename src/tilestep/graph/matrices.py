"""What matrix products, transposes and the operations of `tilestep.matrices` mean in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..compat import operation_name
from ..errors import MatrixError
from ..matrices import MATRIX_OPERATIONS
from ..matrices.operations import PARAMETER, Space
from .ir import Builder, Level, Value
from .lowering import LOWERINGS, Unsupported
from .operations import OPERATIONS, Operation

SQUARES: dict[str, Space] = {"left": ("rows", "rows"), "right": ("columns", "columns")}
"""Shapes of states that are square matrices on either side of the parameter."""


def space_of(value: Value) -> Space:
    """The shape of an element-level or matrix-level value, in words of its parameter."""
    return value.space or PARAMETER


def is_matrix_work(value: Value) -> bool:
    """Whether a value is computed on whole matrices between tile passes, not on tiles."""
    return value.operation in MATRIX_OPERATIONS or (value.level is Level.MATRIX and value.operation != "load")


def is_called(func: Any) -> bool:
    """Whether an operator is one of `tilestep.matrices`, called by a rule."""
    return bool(func.namespace == "tilestep" and operation_name(func) in MATRIX_OPERATIONS)


def _operand(build: Builder, item: Any, name: str) -> Value:
    if build.dims != 2:
        raise MatrixError(f"{name} works on matrices, and the parameter has {build.dims} dimensions")
    if not isinstance(item, Value) or item.level not in (Level.ELEMENT, Level.MATRIX):
        raise Unsupported(f"{name} of something that is not a matrix computed from the parameter, gradient or states")
    return build.apply("number", item) if item.is_bool else item


def _apply(build: Builder, name: str, operands: Sequence[Any], numbers: Sequence[Any] = ()) -> Value:
    matrices = [_operand(build, operand, name) for operand in operands]
    values = [number if isinstance(number, Value) else build.constant(number) for number in numbers]
    space = MATRIX_OPERATIONS[name].space(*map(space_of, matrices))
    level = Level.ELEMENT if space == PARAMETER else Level.MATRIX
    value = build.apply(name, *matrices, *values, level=level)
    value.space = None if space == PARAMETER else space
    return value


def _product(build: Builder, left: Any, right: Any) -> Value:
    return _apply(build, "matmul", [left, right])


def _plus_product(build: Builder, base: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Value:
    scaled = [
        LOWERINGS["mul"](build, value, factor)
        for value, factor in ((base, beta), (_product(build, left, right), alpha))
    ]
    return LOWERINGS["add"](build, *scaled)


def _transposed(build: Builder, matrix: Any, *dims: Any) -> Value:
    listed = dims[0] if dims and isinstance(dims[0], (list, tuple)) else dims
    if len(listed) == 2 and [dim % 2 for dim in listed] == [0, 1] and listed is not dims:
        return _operand(build, matrix, "permute")
    operand = _operand(build, matrix, "transpose")
    if operand.operation == "transpose":
        return operand.args[0]
    return _apply(build, "transpose", [operand])


def _listed(name: str) -> Any:
    def lower(build: Builder, *args: Any) -> Value:
        operands, numbers = args[: MATRIX_OPERATIONS[name].operands], args[MATRIX_OPERATIONS[name].operands :]
        return _apply(build, name, operands, numbers[0] if numbers else ())

    return lower


def register() -> None:
    """Add the matrix operations to the tables of operations and lowerings."""
    OPERATIONS.update({name: Operation(None) for name in MATRIX_OPERATIONS})
    LOWERINGS.update({"mm": _product, "addmm": _plus_product})
    LOWERINGS.update({name: _transposed for name in ("t", "transpose", "permute")})
    LOWERINGS.update({name: _listed(name) for name in MATRIX_OPERATIONS if name not in ("matmul", "transpose")})


register()
