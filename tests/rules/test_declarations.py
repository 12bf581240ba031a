"""What a rule's declaration must not say, refused where the rule is made."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilestep
from tilestep import RuleError, State, at_least


def gradient_as_state(p: Any, g: Any, grad: Any, *, lr: Any = 0.1) -> Any: ...
def parameter_as_state(p: Any, g: Any, param: Any, *, lr: Any = 0.1) -> Any: ...
def master_as_state(param: Any, grad: Any, master_param: Any, *, lr: Any = 0.1) -> Any: ...
def remainder_as_state(param: Any, grad: Any, remainder_param: Any, *, lr: Any = 0.1) -> Any: ...
def size_as_number(param: Any, grad: Any, *, rows: Any = 0.1) -> Any: ...
def count_as_number(param: Any, grad: Any, *, numel: Any = 0.1) -> Any: ...
def clip_as_number(param: Any, grad: Any, *, max_grad_norm: Any = 1.0) -> Any: ...


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (gradient_as_state, "state 'grad' needs another name: it is reserved for the gradient"),
        (parameter_as_state, "state 'param' needs another name: it is reserved for the parameter"),
        (master_as_state, "state 'master_param' needs another name"),
        (remainder_as_state, "state 'remainder_param' needs another name"),
        (size_as_number, "hyperparameter 'rows' needs another name: it is reserved for a size"),
        (count_as_number, "hyperparameter 'numel' needs another name"),
        (clip_as_number, "hyperparameter 'max_grad_norm' needs another name"),
    ],
)
def test_names_that_kernels_give_to_something_else(function: Callable[..., Any], said: str) -> None:
    """Kernels read the other thing under that name, and gave other numbers than the rule's own code."""
    with pytest.raises(RuleError, match=said) as caught:
        tilestep.rule(function)
    assert str(caught.value).startswith(f"{__file__}:{inspect.getsourcelines(function)[1]}")


def with_state(param: Any, grad: Any, average: Any, *, lr: Any = 0.1, start: Any = 1.0) -> Any: ...
def with_none(param: Any, grad: Any, *, betas: Any = None) -> Any: ...
def with_dict(param: Any, grad: Any, *, options: Any = {"a": 1}) -> Any: ...  # noqa: B006


def test_beginnings_ranges_and_defaults_that_there_are_not() -> None:
    with pytest.raises(RuleError, match=r"State\(shape='rows'\): it must be one of param, scalar, row, column, left"):
        State(shape="rows")
    with pytest.raises(RuleError, match=r"State\(None\): init must be a number"):
        State(None)  # type: ignore[arg-type]
    with pytest.raises(RuleError, match="state 'average' has zero_if_late='damp', which is not a hyperparameter"):
        tilestep.rule(states={"average": State(zero_if_late="damp")})(with_state)
    with pytest.raises(
        RuleError, match="state 'average' has init='begin', which is neither a hyperparameter nor 'param'"
    ):
        tilestep.rule(with_state, states={"average": State("begin")})
    assert tilestep.rule(with_state, states={"average": State("start")}).states["average"].init == "start"
    with pytest.raises(RuleError, match=r"ranges= names \['rate'\], which are not hyperparameters \(lr, start\)"):
        tilestep.rule(with_state, ranges={"rate": at_least(0)})
    several: Any = (at_least(0), at_least(0))
    for wrong in (5, (0, 1), several):
        with pytest.raises(RuleError, match=r"ranges= of 'lr' is .*; use tilestep.at_least, between or Interval"):
            tilestep.rule(with_state, ranges={"lr": wrong})
    pairs = tilestep.rule(with_none, ranges={"betas": several})
    with pytest.raises(ValueError, match=r"Invalid betas\[1\]: -1.0; it must be at least 0"):
        pairs.check({"betas": (1.0, -1.0)})
    with pytest.raises(RuleError, match="hyperparameter 'options' is a dict; it must be a number"):
        tilestep.rule(with_dict)


def test_a_default_of_several_elements_is_refused() -> None:
    several = torch.ones(2)

    def rule(param: Any, grad: Any, *, rates: Any = several) -> Any:
        return param - rates.sum() * grad

    with pytest.raises(RuleError, match="hyperparameter 'rates' is a Tensor; it must be a number, a tensor of one"):
        tilestep.rule(rule)


def test_dtypes_that_no_kernel_keeps_are_refused_with_those_that_are_possible() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        with pytest.raises(RuleError, match=r"float8.* of a state: it must be float16, bfloat16, float32 or float64"):
            State(dtype=dtype)


def test_one_number_a_tensor_is_as_wide_as_what_is_computed_in() -> None:
    """float64 beside float64 parameters, float32 where the rule says so; a float32 checkpoint still loads."""

    def averaged(param: Any, grad: Any, norm: Any, rounded: Any, *, lr: Any = 0.1) -> Any:
        norm = norm.lerp(grad.norm(), 0.1)
        return param - lr * grad / norm, norm, norm * 1.0

    rule = tilestep.rule(
        averaged, states={"norm": State(0.1, "scalar"), "rounded": State(shape="scalar", dtype=torch.float32)}
    )
    for dtype, kept in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        param = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = tilestep.Optimizer([param], rule)
        for turn in range(3):
            param.grad = torch.full_like(param, 0.3 + turn)
            optimizer.step()
        state = optimizer.state[param]
        assert (state["norm"].dtype, state["rounded"].dtype, state["step"].dtype) == (
            kept,
            torch.float32,
            torch.float32,
        )
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = tilestep.Optimizer([param], rule)
    exact = 0.1
    for turn in range(3):
        param.grad = torch.full_like(param, 0.3 + turn)
        exact += 0.1 * (3**0.5 * (0.3 + turn) - exact)
        optimizer.step()
    assert optimizer.state[param]["norm"].item() == pytest.approx(exact, rel=1e-14)
    old = optimizer.state_dict()
    old["state"][0]["norm"] = old["state"][0]["norm"].float()
    optimizer.load_state_dict(old)
    assert optimizer.state[param]["norm"].dtype is torch.float64
    assert optimizer.state[param]["norm"].item() == pytest.approx(exact, rel=1e-7)
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RuleError, match="supports float32 and float64"):
        State(shape="scalar", dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_number_in_float64_beside_smaller_parameters_outlives_a_checkpoint(
    dtype: torch.dtype, is_offloaded: bool
) -> None:
    def counted(param: Any, grad: Any, total: Any, *, lr: Any = 0.1) -> Any:
        return param - lr * grad, total + 0.1

    rule = tilestep.rule(counted, states={"total": State(2.0**30, "scalar", dtype=torch.float64)})
    param = torch.nn.Parameter(torch.ones(3, dtype=dtype))

    def made() -> tilestep.Optimizer:
        optimizer = tilestep.Optimizer([param], rule)
        return tilestep.offload(optimizer) if is_offloaded else optimizer

    exact, optimizer = 2.0**30, made()
    for _ in range(3):
        for _ in range(2):
            param.grad = torch.ones_like(param)
            optimizer.step()
            exact += 0.1
        saved, optimizer = optimizer.state_dict(), made()
        optimizer.load_state_dict(saved)
        total = optimizer.state[param]["total"]
        assert total.dtype is torch.float64 and total.item() == exact


def test_earlier_names_of_arguments_are_accepted() -> None:
    def turned(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        return param - lr * grad

    for names in ({"positional": ("foreach",), "fallback": "AdamW"}, {"by_position": ("foreach",), "others": "AdamW"}):
        made = tilestep.rule(turned, options={"foreach": None}, **names)
        assert (made.positional, made.fallback) == (("foreach",), "AdamW")


def test_a_rule_does_not_replace_one_of_the_library_s() -> None:
    """`tilestep.Optimizer(params, "AdamW")`, and checkpoints that name it, meant another rule from then on."""
    before = dict(tilestep.registry)

    def own(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        return param - lr * grad

    with pytest.raises(RuleError, match=r"tilestep has a rule called AdamW \(.*adam.py:\d+\), .*take another name"):
        tilestep.rule(own, name="AdamW")
    assert tilestep.registry == before
    try:  # a notebook's cell is run again
        assert tilestep.rule(own, name="OwnAdamW") is not tilestep.rule(own, name="OwnAdamW")
    finally:
        tilestep.registry.pop("OwnAdamW", None)


def test_hyperparameters_are_floats_to_a_rule_that_asks() -> None:
    """The message was of `isinstance() arg 2`."""

    def asking(param: Any, grad: Any, *, lr: Any = 0.5, beta: Any = 0.5, pair: Any = (1.0, 1.0)) -> Any:
        one, two = (beta, float(beta)) if isinstance(beta, float) and not isinstance(pair, float) else pair
        assert not isinstance(grad, float) and not isinstance(grad, (int, float))
        assert isinstance(float("1.5"), (int, float)) and repr(float(2)) == "2.0"
        assert isinstance(lr, torch.Tensor) and isinstance(lr, float | int)
        return param - lr * one * two * grad

    made = tilestep.rule(asking)
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    tilestep.Optimizer([param], made).step()
    assert param.tolist() == made(torch.zeros(2), torch.ones(2))[0].tolist() == [-0.125] * 2


def only_called(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad


def test_a_rule_that_no_name_leads_to_is_not_pickled() -> None:
    """It was another rule, a function, or an error, where it was loaded."""

    @tilestep.rule
    def inside(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        return param - lr * grad

    for rule in (tilestep.rule(only_called), inside, tilestep.rule(lambda param, grad, *, lr=0.1: param - lr * grad)):
        optimizer = tilestep.Optimizer([torch.nn.Parameter(torch.ones(3))], rule)
        with pytest.raises(pickle.PicklingError, match=r"cannot pickle .*: it is not .*; decorate"):
            pickle.dumps(optimizer)
        assert copy.deepcopy(optimizer).rule_of(optimizer.param_groups[0]) is rule
