"""Before anything is sharded: what cannot be is refused, and on all ranks at once where they disagree."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ..combinations import kind_of, refusal, split_kind, wrappers_around
from ..compat import uncompiled
from ..graph import Graph, ancestors
from ..optimizer import Optimizer
from ..optimizer.hyperparameters import GROUP_OPTIONS, about_group
from ..optimizer.specs import graph_of
from ..placements import is_distributed
from ..rules import Rule
from .buckets import Options, loses_bits, memory_order
from .groups import Ranks

Found = TypeVar("Found")

_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules of models that have a sharded optimizer."""


def plain_module(model: nn.Module) -> nn.Module:
    """The module itself where a compiled one is given."""
    model = uncompiled(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard() takes the module that is trained, not {type(model).__name__}")
    return model


def check_alone(optimizer: Optimizer, model: nn.Module, options: Options) -> dict[Any, str]:
    """What a rank can see by itself."""
    options.check()
    for index, group in enumerate(optimizer.param_groups):
        about_group(index, partial(options.check_group, group))
        if any(loses_bits(param.dtype, options.sync_dtypes(group)[1]) for param in group["params"]):
            reason = refusal("shard with narrower parameters", optimizer.attached)
            if reason:
                raise ValueError(reason)
    for name, module in model.named_modules():
        _refuse(f"module {name!r}" if name else "the model", kind_of(module))
    names: dict[Any, str] = {param: name for name, param in model.named_parameters()}
    found = {param: index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    if not found:
        raise ValueError("the optimizer has no parameters to shard")
    for wrapper in wrappers_around(lambda param: param in found):
        _refuse("what the model is wrapped in", kind_of(wrapper))
    for param in found:
        _refuse("what parameters of the optimizer are wrapped in", split_kind(param))
    for param, index in found.items():
        if param not in names:
            raise ValueError(f"a parameter of shape {tuple(param.shape)} in group {index} is not one of the model's")
        if is_distributed(param):
            raise ValueError(f"{names[param]} is a DTensor already: shard() takes plain parameters")
        if param.is_meta:
            raise ValueError(f"{names[param]} is on the meta device: give it memory and values first")
    devices = {param.device: names[param] for param in found}
    if len(devices) > 1:
        described = " and ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"shard() takes parameters on one device for each rank, not {described}")
    return {param: name for param, name in names.items() if param in found}


def _refuse(label: str, kind: str) -> None:
    reason = refusal("shard", [kind])
    if reason:
        raise ValueError(f"{label} {reason}")


def tried_together(ranks: Ranks, attempt: Callable[[], Found]) -> Found:
    """What each rank finds, if every one of them does: else they all raise."""
    error: Exception | None = None
    try:
        found = attempt()
    except Exception as own:
        error = own
    everyone = ranks.everyone("" if error is None else str(error) or type(error).__name__)
    if error is not None:
        raise error
    for rank, text in enumerate(everyone):
        if text:
            raise ValueError(f"rank {rank} cannot be sharded: {text}")
    return found


def check_together(
    optimizer: Optimizer,
    model: nn.Module,
    ranks: Ranks,
    options: Options,
    also: Callable[[], Iterable[str]] = tuple,
) -> dict[Any, str]:
    """`check_alone`, with its errors raised on every rank; and the first thing in which ranks differ."""

    def described() -> tuple[dict[Any, str], list[str]]:
        names = check_alone(optimizer, model, options)
        return names, [*_described(optimizer, model, names, ranks, options), *also()]

    names, lines = tried_together(ranks, described)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(ranks.everyone(digest))) > 1:
        raise ValueError(first_difference(ranks.everyone(lines)))
    return names


def first_difference(everyone: list[list[str]]) -> str:
    for at_each in itertools.zip_longest(*everyone, fillvalue="nothing more"):
        other = next((rank for rank, line in enumerate(at_each) if line != at_each[0]), None)
        if other is not None:
            return (
                f"ranks disagree, and would wait for each other forever: rank 0 has {at_each[0]}; rank {other} has "
                f"{at_each[other]}"
            )
    return "ranks disagree"


def _described(
    optimizer: Optimizer, model: nn.Module, names: dict[Any, str], ranks: Ranks, options: Options
) -> Iterator[str]:
    """What must be the same everywhere, a line each."""
    yield f"{ranks.size} ranks that split the state and {ranks.copies} copies"
    for name, value in vars(options).items():
        yield f"{name}={value}"
    yield f"{optimizer.control.policy}"
    groups = {param: index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    for param, name in names.items():
        trains = "trains" if param.requires_grad else "frozen"
        yield (
            f"parameter {name} {tuple(param.shape)} {param.dtype} on {param.device.type} in group {groups[param]}, "
            f"{trains}, in memory by dimensions {memory_order(param)}"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor not in names:
            described = f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device.type}"
            yield f"beside the optimizer's parameters {described}"
    for index, group in enumerate(optimizer.param_groups):
        rule = optimizer.rule_of(group)
        yield f"group {index} rule={rule.name}"
        for key in sorted({*group, *GROUP_OPTIONS}, key=str):
            if key not in ("params", "param_names", "rule"):
                yield f"group {index} {key}={plain_value(group.get(key, GROUP_OPTIONS.get(key)))}"
        for graph in {id(each): each for each in _graphs(rule, group)}.values():
            yield from (f"in group {index} rule {rule.name} with {step}" for step in _steps(graph))


def _graphs(rule: Rule, group: Mapping[str, Any]) -> Iterator[Graph]:
    for shape in dict.fromkeys(param.shape for param in group["params"]):
        yield graph_of(rule, group, shape)


def _steps(graph: Graph) -> Iterator[str]:
    """What a rule computes: rules of one name, and functions of the step, may differ in numbers inside of them."""
    places: dict[int, int] = {}
    for value in (*graph.values(), *ancestors(guard.condition for guard in graph.guards)):
        if id(value) in places:
            continue
        places[id(value)] = len(places)
        operands = [f"[{places[id(each)]}]" for each in value.args]
        given = [] if value.attribute is None else [repr(value.attribute)]
        over = "" if value.over is None else f" over {value.over}"
        yield f"[{places[id(value)]}] = {value.operation}({', '.join([*operands, *given])}){over}"
    yield ", ".join(f"new {name} [{places[id(value)]}]" for name, value in graph.outputs.items())


def plain_value(value: Any) -> str:
    """A hyperparameter as text that is the same in every process."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(plain_value, value))})"
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    if callable(value) and not dataclasses.is_dataclass(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return repr(value)


def apart_from_others(ranks: Ranks, model: nn.Module) -> Ranks:
    """The ranks, over groups of their own if another optimizer is sharded that has parameters of the same modules.

    One backward completes buckets of both, which may come in other orders on other ranks.
    """
    modules = set(model.modules())
    is_first = _models.isdisjoint(modules)
    _models.update(modules)
    return ranks if is_first else ranks.apart()
