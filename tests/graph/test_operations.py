"""What each operation of a graph means on Python numbers, against torch on 0-dim float64 tensors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tilestep.graph import OPERATIONS, Builder, Level, Value, evaluate
from tilestep.graph.ir import join

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 3.0, -3.0, 7.25, -0.1, 0.1, 1e-300, -5e-324, 5e-324, 710.0]
SPECIAL += [-745.2, 1e155, -1e155, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan]
# The sign of a zero: of two equal zeros torch takes either, and the remainder's depends on the vector width.
LOSES_ZERO_SIGN = {"maximum", "minimum", "remainder"}
# On some processors torch takes MKL's square root, which is an ulp off here and there.
LIBRARY = {"tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erfc", "lgamma", "log10"}
LIBRARY |= {"pow", "atan2", "exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tanh", "erf", "sqrt"}
TORCH = {"and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not, "number": torch.clone}
BINARY = {"add", "sub", "mul", "div", "pow", "remainder", "fmod", "atan2", "copysign", "maximum", "minimum"}
BINARY |= {"lt", "le", "gt", "ge", "eq", "ne", "and", "or"}
SCALAR = sorted(name for name, function in OPERATIONS.items() if function)


def argument_count(name: str) -> int:
    return 3 if name == "where" else 2 if name in BINARY else 1


def of_torch(name: str, args: tuple[float, ...]) -> float | bool:
    tensors = [torch.tensor(arg, dtype=torch.float64) for arg in args]
    if name == "where":
        return torch.where(tensors[0] != 0, *tensors[1:]).item()
    return TORCH.get(name, getattr(torch, name, None))(*tensors).item()


def agree(got: float, wanted: float, ulps: int, signed_zero: bool = True) -> bool:
    if isinstance(wanted, bool):
        return got is wanted
    if ulps and abs(got - wanted) <= ulps * 5e-324:
        return True  # torch's vector libraries flush some denormal results
    if math.isnan(wanted) or math.isinf(wanted) or wanted == 0:
        same_sign = math.copysign(1, got) == math.copysign(1, wanted) or (wanted == 0 and not signed_zero)
        return math.isnan(got) if math.isnan(wanted) else got == wanted and same_sign
    return abs(got - wanted) <= ulps * math.ulp(wanted)


@pytest.mark.parametrize("name", SCALAR)
def test_numbers_are_computed_as_torch_computes_them(name: str) -> None:
    function = OPERATIONS[name]
    assert function is not None
    for args in itertools.product(SPECIAL, repeat=argument_count(name)):
        operands = (bool(args[0]), *args[1:]) if name == "where" else args
        got, wanted = function(*operands), of_torch(name, args)
        tolerance = 128 if name == "lgamma" else 2 if name in LIBRARY else 0  # Python has a lgamma of its own
        assert agree(got, wanted, tolerance, name not in LOSES_ZERO_SIGN), f"{name}{args} is {got}, in torch {wanted}"


@pytest.mark.parametrize("name", SCALAR)
def test_folding_a_constant_is_evaluating_it(name: str) -> None:
    function = OPERATIONS[name]
    values = [-1.5, 2.0, 0.0][: argument_count(name)]
    assert function is not None
    expected = function(*values)
    build = Builder()
    folded = build.apply(name, *(build.constant(value) for value in values))
    late = Value(name, tuple(Value("hyper", attribute=f"h{i}", level=Level.GROUP) for i in range(len(values))))
    assert folded.operation == "constant" and folded.is_bool == isinstance(expected, bool)
    assert agree(folded.attribute, expected, 0)
    assert agree(evaluate(late, {f"h{i}": value for i, value in enumerate(values)}), expected, 0)


def test_a_builder_makes_equal_values_once() -> None:
    build = Builder()
    param, grad, lr = build.load("param"), build.load("grad"), build.hyper("lr")
    assert build.apply("mul", lr, grad) is build.apply("mul", build.hyper("lr"), build.load("grad"))
    assert build.apply("mul", lr, grad) is not build.apply("mul", lr, param)
    assert build.constant(1) is build.constant(1.0)
    assert build.constant(True) is not build.constant(1.0)
    assert build.constant(0.0) is not build.constant(-0.0)
    assert build.constant(math.nan) is build.constant(math.nan)


def test_a_builder_drops_what_changes_no_bit_and_nothing_else() -> None:
    build = Builder()
    param = build.load("param")
    zero, minus_zero, one = build.constant(0.0), build.constant(-0.0), build.constant(1.0)
    positive = build.apply("gt", param, zero)
    for same in (
        build.apply("mul", param, one),
        build.apply("mul", one, param),
        build.apply("div", param, one),
        build.apply("pow", param, one),
        build.apply("sub", param, zero),
        build.apply("neg", build.apply("neg", param)),
        build.apply("number", param),
        build.apply("where", positive, param, param),
        build.apply("where", build.constant(True), param, zero),
        build.apply("where", build.constant(False), zero, param),
    ):
        assert same is param
    # -0.0 + 0.0 and -0.0 - -0.0 are 0.0, NaN * 0 is NaN, inf - inf is NaN.
    for other in (
        build.apply("add", param, zero),
        build.apply("sub", param, minus_zero),
        build.apply("mul", param, zero),
        build.apply("sub", param, param),
        build.apply("div", one, param),
        build.apply("pow", one, param),
        build.apply("number", positive),
    ):
        assert other.operation not in ("load", "constant")


def test_levels_join_to_the_larger_and_rows_with_columns_make_elements() -> None:
    assert join([]) == (Level.CONSTANT, None)
    overs = {Level.SLICE: (1, 2)}
    for left, right in itertools.product(Level, repeat=2):
        values = [Value("load", attribute="x", level=level, over=overs.get(level)) for level in (left, right)]
        assert join(values) == (max(left, right), overs.get(max(left, right)))
    row, column, matrix = (Value("load", level=Level.SLICE, over=over) for over in ((2, 3), (1, 2), (1, 3)))
    assert join([row, column]) == (Level.ELEMENT, None)
    assert join([row, matrix]) == (Level.SLICE, (2, 3))
    assert join([matrix, column]) == (Level.SLICE, (1, 2))


def test_a_reduction_is_not_a_number_before_the_step() -> None:
    total = Value("reduce_sum", (Value("load", attribute="grad", level=Level.ELEMENT),), level=Level.TENSOR)
    with pytest.raises(KeyError):
        evaluate(total, {})
    with pytest.raises(KeyError, match="lr"):
        evaluate(Value("hyper", attribute="lr", level=Level.GROUP), {})
