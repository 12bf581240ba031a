"""What sums, means, norms and extrema mean in the graph: from elements to one number per tensor, row, column, ..."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .ir import SCALAR_LEVELS, Builder, Level, Over, Value
from .lowering import LOWERINGS, Unsupported

_SIZES = {1: "columns", 2: "rows"}
_FAR_SIZE = "size.-"


def _size_name(from_end: int) -> str:
    return _SIZES.get(from_end, f"{_FAR_SIZE}{from_end}")


def size_from_end(name: str) -> int:
    """Which size of the parameter a number of the scalar pass is, counted from the last as 1; 0 if it is none.

    Example:
        >>> size_from_end("columns"), size_from_end("rows"), size_from_end("size.-3"), size_from_end("lr")
        (1, 2, 3, 0)
    """
    found = next((from_end for from_end, known in _SIZES.items() if known == name), 0)
    return int(name.removeprefix(_FAR_SIZE)) if name.startswith(_FAR_SIZE) else found


def sizes_of(shape: Sequence[int]) -> dict[str, float]:
    """The sizes of a parameter by the names that they have among the numbers of the scalar pass.

    Example:
        >>> sizes_of((5, 3, 2))
        {'numel': 30.0, 'columns': 2.0, 'rows': 3.0, 'size.-3': 5.0}
    """
    each = {_size_name(from_end): float(size) for from_end, size in enumerate(reversed(shape), start=1)}
    return {"numel": float(math.prod(shape)), **each}


def count(build: Builder, dims: Iterable[int]) -> Value:
    """The number of elements along these dimensions of the parameter."""
    chosen = sorted(set(dims))
    if chosen == list(range(build.dims)):
        return build.hyper("numel", Level.TENSOR)
    total = build.constant(1.0)
    for dim in chosen:
        total = build.apply("mul", total, build.hyper(_size_name(build.dims - dim), Level.TENSOR))
    return total


class _Reduction:
    """One reduction: the dimensions it really combines, and those along which its operand is only repeated."""

    def __init__(self, build: Builder, operand: Value, dim: Any, keepdim: bool) -> None:
        self.build, self.shape = build, build.shape
        self.number = build.apply("number", operand) if operand.is_bool else operand
        named = self._named(dim)
        self.whole = named == set(range(len(self.shape)))
        if not self.whole and not keepdim:
            raise Unsupported("a reduction over some of the dimensions without keepdim=True")
        if self.shape and len(self.shape) != build.dims:
            raise Unsupported(
                f"a reduction of a tensor of {len(self.shape)} dimensions, not the parameter's {build.dims}"
            )
        varies = self.number.level not in SCALAR_LEVELS
        # A tensor without dimensions cannot tell a number from a repeated one, so that graph is for its kind alone.
        is_given = dim is not None and dim != []
        build.reads_shape |= is_given or (build.dims == 0 and not varies)
        extent = {axis for axis in named if self.shape[axis] != 1}
        over = self.number.over or (0, 0)
        self.combined = {axis for axis in extent if varies and not over[0] <= axis < over[1]}
        self.repeated = extent - self.combined
        self.target: Over | None = None
        if self.combined and not self.whole:
            self.target = self._block(self.combined | set(range(*over)))

    def _named(self, dim: Any) -> set[int]:
        dims = len(self.shape)
        if dim is None or dim == [] or dims == 0:
            return set(range(dims))
        return {axis % dims for axis in ([dim] if isinstance(dim, int) else dim)}

    def _block(self, dims: set[int]) -> Over | None:
        """The dimensions that the result has not; None for all of them."""
        first, stop = min(dims), max(dims) + 1
        if len(dims) != stop - first:
            raise Unsupported(f"a reduction that leaves dimensions between the reduced ones, {sorted(dims)}")
        return None if len(dims) == self.build.dims else (first, stop)

    def apply(self, operation: str) -> Value:
        """The operation over the combined dimensions."""
        if self.number.level in SCALAR_LEVELS or not (self.combined or self.whole):
            return self.number
        level = Level.TENSOR if self.target is None else Level.SLICE
        return self.build.apply(operation, self.number, attribute=self.target, level=level, over=self.target)

    def sum(self) -> Value:
        """The sum; an operand that is the same along a dimension counts as often as that is long."""
        total = self.apply("reduce_sum")
        return self.build.apply("mul", total, count(self.build, self.repeated)) if self.repeated else total

    def mean(self) -> Value:
        """The mean; without dimensions too it is divided, since the graph serves tensors of all dimensions."""
        total = self.apply("reduce_sum")
        divided = self.combined or (not self.shape and self.number.level not in SCALAR_LEVELS)
        return self.build.apply("div", total, count(self.build, self.combined)) if divided else total


def _sum(build: Builder, value: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    return _Reduction(build, value, dim, keepdim).sum()


def _mean(build: Builder, value: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    return _Reduction(build, value, dim, keepdim).mean()


def _extremum(operation: str) -> Any:
    def lower(build: Builder, value: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
        return _Reduction(build, value, dim, keepdim).apply(operation)

    return lower


def _whole_or_pairwise(operation: str, pairwise: str) -> Any:
    """`max` and `min`: of everything, or of two tensors; along a dimension they would also give indices."""

    def lower(build: Builder, value: Value, other: Any = None, *_: Any, **__: Any) -> Value:
        if isinstance(other, Value):
            return LOWERINGS[pairwise](build, value, other)
        if other is not None:
            raise Unsupported(f"{pairwise} with its index along a dimension; use a{pairwise[:3]}")
        return _Reduction(build, value, None, False).apply(operation)

    return lower


def _norm(
    build: Builder, value: Value, order: Any = 2, dim: Sequence[int] | None = None, keepdim: bool = False, **_: Any
) -> Value:
    if order == 2:
        return build.apply("sqrt", _Reduction(build, build.apply("mul", value, value), dim, keepdim).sum())
    magnitude = build.apply("abs", value)
    if order == 1:
        return _Reduction(build, magnitude, dim, keepdim).sum()
    if order == float("inf"):
        return _Reduction(build, magnitude, dim, keepdim).apply("reduce_amax")
    raise Unsupported(f"a norm of order {order}; 1, 2 and inf are supported")


def register() -> None:
    """Add the reductions to the table of lowerings."""
    LOWERINGS.update(
        {
            "sum": _sum,
            "mean": _mean,
            "amax": _extremum("reduce_amax"),
            "amin": _extremum("reduce_amin"),
            "max": _whole_or_pairwise("reduce_amax", "maximum"),
            "min": _whole_or_pairwise("reduce_amin", "minimum"),
            "linalg_vector_norm": _norm,
        }
    )


register()
