"""Tracing: the ways to say one thing in a rule, and which names its values get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from traced_rules import line_of, traced

import tilestep
from tilestep import RuleError
from tilestep.graph import Graph, Level, trace
from tilestep.rules import Rule, registry


def adam_functional(param: Any, grad: Any, m: Any, v: Any, *, lr: Any = 0.1, beta: Any = 0.9, step: Any) -> Any:
    decayed = param * (1 - lr * 0.01)
    m = m + (1 - beta) * (grad - m)
    v = v * beta + (1 - beta) * grad * grad
    denom = v.sqrt() + 1e-8
    return decayed + (-lr) * (m / denom), m, v


def adam_in_place(param: Any, grad: Any, m: Any, v: Any, *, lr: Any = 0.1, beta: Any = 0.9, step: Any) -> None:
    param.mul_(1 - lr * 0.01)
    m.lerp_(grad, 1 - beta)
    v.mul_(beta).addcmul_(grad, grad, value=1 - beta)
    denom = v.sqrt().add_(1e-8)
    param.addcdiv_(m, denom, value=-lr)


def adam_through_data(param: Any, grad: Any, m: Any, v: Any, *, lr: Any = 0.1, beta: Any = 0.9, step: Any) -> None:
    weights = param.data
    weights *= 1 - lr * 0.01
    m += (1 - beta) * (grad - m)
    v.detach().copy_(v * beta + (1 - beta) * grad.square())
    weights.add_(m / (v.sqrt() + 1e-8), alpha=-lr)


def adam_by_torch_functions(
    param: Any, grad: Any, m: Any, v: Any, *, lr: Any = 0.1, beta: Any = 0.9, step: Any
) -> tuple[Any, ...]:
    m = torch.lerp(m, grad, weight=1 - beta)
    v = torch.addcmul(v * beta, grad, grad, value=1 - beta)
    param = torch.sub(param, torch.mul(param, lr * 0.01))
    return torch.add(param, torch.div(m, torch.add(v.sqrt(), 1e-8)), alpha=-lr), m, v


def stepped(rule: Rule, dtype: torch.dtype) -> list[torch.Tensor]:
    """Parameter and states after three steps of the generated kernel."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.nn.Parameter(torch.randn(100, generator=generator).to(dtype))
    optimizer = tilestep.Optimizer([weight], rule)
    for _ in range(3):
        weight.grad = torch.randn(100, generator=generator).to(dtype)
        optimizer.step()
    return [weight.detach(), optimizer.state[weight]["m"], optimizer.state[weight]["v"]]


@pytest.mark.parametrize("function", [adam_in_place, adam_through_data, adam_by_torch_functions])
def test_a_rule_may_be_spelled_in_place(function: Callable[..., Any]) -> None:
    wanted = stepped(tilestep.rule(adam_functional), torch.float64)
    for got, expected in zip(stepped(tilestep.rule(function), torch.float64), wanted):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_a_view_of_what_was_written_to_is_not_used_again() -> None:
    def stale(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        turned = param.t()
        param.mul_(2.0)
        return param - (turned + turned).t()

    with pytest.raises(RuleError, match="a view of a buffer written to since"):
        traced(stale, 2)


def test_numbers_may_be_made_inside_a_rule() -> None:
    def half(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        return param * torch.tensor(0.5) - grad * torch.full_like(lr, 0.25) + torch.where(torch.tensor(True), lr, 0.0)

    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    weight.grad = torch.tensor([4.0, 8.0])
    tilestep.Optimizer([weight], tilestep.rule(half)).step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.4, -0.9]))


def test_masks_are_numbers_where_numbers_are_wanted() -> None:
    def masks(param: Any, grad: Any, either: Any, both: Any, one: Any, filled: Any) -> tuple[Any, ...]:
        positive, large = grad > 0, grad.abs() > 1
        return (
            param * positive,
            (positive + large).to(param.dtype),
            (positive & large).float(),
            torch.logical_xor(positive, ~large).float(),
            grad.masked_fill(large, -7.0),
        )

    rule = tilestep.rule(masks)
    grad = torch.tensor([2.0, 0.5, -0.5, -2.0])
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    wanted = rule(weight.detach().clone(), grad.clone(), *(torch.zeros(4) for _ in range(4)))
    optimizer = tilestep.Optimizer([weight], rule)
    weight.grad = grad
    optimizer.step()
    got = [weight.detach(), *(optimizer.state[weight][name] for name in rule.state_names)]
    assert [value.tolist() for value in got] == [value.tolist() for value in wanted]


def test_results_have_the_type_that_they_are_given() -> None:
    def typed(param: Any, grad: Any, copied: Any, filled: Any, full: Any, made: Any, mask: Any) -> tuple[Any, ...]:
        number = torch.tensor(1.75, dtype=torch.int64)
        return (
            param - grad.int() / 4,
            torch.zeros_like(grad, dtype=torch.int32).copy_(grad) + grad,
            torch.zeros_like(grad, dtype=torch.int32).fill_(-1.75) + grad,
            torch.full_like(grad, 1.75, dtype=torch.int32) + grad,
            number * grad,
            torch.zeros_like(grad > 0).copy_(grad) + (grad > 0).fill_(2).to(grad.dtype),
        )

    rule = tilestep.rule(typed)
    grad = torch.tensor([2.5, 0.0, -0.5, -2.75])
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    wanted = rule(weight.detach().clone(), grad.clone(), *(torch.zeros(4) for _ in rule.state_names))
    optimizer = tilestep.Optimizer([weight], rule)
    weight.grad = grad
    optimizer.step()
    got = [weight.detach(), *(optimizer.state[weight][name] for name in rule.state_names)]
    assert [value.tolist() for value in got] == [value.tolist() for value in wanted]


@pytest.mark.parametrize("first", [torch.float32, torch.float64])
def test_a_rule_that_asks_for_the_type_of_its_values_gets_that_of_each_parameter(first: torch.dtype) -> None:
    def asking(param: Any, grad: Any, tiny: Any, finite: Any) -> tuple[Any, ...]:
        tiny = grad * torch.finfo(grad.dtype).eps
        finite = torch.nan_to_num(grad * float("inf"))
        return param - (2.0 if param.dtype == torch.float64 else 1.0) * grad, tiny, finite

    rule = tilestep.rule(asking)
    second = torch.float64 if first is torch.float32 else torch.float32
    weights = [torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=dtype)) for dtype in (first, second, torch.bfloat16)]
    wanted = [rule(w.detach().clone(), w.detach().clone() / 2, *(torch.zeros_like(w),) * 2) for w in weights[:2]]
    optimizer = tilestep.Optimizer(weights, rule)
    for weight in weights:
        weight.grad = weight.detach() / 2
    optimizer.step()
    for weight, expected in zip(weights, wanted):
        got = [weight.detach(), optimizer.state[weight]["tiny"], optimizer.state[weight]["finite"]]
        assert [value.tolist() for value in got] == [value.tolist() for value in expected]
    assert weights[2].tolist() == [0.5, -1.0]  # computed in float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_data_may_be_assigned_to(dtype: torch.dtype) -> None:
    """The tensor lies in the other one's memory then, and what else has lain in its own stays there."""

    def assigning(param: Any, grad: Any, moved: Any, left: Any, added: Any) -> None:
        before = left.detach()
        left.data = grad * 3
        before.add_(5)
        moved.data = param
        moved.add_(before)
        param.data = param * 2 - left
        moved.mul_(2)
        added.data += grad

    compare_with_code(assigning, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cast_is_the_tensor_itself_or_a_copy_by_the_type_of_the_parameter(dtype: torch.dtype) -> None:
    def casting(param: Any, grad: Any, narrow: Any, same: Any) -> None:
        single = narrow.float()
        single.add_(1)
        same.to(grad.dtype).add_(grad)
        param.type_as(same).sub_(grad)

    compare_with_code(casting, dtype)


def test_a_double_of_the_parameter_s_type_is_the_parameter() -> None:
    def casting(param: Any, grad: Any) -> None:
        param.double().sub_(grad)

    compare_with_code(casting, torch.float64)


def compare_with_code(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """Take two steps of the kernel and of the rule's own code."""
    rule = tilestep.rule(function)
    grad = torch.tensor([2.5, 0.0, -0.5, -2.75], dtype=dtype)
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype))
    wanted: Any = (weight.detach().clone(), *(torch.zeros_like(grad) for _ in rule.state_names))
    optimizer = tilestep.Optimizer([weight], rule)
    for _ in range(2):
        param, *states = wanted
        wanted = [value.clone() for value in rule(param, grad.clone(), *states)]
        weight.grad = grad.clone()
        optimizer.step()
        for name, value in zip(("param", *rule.state_names), wanted):
            got = weight.detach() if name == "param" else optimizer.state[weight].get(name, torch.zeros_like(grad))
            assert got.tolist() == value.tolist(), name


def test_elements_of_more_bits_than_kernels_have_are_refused() -> None:
    def wide(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        return param - lr * (grad.double() ** 2).sqrt()

    with pytest.raises(RuleError, match=r"test_rule_spellings.py:.*elements in float64.*remove the cast"):
        tilestep.Optimizer([torch.nn.Parameter(torch.ones(3))], tilestep.rule(wide))
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = tilestep.Optimizer([weight], tilestep.rule(wide))
    weight.grad = torch.full((3,), 1e30, dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), -1e29, dtype=torch.float64))

    def narrow(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        return param - lr * (grad > 0).double() * grad.norm().double()

    traced(narrow)


def names_of(graph: Graph, level: Level) -> list[str]:
    return [value.name for value in graph.values() if value.level is level and value.name and value.args]


def test_values_carry_the_rule_s_variable_names() -> None:
    rule = registry["AdamW"]
    graph = trace(rule, rule.hyperparameters)
    assert [name for name in ("bias_correction1", "bias_correction2_sqrt") if name in names_of(graph, Level.GROUP)] == [
        "bias_correction1",
        "bias_correction2_sqrt",
    ]
    assert {"exp_avg", "exp_avg_sq", "denom", "param", "grad"} <= set(names_of(graph, Level.ELEMENT))


def test_in_place_calls_name_what_they_change() -> None:
    graph = traced(adam_in_place)
    named = names_of(graph, Level.ELEMENT)
    assert {"param", "m", "v", "denom"} <= set(named)
    assert graph.outputs["m"].name == "m" and graph.outputs["param"].name == "param"


def test_each_line_names_its_last_value_alone() -> None:
    def long_line(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        update = (
            grad * 2.0
            + grad.sqrt()
        )  # fmt: skip
        param = param - update
        return param - update * lr

    graph = traced(long_line)
    assert names_of(graph, Level.ELEMENT).count("update") == 1
    [update] = [value for value in graph.values() if value.name == "update"]
    assert update.operation == "add"


def test_values_remember_their_line() -> None:
    graph = traced(adam_in_place)
    [denom] = [value for value in graph.values() if value.name == "denom"]
    assert denom.line == line_of(adam_in_place, "denom = v.sqrt()")


def test_only_states_that_are_used_are_there() -> None:
    def chooses(param: Any, grad: Any, used: Any, other: Any, *, flag: bool = False) -> tuple[Any, ...]:
        if flag:
            other = other + grad
        return param - used, used + grad, other

    rule = tilestep.rule(chooses)
    assert trace(rule, {"flag": False}).states == ("used",)
    assert trace(rule, {"flag": True}).states == ("used", "other")


def counts_on(param: Any, grad: Any, *, lr: Any = 1.0) -> Any:
    return param - ((grad.long() + 1) - grad.long())


def counts_in_place(param: Any, grad: Any, *, lr: Any = 1.0) -> Any:
    whole = grad.long()
    whole += 1
    return param - whole


def divides_integers(param: Any, grad: Any, *, lr: Any = 1.0) -> Any:
    return param - grad.long() // 3


def sums_integers(param: Any, grad: Any, *, lr: Any = 1.0) -> Any:
    return param - grad.long().sum()


def overflows(param: Any, grad: Any, *, lr: Any = 1.0) -> Any:
    return param - (grad > 0).to(torch.int8) * 100 * 2


def wraps_around(param: Any, grad: Any, *, lr: Any = 1.0) -> Any:
    return param - lr * grad.to(torch.int8).to(torch.float32)


def wraps_below_zero(param: Any, grad: Any, *, lr: Any = 1.0) -> Any:
    return param - lr * grad.sign().to(torch.uint8)


def negates_bytes(param: Any, grad: Any, *, lr: Any = 1.0) -> Any:
    return param - lr * -(grad > 0).to(torch.uint8)


@pytest.mark.parametrize(
    "function",
    [
        counts_on,
        counts_in_place,
        divides_integers,
        sums_integers,
        overflows,
        wraps_around,
        wraps_below_zero,
        negates_bytes,
    ],
)
def test_integers_that_kernels_would_round_are_refused(function: Any) -> None:
    """They were float32, where 2^24 + 1 is 2^24, and bytes did not overflow."""
    with pytest.raises(RuleError, match=r"in rule .*integer elements may exceed [\d,]+.* or clamp them"):
        trace(tilestep.rule(function), {"lr": 1.0})


def test_bounds_of_integers_are_found_once_for_each_value() -> None:
    def shares(param: Any, grad: Any, *, lr: Any = 1.0) -> Any:
        value = grad
        for _ in range(60):
            value = value * value + value
        return param - lr * value.clamp(-9, 9).to(torch.int8)

    assert trace(tilestep.rule(shares), {"lr": 1.0}).outputs


def test_integers_that_are_small_or_not_computed_with_are_as_in_torch() -> None:
    def rule(param: Any, grad: Any, *, lr: Any = 1.0, step: Any) -> Any:
        signs = (grad > 0).long() * 2 - 1
        near = grad.long().clamp(-1000, 1000) * 3 + 1
        return (
            param
            - signs
            - near / 4
            - lr * grad.long().abs().to(grad.dtype)
            - grad.clamp(-128, 127).to(torch.int8)
            - grad.clamp(-128, 127).floor().to(torch.int8)
            - (1 - grad.clamp(-254, 1)).to(torch.uint8)
            - (127 * grad.sin()).to(torch.int8)
            - (grad > 0).sum()
            - step.long() // 2
            + signs.sum()
        )

    made, gradient = tilestep.rule(rule), torch.tensor([2.0**25 + 4, 1.5, -3.5, -(2.0**40)])
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = gradient
    tilestep.Optimizer([weight], made, lr=1.0).step()
    assert torch.equal(weight, made(torch.zeros(4), gradient, lr=1.0, step=1)[0])
