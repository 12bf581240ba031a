"""An optimizer's parameters: labels, checks for shared memory and supported types, shares."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ..errors import GradientError
from ..graph import Graph, size_from_end
from ..placement import Listed, Share
from ..rules import Rule
from ..runtime import check_no_overlap
from ..runtime.overlaps import intersect, spans_of
from ..storage import dtype_name


def check_not_shared(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise if two tensors share an element; tensors that only interleave are fine."""
    filled = [(label, tensor) for label, tensor in tensors if tensor.numel()]
    starts, ends = spans_of([tensor for _, tensor in filled])
    order = np.argsort(starts, kind="stable")
    if (np.maximum.accumulate(ends[order])[:-1] <= starts[order][1:]).all():
        return
    open_spans: list[int] = []
    for index in order.tolist():
        open_spans = [other for other in open_spans if ends[other] > starts[index]]
        for other in open_spans:
            if intersect(filled[other][1], filled[index][1]):
                later, earlier = filled[max(index, other)][0], filled[min(index, other)][0]
                is_state = later.startswith("state ")
                remedy = "clone it" if is_state else "a parameter can be in the optimizer once"
                raise GradientError(f"{later} shares memory with {earlier}; {remedy}")
        open_spans.append(index)


LISTED_TWICE = "a param group lists a parameter twice"  # for error messages
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


def check_parameter(param: torch.Tensor, label: str) -> None:
    """Raise for a parameter that cannot be updated in place."""
    if param.is_conj() or param.is_neg():
        raise GradientError(f"{label} is a lazily conjugated or negated view; copy it with .clone()")
    if param.layout is not torch.strided:
        raise GradientError(f"{label} is {param.layout}; only dense parameters are supported")
    if param.dtype not in _DTYPES:
        raise GradientError(f"{label} has dtype {param.dtype}; supported are {', '.join(map(dtype_name, _DTYPES))}")
    if not param.is_contiguous():
        check_no_overlap(param, label)


def check_pairs(label: str, rule: Rule, graph: Graph | None, *, is_sharded: bool) -> None:
    """Raise for a complex parameter whose rule depends on its shape: kernels see pairs of real numbers."""
    if graph is not None:
        by_size = is_sharded and any(name == "numel" or size_from_end(name) for name in graph.hypers())
        by_shape = by_size or graph.matrix_states or graph.reads_shape or graph.branches_on_sizes
        if not by_shape and all(value.over is None for value in graph.values()):
            return
    raise GradientError(
        f"{label} is complex: {rule.name} does not support complex parameters, which are updated as pairs of reals; "
        "put it in a param group with a rule that depends on no rows, columns or shapes"
    )


class Optimizer(Protocol):
    """The interface of `optimizer.Optimizer` for modules that it imports."""

    param_groups: list[dict[str, Any]]
    state: Any
    attached: tuple[str, ...]
    control: Any
    graphs: Any
    memory: Any
    placement: Any
    execution: Any
    reports: Any

    @property
    def plan(self) -> Any: ...
    def rule_of(self, group: Mapping[str, Any]) -> Rule: ...
    def drop_plan(self) -> None: ...
    def attach(self, names: Sequence[str]) -> None: ...
    def power_sum(self, *, prepared: bool = False) -> torch.Tensor | None: ...
    def rebuild(self, *, ahead: bool = False) -> Any: ...
    def set_states(self, states: Mapping[Any, Any], ahead: Any, groups: Any) -> None: ...
    def fitting_plan(self, *, ahead: bool = False) -> Any: ...


def params_of(optimizer: Optimizer | torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters in order, without labels."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def iter_params(optimizer: Optimizer | torch.optim.Optimizer) -> list[Listed]:
    """All parameters in order, with label, group index and group."""
    listed = []
    for group_index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            label = f"parameter {index} of group {group_index}"
            listed.append(((f"{label} ({names[index]})" if names else label), group_index, group, param))
    return listed


_NAME = re.compile(r"\((.*)\)$")


def name_in(label: str) -> str:
    """The parameter's name in a label; empty if it has none."""
    return named[1] if (named := _NAME.search(label)) else ""


def shares_of(optimizer: Optimizer) -> list[Share]:
    """This rank's shares of the parameters, in order; a parameter that is listed several times has a single share."""
    first: dict[int, tuple[Listed, int]] = {}
    for ordinal, listed in enumerate(iter_params(optimizer)):
        first.setdefault(id(listed[3]), (listed, ordinal))
    return [share for one in first.values() if (share := optimizer.placement.share(*one)) is not None]


def require_one_group(optimizer: Optimizer) -> None:
    """Raise for a parameter in several groups: only one can update it, while a `state_dict` may list them all."""
    groups: dict[int, Listed] = {}
    for listed in iter_params(optimizer):
        label, index, _, param = listed
        first = groups.setdefault(id(param), listed)
        if first[1] != index:
            raise GradientError(f"{label} is {first[0]} too: a parameter belongs to one param group")


def repeat_updates(optimizer: Optimizer | torch.optim.Optimizer) -> tuple[frozenset[int], ...]:
    """The ids of parameters listed at least twice, three times, and so on: torch updates them once per listing."""
    counts = Counter(map(id, params_of(optimizer)))
    rounds = range(1, max(counts.values(), default=1))
    return tuple(frozenset(one for one, count in counts.items() if count > before) for before in rounds)


def shortened(names: Sequence[str]) -> str:
    """The first few names, for messages."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def check_expression(key: str, pattern: str | re.Pattern[str]) -> None:
    """Raise for an argument that is not a regular expression."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"Invalid {key}: {pattern!r} is not a regular expression: {error}") from None


def require_shapes(caller: str, params: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise for a lazy module's parameter that has no shape yet."""
    for label, param in params:
        if is_lazy(param):
            raise ValueError(
                f"{label} has no shape yet, and {caller} needs it: run the model's first forward pass before it"
            )


def evaluation_error(method: str) -> RuntimeError:
    """The error of a method that needs the training weights."""
    return RuntimeError(f"the parameters hold the weights to evaluate: call train() before {method}")


def require_listed_once(caller: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise for a parameter that a group lists several times."""
    if repeat_updates(optimizer):
        raise GradientError(f"{LISTED_TWICE}, which torch updates twice, and {caller} once: list it once")


def param_states(optimizer: Optimizer) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """The parameters with state, and their states; other keys of `optimizer.state` are left out."""
    return [(param, state) for param, state in optimizer.state.items() if isinstance(param, torch.Tensor)]
