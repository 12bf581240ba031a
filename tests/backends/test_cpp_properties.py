"""Generated C++ against eager torch: random rules to the last bit, library functions to their accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_rules import Program, all_pairs, programs, rule_of, same_bits

import tilestep
from tilestep.backends.cpp import run
from tilestep.graph import Level, evaluate, trace
from tilestep.kernels import cache
from tilestep.rules import Rule

BUFFERS = ("one", "two", "three", "four")


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Random kernels are of no use in the common cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILESTEP_CACHE_DIR", str(tmp_path_factory.mktemp("kernels") / "cache"))
        cache.forget_directory()
        yield
    cache.forget_directory()


@pytest.fixture
def _no_contraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fused multiply-add every IEEE operation has one result, which eager torch has too."""
    flags = run._flags
    monkeypatch.setattr(run, "_flags", lambda spec: (*flags(spec), "-ffp-contract=off"))


def step(rule: Rule, param: torch.Tensor, grad: torch.Tensor, states: dict[str, torch.Tensor], **hyper: Any) -> Any:
    """New parameter and states by one step of the generated kernel."""
    weight = torch.nn.Parameter(param.clone())
    optimizer = tilestep.Optimizer([weight], rule, **hyper)
    optimizer.fitting_plan(ahead=True)
    kept = optimizer.state[weight]
    for name, value in states.items():
        if name in kept:
            kept[name].copy_(value)
    weight.grad = grad.clone()
    optimizer.step()
    return {"param": weight.detach(), **{name: kept.get(name, value) for name, value in states.items()}}


@pytest.mark.usefixtures("_no_contraction")
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    program=programs(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    a=st.sampled_from([0.5, -0.0, 3.0, float("inf"), 1e-40]),
    b=st.sampled_from([2.0, -1.5, 0.1, 1e200]),
)
def test_random_rules_step_to_the_bit_as_torch_runs_them(
    program: Program, dtype: torch.dtype, a: float, b: float
) -> None:
    rule = rule_of(program)
    param, grad = all_pairs(dtype)
    states = {name: param.roll(3 * index + 1) for index, name in enumerate(BUFFERS)}
    wanted = rule(param.clone(), grad.clone(), *(state.clone() for state in states.values()), a=a, b=b, step=1)
    got = step(rule, param, grad, states, a=a, b=b)
    for name, new in zip(("param", *BUFFERS), wanted):
        expected = new.to(dtype).expand_as(param).contiguous()
        wrong = ~same_bits(got[name], expected)
        assert not wrong.any(), (
            f"{name} of param {param[wrong][:3]}, grad {grad[wrong][:3]}: {got[name][wrong][:3]}, "
            f"in torch {expected[wrong][:3]}"
        )


LOGICAL = {"and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(program=programs(), a=st.sampled_from([0.5, -0.0, 3.0, 1e-40]), b=st.sampled_from([2.0, -1.5, 0.1, 1e200]))
def test_numbers_of_a_group_are_what_torch_makes_of_them(program: Program, a: float, b: float) -> None:
    rule = rule_of(program)
    numbers = {"a": a, "b": b, "step": 3.0}
    graph = trace(rule, {"a": a, "b": b})
    references: dict[int, torch.Tensor] = {}
    for value in graph.values():
        if value.operation == "constant":
            references[id(value)] = torch.tensor(value.attribute, dtype=None if value.is_bool else torch.float64)
        elif value.operation == "hyper" and value.attribute in numbers:
            references[id(value)] = torch.tensor(numbers[value.attribute], dtype=torch.float64)
        elif value.level is Level.GROUP and value.args and all(id(arg) in references for arg in value.args):
            args = [references[id(arg)] for arg in value.args]
            if value.operation == "number":
                references[id(value)] = args[0].to(torch.float64)
            else:
                references[id(value)] = LOGICAL.get(value.operation, getattr(torch, value.operation, None))(*args)
            got, wanted = evaluate(value, numbers), references[id(value)].item()
            same = got == wanted if value.operation in ("maximum", "minimum") else repr(got) == repr(wanted)
            assert same or (got != got and wanted != wanted), (value, got, wanted)


@tilestep.rule
def every_function(
    param: Any,
    grad: Any,
    sqrt: Any,
    exp: Any,
    exp2: Any,
    expm1: Any,
    log: Any,
    log2: Any,
    log1p: Any,
    sin: Any,
    cos: Any,
    tanh: Any,
    erf: Any,
    pow: Any,
    atan2: Any,
    fmod: Any,
    remainder: Any,
    *,
    exponent: Any = 1.7,
) -> tuple[Any, ...]:
    """Every function of the C library, one a state buffer."""
    one_argument = [getattr(torch, name)(param) for name in ONE_ARGUMENT]
    two_arguments = [getattr(torch, name)(param, grad) for name in TWO_ARGUMENTS]
    return (param**exponent, *one_argument, *two_arguments)


ONE_ARGUMENT = ["sqrt", "exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tanh", "erf"]
TWO_ARGUMENTS = ["pow", "atan2", "fmod", "remainder"]
# Correctly rounded, against the 4 units in the last place that vector libraries promise.
EXACT = {"sqrt", "fmod"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_library_functions_are_as_accurate_as_they_promise(dtype: torch.dtype) -> None:
    param, grad = all_pairs(dtype)
    generator = torch.Generator().manual_seed(3)
    random = torch.randn(2, 2000, dtype=dtype, generator=generator)
    ordinary = torch.cat([param, random[0] * 5, random[0].abs()]), torch.cat([grad, random[1], random[1] * 8])
    param, grad = ordinary
    states = {name: torch.zeros_like(param) for name in every_function.state_names}
    got = step(every_function, param, grad, states)
    for name in (*ONE_ARGUMENT, *TWO_ARGUMENTS):
        wanted = reference(name, param, grad)
        check_close(name, got[name], wanted, 0 if name in EXACT else 4, param, grad)
    check_close("pow", got["param"], reference("pow", param, torch.full_like(param, 1.7)), 4, param, grad)


def reference(name: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The result by numpy's and Python's own libraries, for float32 in float64: torch's vector ones round otherwise."""
    names = {"pow": "power", "atan2": "arctan2", "remainder": "fmod"}
    wide = [tensor.double().numpy() for tensor in (left, right)]
    with np.errstate(all="ignore"):
        if name == "erf":
            result = np.asarray([math.erf(value) for value in wide[0]])
        elif name in ONE_ARGUMENT:
            result = getattr(np, name)(wide[0])
        else:
            result = getattr(np, names.get(name, name))(*wide)
        if name == "remainder":
            result = np.where((result != 0) & ((result < 0) != (wide[1] < 0)), result + wide[1], result)
        return torch.from_numpy(result).to(left.dtype)


def check_close(name: str, got: Any, wanted: Any, ulps: int, param: Any, grad: Any) -> None:
    """Equal up to so many units in the last place; infinities and NaN in the same places."""
    inf = torch.tensor(math.inf, dtype=wanted.dtype)
    unit = torch.maximum(torch.nextafter(wanted.abs(), inf) - wanted.abs(), torch.nextafter(torch.zeros_like(inf), inf))
    close = (got == wanted) | (got.isnan() & wanted.isnan()) | ((got - wanted).abs() <= ulps * unit)
    wrong = ~close
    where = list(zip(param[wrong].tolist(), grad[wrong].tolist(), got[wrong].tolist(), wanted[wrong].tolist()))
    assert not where, f"{name}: (param, grad, got, wanted) {where[:5]} of {len(where)}"
