"""The kinds of parameters that an ejected file has kernels for: dtypes, formats, and shapes where they matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import MatrixError, RuleError
from ..graph import Graph
from ..kernels.spec import KernelSpec
from ..optimizer.states import compute_dtype, storages
from ..rules import Rule
from ..runtime import graph_for, kernel_spec
from ..storage import Storage

DIMS = 5  # dimensions up to which parameters are told from each other
SIZES = ("large", "small", "short", "uneven")
"""Classes of shapes that formats of states tell from each other: of enough elements for them, of fewer than `SMALLEST`,
with rows shorter than `SHORTEST`, and with a last dimension that pairs of codes do not fill."""


@dataclass
class Kind:
    """Parameters with the same kernels."""

    name: str
    dtype: torch.dtype
    spec: KernelSpec
    graph: Graph
    storages: dict[str, Storage]
    dims: set[int] = field(default_factory=set)
    sizes: set[str] = field(default_factory=set)
    functions: dict[str, str] = field(default_factory=dict)  # what its kernels are called in the file
    is_general: bool = False  # whether its passes take its dtype and its formula as constants, as those of others do
    formula: str = ""  # of torch tensors


def _shapes(dims: int) -> dict[str, tuple[int, ...]]:
    if dims == 0:
        return {"small": ()}
    if dims == 1:
        return {"large": (4096,), "small": (64,), "uneven": (4097,)}
    lead = (2,) * (dims - 2)
    shapes = {"large": (*lead, 64, 4096), "small": (2,) * dims, "uneven": (*lead, 64, 4097)}
    return {**shapes, "short": (8192, 2, *(1,) * (dims - 2))}


def unsupported(rule: Rule, does: str) -> RuleError:
    """The error for a rule that does what an ejected file cannot."""
    return RuleError(f"{rule.name} {does}, which ejected files do not support: use tilestep's optimizer")


_OF_MATRICES = "works on whole matrices"


def kinds_of(rule: Rule, group: Mapping[str, Any], dtypes: tuple[torch.dtype, ...]) -> list[Kind]:
    """The kinds of parameters of a rule with these hyperparameters and formats, each once."""
    if any(start.shape in ("left", "right") for start in rule.states.values()):
        raise unsupported(rule, _OF_MATRICES)
    values = {key: group[key] for key in rule.hyperparameters}
    found: dict[Any, Kind] = {}
    for dtype in dtypes:
        for dims in range(DIMS + 1):
            shapes = _shapes(dims)
            for size, shape in shapes.items() if group.get("state_dtype") else [next(iter(shapes.items()))]:
                param = torch.empty(shape, dtype=dtype, device="meta")
                try:
                    graph = graph_for(rule, values, dims, shape, compute_dtype(param))
                except MatrixError:
                    raise unsupported(rule, _OF_MATRICES) from None
                if graph.branches_on_sizes:
                    raise unsupported(rule, "branches on the sizes of parameters")
                formats = storages(param, group, graph, rule, None, "", shape)
                spec = kernel_spec(graph, formats, compute_dtype(param), "cuda")
                if spec.program.matrices.scratch:
                    raise unsupported(rule, _OF_MATRICES)
                if spec.program.slices.views:
                    raise unsupported(rule, "reduces over rows and columns")
                key = (id(graph) if graph.reads_shape else None, dtype, tuple(formats.items()))
                kind = found.setdefault(key, Kind("", dtype, spec, graph, formats))
                kind.dims.add(dims)
                kind.sizes.add(size)
    return list(found.values())
