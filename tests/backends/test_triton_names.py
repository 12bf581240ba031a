"""A kernel's own variables never take the name of a rule's number or buffer."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from row_rules import RULES

import tilestep
from tilestep.backends.triton import source
from tilestep.errors import RuleError
from tilestep.rules import Rule, State, registry
from tilestep.rules.protocol import RESERVED_HYPERPARAMETERS
from tilestep.runtime import graph_for, kernel_spec
from tilestep.storage import STATE_FORMATS, Plain

BY_ROWS = {f"by rows: {name}": rule for name, (rule, _) in RULES.items()}
CASES = [
    *((name, dims) for name in registry for dims in (1, 2, 4)),
    *((name, dims) for name in BY_ROWS for dims in (2, 4)),
]


def rendered(rule: Rule, dims: int) -> ast.Module:
    graph = graph_for(rule, dict(rule.hyperparameters), dims)
    storages = {name: Plain(torch.bfloat16) for name in ("param", "grad", *graph.states)}
    return ast.parse(source.source(kernel_spec(graph, storages, torch.float32, "cuda")))


def kernels(module: ast.Module) -> Iterator[ast.FunctionDef]:
    """The functions that are launched: those with constants."""
    for function in module.body:
        if isinstance(function, ast.FunctionDef) and any(argument.annotation for argument in function.args.args):
            yield function


def given(function: ast.FunctionDef) -> dict[str, list[str]]:
    """Every name that a kernel sets, with what it is set to each time."""
    assigned: dict[str, list[str]] = {argument.arg: ["a parameter"] for argument in function.args.args}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                    assigned.setdefault(ast.unparse(name), []).append(place_of(node.value))
        elif isinstance(node, ast.AugAssign | ast.For):
            assigned.setdefault(ast.unparse(node.target), []).append("a loop")
    return assigned


def place_of(value: ast.expr) -> str:
    """Where a load reads, whatever its mask and what is made of it; otherwise the expression."""
    load = value.func.value if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) else value
    call = load if isinstance(load, ast.Call) else value
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "tl.load":
        return f"load {ast.unparse(call.args[0])}"
    return ast.unparse(value)


def taken_over(module: ast.Module) -> list[str]:
    """Names of what a rule's math is given that its kernel also uses for something else."""
    wrong = []
    for function in kernels(module):
        names = given(function)
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and "_math_" in f"{ast.unparse(call.func)}_":
                for argument in call.args:
                    name = ast.unparse(argument)
                    places = set(names[name])
                    if len(places) != 1 or not places.pop().startswith("load "):
                        wrong.append(f"{function.name}: {name} is {names[name]}")
    return wrong


def twice_in_scalars(module: ast.Module) -> list[str]:
    """Names that a scalar pass sets more than once."""
    passes = [function for function in kernels(module) if "_scalar_pass_" in function.name]
    return [
        f"{function.name}: {name}"
        for function in passes
        for name, places in given(function).items()
        if len(places) > 1 and name != "_"
    ]


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_registered_rules_keep_their_names(name: str, dims: int) -> None:
    try:
        module = rendered({**registry, **BY_ROWS}[name], dims)
    except RuleError as error:
        assert dims != 2
        pytest.skip(str(error))
    assert not taken_over(module) + twice_in_scalars(module)


def rule_with(names: list[str], states: list[str]) -> Rule:
    """A rule whose hyperparameters and element buffers have these names; it works on rows if it has no buffers."""
    product = " * ".join(f"(param + {name})" for name in names)
    buffers = "".join(f", {name}" for name in states)
    new = "".join(f", {name} + amount" for name in states)
    reduced = "amount.norm()" if states else "amount.sum(-1, keepdim=True) + amount.amax(-2, keepdim=True)"
    body = f"""
def named(param, grad{buffers}, *, {", ".join(f"{name}=0.5" for name in names)}):
    amount = grad * {product}
    amount = amount + {reduced}
    return param - amount{new}
"""
    space: dict[str, Any] = {}
    exec(body, space)
    return Rule(space["named"], name="Named", states={name: State(shape="param") for name in states})


def own_names(rule: Rule) -> list[str]:
    """Names that the kernels of a rule use for themselves, if a hyperparameter may be called so."""
    identifiers = {name for function in kernels(rendered(rule, 2)) for name in given(function)}
    refused = {"step", "param", "grad", "_", *RESERVED_HYPERPARAMETERS}
    return sorted(name for name in identifiers if name.isidentifier() and name not in refused)


@pytest.mark.parametrize("states", [[], ["memory"]], ids=["rows", "elements"])
def test_rules_may_use_the_names_of_kernels(states: list[str]) -> None:
    names = own_names(rule_with(["plain"], states))
    assert {"size", "coordinate", "index", "start"} <= set(names)
    module = rendered(rule_with([name for name in names if name not in states], states), 2)
    assert not taken_over(module) + twice_in_scalars(module)


def test_buffers_may_be_called_like_variables_of_kernels() -> None:
    names = ["size", "whole", "lane", "corner", "inside", "row", "layout"]
    assert not taken_over(rendered(rule_with(["plain"], names), 2))


def test_a_rule_that_computes_nothing_is_a_module() -> None:
    """It needs nothing of what kernels import."""
    rule = Rule(lambda param, grad: (param,))
    assert len(list(kernels(rendered(rule, 1)))) == 1


def test_a_pass_may_read_nothing_but_pairs_of_codes() -> None:
    def by_the_state(param: Any, grad: Any, mean: Any) -> tuple[Any, Any]:
        return param - grad / (1.0 + (mean * mean).sum()), mean + grad

    graph = graph_for(tilestep.rule(by_the_state), {}, 2)
    plain = Plain(torch.bfloat16)
    storages = {"param": plain, "grad": plain, "mean": STATE_FORMATS["int4"](True)}
    module = ast.parse(source.source(kernel_spec(graph, storages, torch.float32, "cuda")))
    assert any(
        "mean_codes_address" in given(kernel) and "param_address" not in given(kernel) for kernel in kernels(module)
    )


@pytest.mark.parametrize("name", ["changes", "support"])
def test_kernels_written_by_hand_are_compiled_once_for_all_alignments(name: str) -> None:
    """A launch refuses a kernel whose pointers are not listed; here without a GPU."""
    module = importlib.import_module(f"tilestep.backends.triton.{name}")
    launched = [
        kernel
        for kernel in vars(module).values()
        if getattr(kernel, "__module__", "") == module.__name__
        and getattr(kernel, "do_not_specialize_on_alignment", None)
    ]
    assert launched
    for kernel in launched:
        pointers = [
            argument.name
            for argument in kernel.params
            if not argument.is_constexpr and not argument.annotation_type.startswith(("fp", "bf"))
        ]
        listed = [*kernel.do_not_specialize_on_alignment, *(kernel.do_not_specialize or [])]
        assert sorted(pointers) == sorted(listed), kernel.__name__
