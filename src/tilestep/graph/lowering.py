"""The meaning of each ATen operation in the graph; torch decomposes other operations, or they are refused by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import torch

from ..errors import MatrixError
from ..linalg import MATRIX_OPERATIONS
from ..linalg.operations import PARAMETER, Space
from .ir import OPERATIONS, SCALAR_LEVELS, Builder, Level, Over, Value, folded
from .terms import Term, where

ALTERNATIVE = (
    "write it with elementwise torch operations (arithmetic, sqrt, exp, where, clamp, sign, ...) or reductions"
)
"""The proposal of errors for operations without a similar supported operation."""

_IN_PLACES = (
    "an element may depend on elements at the same index of other buffers and on reductions: combine rows or columns "
    "by a reduction with keepdim=True, and keep values from earlier steps in a state"
)
_LIKE = "use torch.zeros_like(param) or torch.full_like(param, number)"
_SHAPES = (
    "values keep the parameter's shape: reduce whole tensors, or rows and columns with keepdim=True, and rely on "
    "broadcasting"
)
_DECOMPOSITIONS = (
    "tilestep.orthogonalize(x) returns U V^T of a matrix, `@` multiplies matrices, and .norm() bounds the largest "
    "singular value"
)
_ORDERS = "sorting is not supported: .amax(), .mean() and .norm() summarize a tensor, torch.where and clamp truncate it"
_RANDOM = "random numbers are refused, because steps must be reproducible; add noise to the gradient before the step"
_VARIANCE = "write ((x - x.mean()) ** 2).mean(), with dim= and keepdim=True for rows or columns"
_SOFTMAX = "subtract x.amax(dim=-1, keepdim=True), take exp() and divide by its .sum(dim=-1, keepdim=True)"
_PRODUCT = "write (a * b).sum() for a dot product, a @ b for a matrix product"

_NEAREST: dict[str, tuple[str, ...]] = {
    _VARIANCE: ("std", "var", "std_mean", "var_mean"),
    _SOFTMAX: ("_softmax", "_log_softmax", "logsumexp"),
    "write x.abs().log().sum().exp() where no element is zero or negative": ("prod",),
    "compare with the extremum instead: x == x.amax()": ("argmax", "argmin"),
    _DECOMPOSITIONS: (
        *("_linalg_svd", "linalg_svd", "_linalg_eigh", "linalg_eigh", "linalg_eig", "linalg_qr", "linalg_inv_ex"),
        *("linalg_pinv", "linalg_cholesky_ex", "_linalg_solve_ex", "linalg_solve_triangular", "linalg_lstsq"),
        *("linalg_matrix_exp", "_linalg_slogdet", "_linalg_det", "linalg_lu_factor_ex", "cholesky", "inverse"),
    ),
    _ORDERS: ("sort", "topk", "kthvalue", "median", "nanmedian", "mode", "argsort", "quantile", "histc", "unique"),
    _RANDOM: (
        *("rand_like", "randn_like", "randint_like", "rand", "randn", "randint", "randperm", "bernoulli", "normal"),
        *("uniform", "native_dropout", "multinomial", "exponential", "normal_functional"),
    ),
    _PRODUCT: ("dot", "vdot", "mv", "bmm", "baddbmm", "trace", "inner"),
    _SHAPES: (
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "expand", "unfold"),
        "broadcast_to",
    ),
    _LIKE: ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "new_empty"),
    _IN_PLACES: (
        *("cat", "stack", "roll", "flip", "index", "select", "slice", "gather", "scatter", "index_put", "diff"),
        *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "split", "split_with_sizes", "unbind", "narrow"),
        *("diagonal", "diagonal_copy", "diag_embed", "tril", "triu", "convolution", "avg_pool2d", "repeat"),
        *("arange", "linspace", "eye"),
    ),
}

RANDOM = frozenset(
    (
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "normal_"),
        *("feature_dropout", "gumbel_softmax", "rrelu", "uniform_", "bernoulli_", "random_", "cauchy_", "log_normal_"),
        *("exponential_", "geometric_", "poisson", "binomial", "dropout_", "rrelu_", "alpha_dropout_"),
    )
)
"""Functions and methods of torch that draw random numbers, by the names that a rule calls."""

_BY_OPERATION = {operation: text for text, operations in _NEAREST.items() for operation in operations}


def nearest(operation: str) -> str:
    """The closest supported operation, for error messages."""
    _, _, rest = operation.rpartition("aten.")
    return _RANDOM if operation in RANDOM else _BY_OPERATION.get(rest.split(".")[0].rstrip("_"), ALTERNATIVE)


Lowering = Callable[..., Value]


class Unsupported(Exception):
    """An operation has no lowering; the message proposes an alternative."""


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


def _numeric(operation: str, taken: Callable[[Builder, Any], Value] = _number) -> Lowering:
    def lower(build: Builder, *args: Any) -> Value:
        return build.apply(operation, *(taken(build, arg) for arg in args))

    return lower


_logical = partial(_numeric, taken=_truth)


def formula(function: Callable[..., Term]) -> Lowering:
    """Make the lowering of a formula of numbers; keyword arguments are passed through."""

    def lower(build: Builder, *args: Any, **options: Any) -> Value:
        return function(*(Term(build, _number(build, arg)) for arg in args), **options).value

    return lower


def _lower_add(build: Builder, left: Any, right: Any, alpha: Any = 1) -> Value:
    if all(isinstance(item, bool) or (isinstance(item, Value) and item.is_bool) for item in (left, right)):
        return build.apply("or", _truth(build, left), _truth(build, right))
    return _sum(build, left, right, alpha=alpha)


def _scaled(term: Term, factor: Any) -> Term:
    return term if not isinstance(factor, Value) and factor == 1 else term * _term(term, factor)


def _term(like: Term, item: Any) -> Term:
    return Term(like.build, _number(like.build, item))


_sum = formula(lambda left, right, alpha=1: left + _scaled(right, alpha))


def _lower_div(build: Builder, left: Any, right: Any, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "floor":
        return _floor_div(build, left, right)
    quotient = _div(build, left, right)
    return quotient if rounding_mode is None else build.apply(rounding_mode, quotient)


_div = _numeric("div")


@formula
def _floor_div(left: Term, right: Term) -> Term:
    """Python's `//`: the floor of the exact quotient, because the rounded quotient may be the next integer."""
    rest = left.function("fmod", right)
    quotient = (left - rest) / right
    signs = [(side < 0.0).function("number") for side in (right, rest)]
    quotient = where(rest.function("ne", 0.0) & signs[0].function("ne", signs[1]), quotient - 1.0, quotient)
    floored = quotient.function("floor")
    floored = where(quotient - floored > 0.5, floored + 1.0, floored)
    plain = left / right
    floored = where(quotient.same(0.0), _term(plain, 0.0).function("copysign", plain), floored)
    return where(right.same(0.0), plain, floored)


def _lower_pow(build: Builder, base: Any, exponent: Any) -> Value:
    power = exponent.attribute if isinstance(exponent, Value) and exponent.operation == "constant" else exponent
    if not isinstance(power, Value) and power in _POWERS:
        return formula(_POWERS[power])(build, base)
    return _numeric("pow")(build, base, exponent)


_POWERS: dict[float, Callable[[Term], Term]] = {
    2: lambda base: base * base,
    3: lambda base: base * base * base,
    0.5: methodcaller("function", "sqrt"),
    -1: lambda base: 1.0 / base,
    -0.5: lambda base: 1.0 / base.function("sqrt"),
}


def _lower_clamp(build: Builder, value: Any, low: Any = None, high: Any = None, **named: Any) -> Value:
    result = _number(build, value)
    for operation, bound in ("maximum", named.get("min", low)), ("minimum", named.get("max", high)):
        if bound is not None:
            result = _numeric(operation)(build, result, bound)
    return result


def _lower_where(build: Builder, condition: Any, if_true: Any, if_false: Any) -> Value:
    return build.apply("where", _truth(build, condition), _number(build, if_true), _number(build, if_false))


def _one_plus_exp(value: Term) -> Term:
    return 1.0 + value.function("neg").function("exp")


def _clamped(value: Term, low: Any = None, high: Any = None) -> Term:
    return Term(value.build, _lower_clamp(value.build, value.value, low, high))


def _hard_sigmoid(value: Term) -> Term:
    return _clamped(value + 3.0, 0.0, 6.0) / 6.0


def _lower_logit(build: Builder, value: Any, eps: Any = None) -> Value:
    inside = value if eps is None else _lower_clamp(build, value, eps, 1.0 - eps)
    return formula(lambda inside: (inside / (1.0 - inside)).function("log"))(build, inside)


@formula
def _rounded(value: Term, decimals: int = 0) -> Term:
    power = float(10 ** abs(decimals))
    if decimals > 0:
        return (value * power).function("round") / power
    return (value / power).function("round") * power if decimals else value.function("round")


@formula
def _hypot(left: Term, right: Term) -> Term:
    """Scaled by the larger operand, so that no square overflows."""
    left, right = left.function("abs"), right.function("abs")
    large, small = left.function("maximum", right), left.function("minimum", right)
    ratio = small / large
    length = where(large.same(0.0), large, large * (1.0 + ratio * ratio).function("sqrt"))
    return where(left.function("isinf") | right.function("isinf"), math.inf, length)


def _logaddexp(function: str, correction: float) -> Lowering:
    @formula
    def lower(left: Term, right: Term) -> Term:
        larger = left.function("maximum", right)
        gap = (left - right).function("abs").function("neg")
        return where(larger.function("isinf"), larger, larger + gap.function(function).function("log1p") * correction)

    return lower


def _unless_nan(extremum: str) -> Lowering:
    """The extremum that ignores NaN."""

    @formula
    def lower(left: Term, right: Term) -> Term:
        both = where(right.function("isnan"), left, left.function(extremum, right))
        return where(left.function("isnan"), right, both)

    return lower


@formula
def _angle(number: Term) -> Term:
    return where(number.function("isnan"), number, where(number < 0.0, _term(number, math.pi), 0.0))


def _polynomial(value: Term, coefficients: Sequence[float]) -> Term:
    """Horner's scheme, from the highest power."""
    return functools.reduce(
        lambda total, coefficient: total * value + coefficient, coefficients[1:], _term(value, coefficients[0])
    )


_ERFINV = (
    ((-0.140543331, 0.914624893, -1.645349621, 0.886226899), (0.012229801, -0.329097515, 1.442710462, -2.118377725, 1)),
    ((1.641345311, 3.429567803, -1.624906493, -1.970840454), (1.637067800, 3.543889200, 1)),
)
"""Rational functions of the middle and of the tails, as in torch's aten/src/ATen/native/Math.h."""


@formula
def _erfinv(number: Term) -> Term:
    """A rational function and two Newton steps."""
    magnitude = number.function("abs")
    far = ((1.0 - magnitude) / 2.0).function("log").function("neg").function("sqrt")
    middle, tail = (
        _polynomial(argument, above) / _polynomial(argument, below)
        for argument, (above, below) in zip((number * number, far), _ERFINV)
    )
    tail = tail.function("copysign", number)
    root = where(magnitude.function("le", 0.7), number * middle, tail)
    for _ in range(2):
        slope = 2 / math.sqrt(math.pi) * (root * root).function("neg").function("exp")
        root = root - (root.function("erf") - number) / slope
    return where(magnitude.same(1.0), _term(number, math.inf).function("copysign", number), root)


_DIGAMMA = (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)
"""Bernoulli numbers over twice their index, from the seventh."""


@formula
def _digamma(number: Term) -> Term:
    """Reflected to positive arguments, shifted beyond 10, then the asymptotic series."""
    is_left = number < 0.0
    right = where(is_left, 1.0 - number, number)
    moved = _term(number, 0.0)
    for distance in range(10):
        moved = moved + 1.0 / (right + float(distance))
    beyond = right + 10.0
    inverse = 1.0 / beyond
    squared = inverse * inverse
    series = squared * _polynomial(squared, _DIGAMMA)
    total = beyond.function("log") - 0.5 * inverse - series - moved
    angle = math.pi * (number - number.function("round"))
    reflected = total - math.pi / angle.function("tan")
    reflected = where(number.same(number.function("floor")), math.nan, reflected)
    pole = _term(number, math.inf).function("copysign", number.function("neg"))
    return where(number.same(0.0), pole, where(is_left, reflected, total))


def _nan_to_num(build: Builder, value: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Value:
    number = Term(build, _number(build, value))
    largest, number.build.reads_dtype = torch.finfo(number.build.dtype).max, True
    bounded = _clamped(number, -largest if neginf is None else None, largest if posinf is None else None)
    for limit, sign in ((posinf, "gt"), (neginf, "lt")):
        if limit is not None:
            bounded = where(number.function("isinf") & number.function(sign, 0.0), _term(number, limit), bounded)
    return where(number.function("isnan"), _term(number, nan or 0.0), bounded).value


def _same(build: Builder, value: Any, *_: Any, **__: Any) -> Value:
    return _as_value(build, value)


def _filled(number: float | None) -> Lowering:
    def lower(build: Builder, value: Any, fill: Any = None, *_: Any, **__: Any) -> Value:
        return _as_value(build, fill if number is None else number)

    return lower


CONVERTING = frozenset({"_to_copy", "copy", "fill", "full_like", "masked_fill"})
"""Operations whose result dtype does not depend on their operands' dtype."""


def converted(build: Builder, value: Value, dtype: torch.dtype) -> Value:
    """Return a value rounded as a tensor of this dtype would hold it."""
    if dtype is torch.bool:
        return _truth(build, value)
    number = _number(build, value)
    return number if dtype.is_floating_point else build.apply("trunc", number)


def check_dtype(operation: str, dtype: torch.dtype, operand: torch.dtype | None) -> None:
    """Raise for a result dtype that kernels do not support; `operand` is the dtype of the first operand."""
    converts = operation in CONVERTING or (operand is not dtype and not operation.endswith("_like"))
    if dtype.is_complex:
        raise Unsupported(
            "complex numbers are not supported inside a rule; complex parameters are pairs of reals there"
        )
    if dtype.is_floating_point and dtype.itemsize < 4 and converts:
        bits = 8 * dtype.itemsize
        raise Unsupported(
            f"{bits}-bit dtypes are not supported inside a rule; buffers are rounded when they are stored"
        )
    if operation.startswith("bitwise") and dtype is not torch.bool:
        raise Unsupported("bitwise operations on integers are not supported; &, | and ~ work on bool tensors")
    had_fractions = operand is not None and operand.is_floating_point
    if operation == "sum" and had_fractions and not dtype.is_floating_point:
        raise Unsupported(f"a reduction in {dtype} is not supported; cast its result")


_EXACT_AS_NUMBERS = frozenset(
    ("neg", "abs", "sign", "sgn", "where", "maximum", "minimum", "clamp", "amax", "amin", "remainder", "fmod")
)
_SUMMED_EXACTLY = 2**8  # the partial sum of a program's 10,000 or so elements is exact then


def check_integers(build: Builder, operation: str, value: Value, operand: Any, dtype: torch.dtype) -> None:
    """Raise for elementwise integers that a kernel may round: kernels hold them in the rule's dtype."""
    if dtype.is_floating_point or dtype is torch.bool:
        return
    held = torch.iinfo(dtype)
    wraps = held.min == 0 and operation == "neg"
    if (operation in _EXACT_AS_NUMBERS and not wraps) or (operation in CONVERTING and dtype.itemsize >= 4):
        return
    is_sum = operation == "sum" and isinstance(operand, Value)
    checked = operand if is_sum else value
    exact = _SUMMED_EXACTLY if is_sum else 2 ** (53 if build.dtype is torch.float64 else 24)
    # torch wraps numbers around that a narrow dtype does not hold.
    least, most = max(-exact, held.min), min(exact, held.max)
    low, high = folded([checked], _bounds)[id(checked)]
    if checked.level not in SCALAR_LEVELS and not least <= low <= high <= most:
        raise Unsupported(
            f"integer elements may exceed {most:,} or be less than {least:,}, and kernels compute integers in floating "
            f"point; cast to the gradient's dtype before {'the sum' if is_sum else 'the arithmetic'}, or clamp them to "
            "constants"
        )


def _bounds(value: Value, args: list[tuple[float, float]]) -> tuple[float, float]:
    """Return bounds of the elements of a value, as far as constants determine them, from its operands' bounds."""
    operation = value.operation
    if operation == "constant":
        return float(value.attribute), float(value.attribute)
    if value.is_bool or operation in ("number", "sign", "tanh", "erf", "sin", "cos"):
        return 0.0 if value.is_bool or operation == "number" else -1.0, 1.0
    lows, highs = [low for low, _ in args], [high for _, high in args]
    if operation in ("trunc", "round", "floor", "ceil"):
        return args[0]
    if operation in ("minimum", "maximum"):
        choose = min if operation == "minimum" else max
        return choose(lows), choose(highs)
    if operation == "where":
        return min(lows[1:]), max(highs[1:])
    if operation == "neg":
        return -highs[0], -lows[0]
    if operation == "abs":
        return max(0.0, lows[0], -highs[0]), max(-lows[0], highs[0])
    if operation == "add":
        return sum(lows), sum(highs)
    if operation == "sub":
        return lows[0] - highs[1], highs[0] - lows[1]
    if operation == "mul":
        products = [left * right if left and right else 0.0 for left in args[0] for right in args[1]]
        return min(products), max(products)
    return -math.inf, math.inf


LOWERINGS: dict[str, Lowering] = {
    # Operations of the graph have ATen's names; operations with more arguments in ATen follow.
    **{name: _numeric(name) for name, function in OPERATIONS.items() if function},
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
    "sub": formula(lambda left, right, alpha=1: left - _scaled(right, alpha)),
    "rsub": formula(lambda left, right, alpha=1: right - _scaled(left, alpha)),
    "div": _lower_div,
    "pow": _lower_pow,
    "square": formula(_POWERS[2]),
    "reciprocal": formula(_POWERS[-1]),
    "round": _rounded,
    "sigmoid": formula(lambda value: 1.0 / _one_plus_exp(value)),
    "silu": formula(lambda value: value / _one_plus_exp(value)),
    "hardsigmoid": formula(_hard_sigmoid),
    "hardswish": formula(lambda value: value * _hard_sigmoid(value)),
    "logit": _lower_logit,
    "hypot": _hypot,
    "logaddexp": _logaddexp("exp", 1.0),
    "logaddexp2": _logaddexp("exp2", 1 / math.log(2)),
    "fmax": _unless_nan("maximum"),
    "fmin": _unless_nan("minimum"),
    "signbit": formula(lambda value: _term(value, 1.0).function("copysign", value) < 0.0),
    "angle": _angle,
    "ldexp": formula(lambda value, power: value * power.function("exp2")),
    "erfinv": _erfinv,
    "digamma": _digamma,
    "special_ndtr": formula(lambda value: 0.5 * (value * -math.sqrt(0.5)).function("erfc")),
    "relu": formula(methodcaller("function", "maximum", 0.0)),
    "lerp": formula(lambda start, end, weight: start + weight * (end - start)),
    "addcmul": formula(lambda base, left, right, value=1: base + _scaled(left, value) * right),
    "addcdiv": formula(lambda base, left, right, value=1: base + _scaled(left / right, value)),
    "clamp": _lower_clamp,
    "clamp_min": _numeric("maximum"),
    "clamp_max": _numeric("minimum"),
    "where": _lower_where,
    "masked_fill": lambda build, value, mask, fill: _lower_where(build, mask, fill, value),
    "isfinite": formula(lambda value: (value.function("isnan") | value.function("isinf")).function("not")),
    "nan_to_num": _nan_to_num,
    **dict.fromkeys(("clone", "detach", "alias", "lift_fresh", "lift_fresh_copy", "contiguous", "_to_copy"), _same),
    "scalar_tensor": _same,
    "copy": _filled(None),
    "empty_like": _filled(math.nan),  # a read before a write gives NaN
    "zeros_like": _filled(0.0),
    "ones_like": _filled(1.0),
    "full_like": _filled(None),
    "zero": _filled(0.0),
    "fill": _filled(None),
}
for _name in ("number", "and", "or", "not"):  # not in ATen
    del LOWERINGS[_name]
"""Maps the name of an ATen operation to its lowering; in-place variants use the out-of-place operation's entry."""

_SYNONYMS = {
    **{"true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "negative": "neg", "fix": "trunc"},
    **{"absolute": "abs", "clip": "clamp", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le"},
    **{"not_equal": "ne", "arctan2": "atan2", "special_expit": "sigmoid", "special_expm1": "expm1"},
}
LOWERINGS.update({synonym: LOWERINGS[name] for synonym, name in _SYNONYMS.items()})

_SIZES = {1: "columns", 2: "rows"}
_FAR_SIZE = "size.-"


def _size_name(from_end: int) -> str:
    return _SIZES.get(from_end, f"{_FAR_SIZE}{from_end}")


def size_from_end(name: str) -> int:
    """The parameter's size that a number of the scalar pass is, counted from the last as 1; 0 for other numbers."""
    if name.startswith(_FAR_SIZE):
        return int(name.removeprefix(_FAR_SIZE))
    return next((from_end for from_end, near in _SIZES.items() if near == name), 0)


def sizes_of(shape: Sequence[int]) -> dict[str, float]:
    """Return the sizes of a parameter, by their names among the scalar pass's numbers."""
    sizes = {_size_name(from_end): float(size) for from_end, size in enumerate(reversed(shape), start=1)}
    return {"numel": float(math.prod(shape)), **sizes}


def count(build: Builder, dims: Iterable[int]) -> Value:
    """Return the number of elements along these dimensions of the parameter."""
    chosen = sorted(set(dims))
    if chosen == list(range(build.dims)):
        return build.hyper("numel", Level.TENSOR)
    total = build.constant(1.0)
    for dim in chosen:
        total = build.apply("mul", total, build.hyper(_size_name(build.dims - dim), Level.TENSOR))
    return total


class _Reduction:
    """A reduction: the dimensions that it combines, and the dimensions along which its operand is constant."""

    def __init__(self, build: Builder, operand: Value, dim: Any, keepdim: bool) -> None:
        self.build, self.shape = build, build.shape
        self.number = build.apply("number", operand) if operand.is_bool else operand
        dims = len(self.shape)
        is_given = dim is not None and dim != []
        listed = ([dim] if isinstance(dim, int) else dim) if is_given and dims else range(dims)
        named = {axis % dims for axis in listed}
        self.is_total = named == set(range(len(self.shape)))
        if not self.is_total and not keepdim:
            raise Unsupported("a reduction over some of the dimensions requires keepdim=True")
        if self.shape and len(self.shape) != build.dims:
            raise Unsupported(f"a reduction requires the parameter's {build.dims} dimensions, not {len(self.shape)}")
        varies = self.number.level not in SCALAR_LEVELS
        # Without dimensions, a number and a broadcast number look alike, so the graph is valid for 0-dim tensors only.
        build.reads_shape |= is_given or (build.dims == 0 and not varies)
        extent = {axis for axis in named if self.shape[axis] != 1}
        over = self.number.over or (0, 0)
        self.combined = {axis for axis in extent if varies and not over[0] <= axis < over[1]}
        self.repeated = extent - self.combined
        self.target: Over | None = None
        """The reduced dimensions; None for all."""
        if self.combined and not self.is_total:
            reduced = sorted(self.combined | set(range(*over)))
            if len(reduced) != reduced[-1] + 1 - reduced[0]:
                raise Unsupported(f"a reduction over {reduced} leaves out dimensions between them")
            self.target = None if len(reduced) == build.dims else (reduced[0], reduced[-1] + 1)

    def apply(self, operation: str) -> Value:
        """Reduce over the combined dimensions."""
        if self.number.level in SCALAR_LEVELS or not (self.combined or self.is_total):
            return self.number
        level = Level.TENSOR if self.target is None else Level.SLICE
        return self.build.apply(operation, self.number, attribute=self.target, level=level, over=self.target)

    def sum(self) -> Value:
        """Return the sum; if the operand is constant along a dimension, multiply by its size."""
        total = self.apply("reduce_sum")
        return self.build.apply("mul", total, count(self.build, self.repeated)) if self.repeated else total

    def mean(self) -> Value:
        """The mean; a 0-dim tensor is divided too, because the graph serves tensors of any number of dimensions."""
        total = self.apply("reduce_sum")
        divided = self.combined or (not self.shape and self.number.level not in SCALAR_LEVELS)
        return self.build.apply("div", total, count(self.build, self.combined)) if divided else total


def _reduced(reduce: Callable[[_Reduction], Value]) -> Lowering:
    def lower(build: Builder, value: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
        return reduce(_Reduction(build, value, dim, keepdim))

    return lower


def _total_or_pairwise(operation: str, pairwise: str) -> Any:
    """`max` and `min` of a whole tensor or of two tensors; along a dimension they would also return indices."""

    def lower(build: Builder, value: Value, other: Any = None, *_: Any, **__: Any) -> Value:
        if isinstance(other, Value):
            return LOWERINGS[pairwise](build, value, other)
        if other is not None:
            raise Unsupported(f"{pairwise[:3]} with indices along a dimension is not supported; use a{pairwise[:3]}")
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
    raise Unsupported(f"a norm of order {order} is not supported; use 1, 2 or inf")


LOWERINGS.update(
    {
        "sum": _reduced(_Reduction.sum),
        "mean": _reduced(_Reduction.mean),
        "amax": _reduced(methodcaller("apply", "reduce_amax")),
        "amin": _reduced(methodcaller("apply", "reduce_amin")),
        "max": _total_or_pairwise("reduce_amax", "maximum"),
        "min": _total_or_pairwise("reduce_amin", "minimum"),
        "linalg_vector_norm": _norm,
    }
)

SQUARES: dict[str, Space] = {"left": ("rows", "rows"), "right": ("columns", "columns")}
"""Shapes of states that are square matrices of the parameter's rows or columns."""


def is_matrix_work(value: Value) -> bool:
    """Whether a value is computed on whole matrices, between tile passes."""
    return value.operation in MATRIX_OPERATIONS or (value.level is Level.MATRIX and value.operation != "load")


def _operand(build: Builder, item: Any, name: str) -> Value:
    if build.dims != 2:
        raise MatrixError(f"{name} works on matrices, but the parameter has {build.dims} dimensions")
    if not isinstance(item, Value) or item.level not in (Level.ELEMENT, Level.MATRIX):
        raise Unsupported(f"{name} requires a matrix computed from the parameter, gradient or states")
    return build.apply("number", item) if item.is_bool else item


def _apply(build: Builder, name: str, operands: Sequence[Any], numbers: Sequence[Any] = ()) -> Value:
    matrices = [_operand(build, operand, name) for operand in operands]
    values = [number if isinstance(number, Value) else build.constant(number) for number in numbers]
    space = MATRIX_OPERATIONS[name].space(*(matrix.space or PARAMETER for matrix in matrices))
    level = Level.ELEMENT if space == PARAMETER else Level.MATRIX
    value = build.apply(name, *matrices, *values, level=level)
    value.space = None if space == PARAMETER else space
    return value


def _plus_product(build: Builder, base: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Value:
    product = _apply(build, "matmul", [left, right])
    return _lower_add(build, *(_numeric("mul")(build, *pair) for pair in ((base, beta), (product, alpha))))


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


OPERATIONS.update(dict.fromkeys(MATRIX_OPERATIONS))
LOWERINGS.update({"mm": lambda build, *factors: _apply(build, "matmul", factors), "addmm": _plus_product})
LOWERINGS.update({name: _transposed for name in ("t", "transpose", "permute")})
LOWERINGS.update({name: _listed(name) for name in MATRIX_OPERATIONS if name not in ("matmul", "transpose")})
