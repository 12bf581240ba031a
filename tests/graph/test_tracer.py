"""Tracing: what a rule may say, and what the message is when it says something else."""

from __future__ import annotations

import inspect
import math
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from module_files import load
from traced_rules import line_of, traced

import tilestep
from tilestep import RuleError, State
from tilestep.graph import trace
from tilestep.graph.lowering import ALTERNATIVE, nearest
from tilestep.runtime import graph_for

OUTSIDE = torch.ones(3)
OUTSIDE_NUMBER = torch.tensor(0.5)


def multiplies(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * torch.cumsum(grad, 0)


def sorts(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    order = grad.sort().values
    return param - lr * order


def draws(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * torch.rand_like(grad)


def views(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param.view(-1) - lr * grad


def slices(param: Any, grad: Any, *, lr: Any = 0.1) -> None:
    param[1:].sub_(lr * grad[1:])


def assigns(param: Any, grad: Any, *, lr: Any = 0.1) -> None:
    param[grad > 0] = 0.0


def transposes(param: Any, grad: Any, *, lr: Any = 0.1) -> None:
    param.t().sub_(grad.t())


def into(param: Any, grad: Any, *, lr: Any = 0.1) -> None:
    torch.add(param, grad, out=param)


def rounds(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad.to(torch.bfloat16)


def rounds_in_place(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - torch.empty_like(grad, dtype=torch.float16).copy_(grad)


def rounds_to_bytes(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad.to(torch.float8_e4m3fn).to(torch.float32)


def is_complex(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad.to(torch.complex64).to(torch.float32)


def masks_bits(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * (grad.int() & 3)


def inverts_bits(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * ~grad.int()


def asks_for_parity(param: Any, grad: Any, *, lr: Any = 0.1, step: Any) -> Any:
    return param - lr * (step & 1) * grad


def sums_integers(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad.sum(dtype=torch.int32)


def makes(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - torch.tensor([1.0, 2.0, 3.0]) * grad


def splits(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    first, *_ = grad.unbind()
    return param - lr * first


NO_TRANSLATION = [
    (multiplies, "torch.cumsum", 1, "aten.cumsum"),
    (sorts, "grad.sort", 1, "aten.sort"),
    (draws, "rand_like", 1, "aten.rand_like"),
    (views, "view(-1)", 2, "aten.view"),
    (slices, "sub_", 1, "aten.slice"),
    (splits, "unbind", 1, "aten.unbind"),
    (assigns, "= 0.0", 1, "assigning to elements"),
    (transposes, "sub_", 2, "writes through a view"),
    (into, "out=param", 1, "out= argument"),
    (rounds, "bfloat16", 1, "buffers are rounded when they are stored"),
    (rounds_in_place, "float16", 1, "buffers are rounded when they are stored"),
    (rounds_to_bytes, "float8", 1, "8-bit dtypes are not supported inside a rule; buffers are rounded"),
    (is_complex, "complex64", 1, "complex numbers are not supported inside a rule"),
    (masks_bits, "& 3", 1, "bitwise operations on integers"),
    (inverts_bits, "~grad", 1, "bitwise operations on integers"),
    (asks_for_parity, "& 1", 1, "bitwise operations on integers"),
    (sums_integers, "dtype", 1, "a reduction in torch.int32"),
    (makes, "torch.tensor", 1, "must be a single number"),
]


@pytest.mark.parametrize(
    ("function", "text", "dims", "said"), NO_TRANSLATION, ids=lambda value: getattr(value, "__name__", "")
)
def test_an_operation_without_translation_is_named_with_its_line_and_what_works(
    function: Callable[..., Any], text: str, dims: int, said: str
) -> None:
    with pytest.raises(RuleError) as caught:
        traced(function, dims)
    message = str(caught.value)
    assert message.startswith(f"{line_of(function, text)}: in rule {function.__name__}: ")
    assert said in message
    operation = said.removeprefix("aten.")
    assert message.endswith(f"; {nearest(operation)}")
    assert (nearest(operation) == ALTERNATIVE) == (operation == said)


def reshapes(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad.reshape(param.shape)


def reshapes_to_rows(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad.reshape(param.size(0), -1)


def makes_zeros(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * torch.zeros(param.shape)


def narrows(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad.narrow(0, 0, param.size(0))


def sums_along_a_size(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad.sum(dim=param.size(0))


def counts_in_python(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad / int(param.numel())


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (reshapes, f"reshape has no translation to a kernel; {nearest('reshape')}"),
        (reshapes_to_rows, f"reshape has no translation to a kernel; {nearest('view')}"),
        (makes_zeros, "zeros has no translation to a kernel; use torch.zeros_like(param)"),
        (narrows, f"narrow has no translation to a kernel; {nearest('slice')}"),
        (
            sums_along_a_size,
            "sum() requires a Python number, but sizes, hyperparameters and the step are tensors in a rule",
        ),
        (counts_in_python, "reads numel as a Python number, which differs between parameters; use torch.where"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_size_is_not_a_python_number(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(RuleError) as caught:
        traced(function, 2)
    place = f"{line_of(function, 'return')}: in rule {function.__name__}: "
    assert str(caught.value).startswith(place + said) and "FakeTensor" not in str(caught.value)


def of_vectors(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * (grad @ grad) * grad


def of_order_one(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad / torch.linalg.norm(grad, 1)


def of_largest(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad / torch.linalg.norm(input=grad, ord=float("inf"))


@pytest.mark.parametrize("function", [of_vectors, of_order_one, of_largest])
def test_what_means_another_thing_for_matrices_is_traced_for_them_too(function: Callable[..., Any]) -> None:
    """torch takes these apart before the tracer sees them, and for matrices otherwise than for vectors."""
    rule = tilestep.rule(function)
    vector = torch.linspace(-1, 2, 6, dtype=torch.float64)
    wanted = rule(vector, 1 + vector)[0]
    param = torch.nn.Parameter(vector.clone())
    optimizer = tilestep.Optimizer([param], rule)
    param.grad = 1 + vector
    optimizer.step()
    torch.testing.assert_close(param.detach(), wanted)
    with pytest.raises(RuleError, match=function.__name__):
        optimizer.add_param_group({"params": torch.nn.Parameter(torch.ones(4, 4))})


def test_numbers_made_inside_a_rule_keep_one_kernel_for_all_dimensions() -> None:
    """What torch does to numbers, its makers and its composite functions of them, is the same for all tensors."""

    def scheduled(param: Any, grad: Any, *, lr: Any = 0.1, step: Any) -> Any:
        part = torch.as_tensor(step, dtype=torch.float64) / torch.tensor(10.0)
        return param - lr * torch.special.expm1(part) * grad.square()

    for dims in range(4):
        assert not traced(scheduled, dims).reads_shape, dims


def test_an_axis_that_a_parameter_has_not_is_named_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    def by_rows(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        return param - lr * grad / grad.norm(dim=1, keepdim=True)

    assert "param" in traced(by_rows, 2).outputs
    with pytest.raises(RuleError, match="out of range") as caught:
        traced(by_rows, 1)
    assert line_of(by_rows, "dim=1") in str(caught.value)
    assert not caplog.records, "torch tells its log what we say in the error"


def test_the_parameters_precision_may_be_asked_after_a_decay() -> None:
    decayed = tilestep.decoupled_weight_decay(tilestep.registry["Adafactor"], 0.1)
    param = torch.nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4))
    start = param.detach().clone()
    optimizer = tilestep.Optimizer([param], decayed, lr=0.5)
    param.grad = torch.ones_like(param)
    optimizer.step()
    row, column = torch.zeros(3, 1, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64)
    wanted = decayed(start, param.grad, row, column, None, lr=0.5, step=1)[0]
    torch.testing.assert_close(param.detach(), wanted)


def test_the_line_is_that_of_the_called_function() -> None:
    def outer(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        return sorts(param, grad, lr=lr)

    with pytest.raises(RuleError) as caught:
        traced(outer)
    assert str(caught.value).startswith(line_of(sorts, "grad.sort"))


def on_gradient(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    if (grad > 0).any():
        return param
    return param - lr * grad


def on_norm(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    size = grad.norm()
    return param if size > 1 else param - lr * grad


def on_step(param: Any, grad: Any, *, lr: Any = 0.1, step: Any) -> Any:
    return param if step > 10 else param - lr * grad


def by_item(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr.item() * grad


def by_numpy(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * torch.from_numpy(grad.numpy())


@pytest.mark.parametrize(
    ("function", "text"),
    [(on_gradient, "if"), (on_norm, "if"), (by_numpy, "from_numpy")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_branch_on_data_is_refused(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(RuleError) as caught:
        traced(function)
    place = f"{line_of(function, text)}: in rule {function.__name__}: branches on (or reads) data: "
    assert str(caught.value).startswith(place)
    assert str(caught.value).endswith(" is only known on the device; use torch.where instead of if")


@pytest.mark.parametrize("function", [on_step, by_item])
def test_a_number_that_changes_is_not_read(function: Callable[..., Any]) -> None:
    with pytest.raises(RuleError, match=r"as a Python number, which may change every step; use torch\.where"):
        traced(function)


def test_a_branch_on_hyperparameters_becomes_a_guard() -> None:
    def decays(param: Any, grad: Any, *, lr: Any = 0.1, decay: Any = 0.0) -> Any:
        if decay > 0:
            param = param * (1 - lr * decay)
        return param - lr * grad

    rule = tilestep.rule(decays)
    without = trace(rule, {"lr": 0.1, "decay": 0.0})
    with_decay = trace(rule, {"lr": 0.1, "decay": 0.5})
    assert [outcome for _, outcome in without.guards] == [False]
    assert [outcome for _, outcome in with_decay.guards] == [True]
    assert "decay" not in without.hypers() and "decay" in with_decay.hypers()


def test_a_number_that_only_a_device_can_read_is_not_switched_off() -> None:
    def decays(param: Any, grad: Any, *, lr: Any = 0.1, decay: Any = 0.0, limit: Any = 1.0) -> Any:
        if decay != 0:
            param = param * (1 - lr * decay)
        return param - lr * grad if limit > 0.5 else param

    rule, elsewhere = tilestep.rule(decays), torch.empty((), device="meta")
    off, on, unread = (
        graph_for(rule, {"lr": 0.1, "decay": weight_decay, "limit": 1.0}, 1) for weight_decay in (0.0, 0.5, elsewhere)
    )
    assert off is not on and unread is on
    assert graph_for(rule, {"lr": elsewhere, "decay": 0.0, "limit": 1.0}, 1) is off
    with pytest.raises(RuleError, match="reads gt of limit as a Python number"):
        graph_for(rule, {"lr": 0.1, "decay": 0.0, "limit": elsewhere}, 1)


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_momentum_may_live_on_a_device(name: str) -> None:
    rule = tilestep.registry[name]
    graph = graph_for(rule, {**rule.hyperparameters, "momentum": torch.empty((), device="meta")}, 2)
    assert "momentum_buffer" in graph.states and "momentum" in graph.hypers()


def test_a_branch_on_sizes_becomes_a_guard() -> None:
    def long_rows(param: Any, grad: Any, *, lr: Any = 0.1, limit: Any = 8) -> Any:
        if param.dim() > 1 and param.size(-1) > limit:
            return param - lr * grad.sign()
        return param - lr * grad

    rule = tilestep.rule(long_rows)
    graphs = {shape: trace(rule, rule.hyperparameters, len(shape), shape) for shape in [(3, 9), (9, 8), (50,)]}
    operations = {shape: {value.operation for value in graph.values()} for shape, graph in graphs.items()}
    assert [shape for shape, operation_names in operations.items() if "sign" in operation_names] == [(3, 9)]
    assert [graph.branches_on_sizes for graph in graphs.values()] == [True, True, False]
    assert [outcome for _, outcome in trace(rule, rule.hyperparameters, 2).guards] == [False]  # sizes of one
    earlier = graph_for(rule, {"lr": 0.1, "limit": 8}, 2, (4, 9))
    assert graph_for(rule, {"lr": 0.2, "limit": 9}, 2, (7, 10)) is earlier
    assert graph_for(rule, {"lr": 0.1, "limit": 8}, 2, (4, 8)) is not earlier


def by_shape(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    if param.shape[0] > 5 or grad.size()[0] < 2:
        lr = 2 * lr
    return param - lr / param.shape[-1] * param.nelement() * grad


def test_shapes_are_those_of_the_parameter() -> None:
    """Every spelling of a size is the parameter's, not that of what the rule is traced with."""
    params = [torch.zeros(shape, dtype=torch.float64) for shape in [(2, 3), (20, 30), (7,), (50,), (1, 4)]]
    expected = [
        param - (0.2 if param.size(0) in (20, 7, 50, 1) else 0.1) / param.size(-1) * param.numel() for param in params
    ]
    for param in params:
        param.grad = torch.ones_like(param)
        param.requires_grad_()
    tilestep.Optimizer(params, tilestep.rule(by_shape), lr=0.1).step()
    torch.testing.assert_close([param.detach() for param in params], expected)


@pytest.mark.parametrize(
    ("what", "number"),
    [("len()", len), ("stride()", lambda param: param.stride(0)), ("nbytes", lambda param: param.nbytes)],
    ids=["len", "stride", "nbytes"],
)
def test_numbers_that_only_a_tensor_in_memory_has_are_refused(what: str, number: Callable[[Any], Any]) -> None:
    def by_number(param: Any, grad: Any) -> Any:
        return param - grad / number(param)

    with pytest.raises(RuleError, match=re.escape(f"{what} of a tensor")):
        trace(tilestep.rule(by_number), {})


def uses_tensor(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * OUTSIDE * grad


def uses_number(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - grad * OUTSIDE_NUMBER


@pytest.mark.parametrize(("function", "shape"), [(uses_tensor, r"\(3,\)"), (uses_number, r"\(\)")])
def test_a_tensor_from_outside_is_refused(function: Callable[..., Any], shape: str) -> None:
    with pytest.raises(RuleError, match=f"a tensor of shape {shape} that is neither a state") as caught:
        traced(function)
    assert str(caught.value).startswith(line_of(function, "OUTSIDE"))


def test_an_error_inside_torch_says_where() -> None:
    def joins(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        return torch.cat([param, lr])

    with pytest.raises(RuleError) as caught:
        traced(joins, 2)
    assert line_of(joins, "torch.cat") in str(caught.value)


def too_few(param: Any, grad: Any, exp_avg: Any, *, lr: Any = 0.1) -> Any:
    return param


def too_many(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param, grad, grad


def a_number(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return 1.0


def transposed(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param.t()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (too_few, r"too_few\(\) returned 1 value, it must return 2: param, exp_avg \(or None"),
        (too_many, r"too_many\(\) returned 3 values, it must return 1: param"),
        (a_number, "a_number returns float for param, not a tensor"),
        (transposed, r"transposed returns shape \(11, 7\) for param; it must keep its shape"),
    ],
)
def test_results_that_do_not_fit_are_refused(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(RuleError, match=said) as caught:
        traced(function, 2)
    assert str(caught.value).startswith(f"{__file__}:{inspect.getsourcelines(function)[1]}")


def loses_both(param: Any, grad: Any, velocity: Any, *, lr: Any = 0.1) -> None:
    velocity = 0.9 * velocity + grad
    param = param - lr * velocity


def loses_state(param: Any, grad: Any, velocity: Any, *, lr: Any = 0.1) -> None:
    velocity = 0.9 * velocity + grad
    param.sub_(lr * velocity)


def keeps_what_it_only_reads(param: Any, grad: Any, curvature: Any, *, lr: Any = 0.1) -> None:
    scaled = curvature.abs() + 1
    param.sub_(lr * grad / scaled)


def test_new_values_that_would_be_lost_are_refused() -> None:
    for function, text in ((loses_both, "param = param"), (loses_state, "velocity = 0.9")):
        with pytest.raises(RuleError, match=r"to a new tensor and does not return it.* change it in place") as caught:
            traced(function)
        assert str(caught.value).startswith(line_of(function, text))
    assert set(traced(keeps_what_it_only_reads).outputs) == {"param"}


def test_a_refusal_that_the_rule_catches_is_one() -> None:
    def tries(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        try:
            update = grad.sort().values
        except Exception:
            update = grad
        return param - lr * update

    with pytest.raises(RuleError, match=re.escape(f"{line_of(tries, 'sort()')}: in rule tries: torch.ops.aten.sort")):
        traced(tries)


def test_a_number_in_a_tuple_inside_a_tuple_is_a_constant_of_the_graph() -> None:
    def pairs(param: Any, grad: Any, *, rates: Any = ((0.1, 0.2), (0.3, 0.4))) -> Any:
        return param - rates[1][0] * grad

    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = tilestep.Optimizer([weight], tilestep.rule(pairs))
    weight.grad = torch.ones(3)
    for rates in (((0.1, 0.2), (0.3, 0.4)), ((0.1, 0.2), (0.5, 0.4)), [[0.1, 0.2], [1.0, 0.4]]):
        optimizer.param_groups[0]["rates"] = rates
        optimizer.step()
    rates[1][0] = 2.0
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), -3.8))


def test_a_state_that_is_only_read_may_be_cloned() -> None:
    def reads(param: Any, grad: Any, m: Any, v: Any, *, lr: Any = 0.1) -> Any:
        return param - lr * grad * (m.clone() + v.detach().to(torch.float32)), m, v

    assert list(traced(reads).outputs) == ["param"]


def test_a_signature_must_say_everything() -> None:
    def no_star(param: Any, grad: Any, lr: Any = 0.1) -> Any: ...
    def word(param: Any, grad: Any, mode: Any = "sign") -> Any: ...
    def star(param: Any, grad: Any, *states: Any) -> Any: ...
    def double_star(param: Any, grad: Any, **hyper: Any) -> Any: ...
    def no_default(param: Any, grad: Any, *, lr: Any) -> Any: ...
    def no_gradient(param: Any) -> Any: ...
    def fine(param: Any, grad: Any, exp_avg: Any) -> Any: ...

    for function, said in (
        (star, r"\*states is not allowed: name every state"),
        (double_star, r"\*hyper is not allowed"),
        (no_default, "hyperparameter 'lr' needs a default"),
        (no_gradient, "needs at least a parameter and a gradient"),
        (no_star, r"lr=0.1 is among the state buffers; put a bare \* before the hyperparameters"),
        (word, r"mode='sign' is among the state buffers"),
    ):
        with pytest.raises(RuleError, match=said) as caught:
            tilestep.rule(function)
        assert str(caught.value).startswith(f"{__file__}:{inspect.getsourcelines(function)[1]}")
    with pytest.raises(RuleError, match=r"states= names \['momentum'\], which are not parameters of fine"):
        tilestep.rule(fine, states={"momentum": State()})
    with pytest.raises(RuleError, match="requires a function, not 3"):
        tilestep.rule(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, -0.1])
def test_hyperparameters_out_of_range_are_refused(value: float) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"Invalid lr: .*; it must be at least 0"):
        tilestep.Optimizer([weight], "AdamW", lr=value)
    with pytest.raises(ValueError, match=r"Invalid betas\[1\]: .*; it must be in \[0, 1\)"):
        tilestep.Optimizer([weight], "AdamW", betas=(0.9, value))
    with pytest.raises(TypeError, match="has no hyperparameter 'momentum'"):
        tilestep.Optimizer([weight], "AdamW", momentum=0.9)


def forgets(param: Any, grad: Any, momentum_buffer: Any, *, lr: Any = 0.1) -> None:
    momentum_buffer.lerp_(grad, 0.1)
    param - lr * momentum_buffer


def collapses(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return (param - lr * grad).mean()


def test_a_rule_that_forgets_to_return_is_refused_by_itself_and_inside_another() -> None:
    with pytest.raises(
        RuleError, match=r"forgets\(\) returns nothing and does not change param, so nothing would train"
    ):
        traced(forgets)
    composed = tilestep.cautious(tilestep.rule(forgets))
    with pytest.raises(RuleError, match="returns nothing and does not change param"):
        trace(composed, composed.hyperparameters, 1)


def test_one_number_for_the_parameter_is_refused_but_where_it_is_one() -> None:
    for dims in (1, 2):
        with pytest.raises(RuleError, match="collapses returns one number for param") as caught:
            traced(collapses, dims)
        assert line_of(collapses, "mean()") in str(caught.value)
    single, vector = torch.nn.Parameter(torch.tensor(1.0)), torch.nn.Parameter(torch.ones(3))
    optimizer = tilestep.Optimizer([single], tilestep.rule(collapses))
    single.grad = torch.tensor(0.5)
    optimizer.step()
    assert single.item() == pytest.approx(0.95)
    with pytest.raises(RuleError, match="one number for param"):
        optimizer.add_param_group({"params": [vector]})


def drops_out(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * torch.nn.functional.dropout(grad, 0.1)


def makes_noise(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * (grad + torch.empty_like(grad).normal_())


@pytest.mark.parametrize(("function", "name"), [(drops_out, "dropout"), (makes_noise, "normal_")])
def test_random_numbers_are_named_as_such(function: Callable[..., Any], name: str) -> None:
    with pytest.raises(RuleError, match=f"{name} draws random numbers; random numbers are refused"):
        traced(function)


CACHED: dict[str, Any] = {}
GENERATOR = np.random.default_rng(0)


def dithers(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad * random.random()


def helps(scale: float) -> float:
    return random.gauss(0, scale)


def dithers_by_a_helper(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad * helps(1.0)


def dithers_by_numpy(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad * float(GENERATOR.normal())


def dithers_by_numpys_module(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad * float(np.random.rand())


def anneals(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    return param - lr * grad / time.monotonic()


def follows_the_clock(param: Any, grad: Any, *, lr: Any = lambda step: step * time.time()) -> Any:
    return param - lr * grad


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (dithers, "random.random"),
        (dithers_by_a_helper, "random.gauss"),
        (dithers_by_numpy, "numpy.random"),
        (dithers_by_numpys_module, "numpy.random"),
        (anneals, "time.monotonic"),
        (follows_the_clock, "time.time"),
    ],
)
def test_what_would_be_frozen_in_the_kernel_is_refused(function: Callable[..., Any], name: str) -> None:
    before = sys.getprofile()
    with pytest.raises(RuleError, match=rf"{name}.* is called once, when the rule is traced"):
        traced(function)
    assert sys.getprofile() is before


def caches(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    if "momentum" not in CACHED:
        CACHED["momentum"] = torch.zeros_like(param)
    CACHED["momentum"].mul_(0.9).add_(grad)
    return param - lr * CACHED["momentum"]


def test_a_tensor_kept_for_the_next_call_is_refused_by_name() -> None:
    CACHED.clear()
    with pytest.raises(RuleError, match=r"in rule caches: CACHED keeps a tensor between calls.* make it a state"):
        traced(caches)
    with pytest.raises(RuleError, match=r"uses a tensor of shape .* neither a state buffer nor computed from one"):
        traced(caches)
    CACHED.clear()


def test_a_rule_whose_file_has_been_edited_since_is_traced(tmp_path: Path) -> None:
    """Names of variables are read from the file, where a string was open at the place of the rule."""
    file = tmp_path / "edited_rule.py"
    file.write_text(
        "import tilestep\n\n\n@tilestep.rule\ndef descent(param, grad, *, lr=0.1):\n    return param - lr * grad\n"
    )
    rule = load(file).descent
    file.write_text('\n"""Another file.\n')
    assert set(trace(rule, rule.hyperparameters).outputs) == {"param"}
