"""What the kernels of one parameter are built from, by its param group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..codegen.spec import KernelSpec
from ..engine import graph_for, kernel_spec
from ..graph import Graph
from ..rules import Rule
from .states import compute_dtype, storages


def graph_of(rule: Rule, group: Mapping[str, Any], shape: torch.Size) -> Graph:
    """The graph of a rule under a param group's hyperparameters."""
    return graph_for(rule, {key: group[key] for key in rule.hyperparameters}, len(shape), shape)


def spec_of(
    rule: Rule, group: Mapping[str, Any], part: torch.Tensor, shape: torch.Size | None = None, label: str = ""
) -> KernelSpec:
    """What the kernels of a parameter are built from.

    Example:
        >>> import tilestep
        >>> optimizer = tilestep.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
        >>> (group,) = optimizer.param_groups
        >>> spec_of(optimizer.rule_of(group), group, group["params"][0]).compute
        torch.float32
    """
    graph = graph_of(rule, group, part.shape if shape is None else shape)
    return kernel_spec(
        graph, storages(part, group, graph, rule, None, label, shape), compute_dtype(part), part.device.type
    )
