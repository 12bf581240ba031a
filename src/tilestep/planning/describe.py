"""Describes a rule for people: its states, passes, traffic, launches and generated code."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

import torch

from ..graph import TilePass, Value
from ..graph.partition import slice_word
from ..kernels.outputs import traced
from ..kernels.spec import KernelSpec, Traffic, tile_traffic
from ..optimizer.groups import check_flags, check_group
from ..optimizer.masters import MasterWeights, check_master, master_kind
from ..optimizer.states import compute_dtype, storages
from ..rules import Rule
from ..runtime import graph_for, kernel_spec
from ..stats.changes import CHANGED
from ..stats.measures import measured_by
from ..storage import dtype_name

BACKENDS = {"triton": "cuda", "cpp": "cpu"}  # device type by backend


@dataclass(frozen=True)
class PassDescription:
    """A pass of a step."""

    kind: str  # "scalar", "across", "tile", "matrix", or the kind of slice: "row", "column"
    what: str  # the computed values, in words
    traffic: Traffic | None = None  # the traffic of a pass over elements or slices
    launches: tuple[str, ...] = ()  # names of its launches, for any number of tensors


@dataclass(frozen=True)
class RuleDescription:
    """A rule, traced and cut into passes for given hyperparameters and storages."""

    rule: Rule
    backend: str  # "triton" or "cpp"
    equations: str  # the rule's docstring
    states: Mapping[str, str]  # name, dtype and shape of the buffers of a parameter, in words
    specialized: tuple[str, ...]  # conditions on hyperparameters under which the code is valid
    outputs: tuple[str, ...]  # results of a step besides the update, in words
    passes: tuple[PassDescription, ...]  # in execution order
    source: str = field(repr=False)  # the generated code

    @property
    def bytes_read(self) -> float:
        """Bytes read per element of a parameter, in all passes."""
        return sum(entry.traffic.bytes_read for entry in self.passes if entry.traffic)

    @property
    def bytes_written(self) -> float:
        """Bytes written per element of a parameter, in all passes."""
        return sum(entry.traffic.bytes_written for entry in self.passes if entry.traffic)

    @property
    def launches(self) -> list[str]:
        """All launches of a step, for any number of tensors."""
        return [name for entry in self.passes for name in entry.launches]


def spec_for(
    rule: Rule,
    hyperparameters: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    master_weights: MasterWeights = False,
    state_dtype: Any = None,
    rounding: str = "nearest",
    dims: int = 2,
    device_type: str = "cpu",
    stats: bool = False,
    changes: bool = False,
) -> KernelSpec:
    """The spec from which an optimizer for parameters of this kind builds kernels."""
    values = {**rule.hyperparameters, **(hyperparameters or {})}
    rule.check(values)
    check_group(rule, values)
    # Large enough for states in the format of `state_dtype`.
    param = torch.empty((4096,) * dims if state_dtype else (2,) * dims, dtype=dtype, device="meta")
    graph = graph_for(rule, values, dims, dtype=compute_dtype(param))
    group = {**values, "master_weights": master_weights, "state_dtype": state_dtype, "rounding": rounding}
    check_flags(rule, group)
    check_master("a parameter", dtype, group)
    formats = storages(param, group, graph, rule)
    spec = kernel_spec(graph, formats, compute_dtype(param), device_type)
    asked = (*((CHANGED,) if changes else ()), *(measured_by(spec) if stats else ()))
    return spec.with_outputs(asked)


def generated_code(spec: KernelSpec, backend: str) -> str:
    """The source that a backend generates from a spec."""
    if backend not in BACKENDS:
        raise ValueError(f"Invalid backend: {backend!r}; it must be {' or '.join(map(repr, BACKENDS))}")
    if backend == "triton":
        from ..backends.triton import source as triton

        return triton.source(spec)
    from ..backends.cpp import source as cpp

    return cpp.source(spec, gaps=False)


def describe(
    rule: Rule, hyperparameters: Mapping[str, Any] | None = None, *, backend: str = "triton", **kind: Any
) -> RuleDescription:
    """Trace a rule and describe a step with it, for parameters and formats as `spec_for` takes them."""
    spec = spec_for(rule, hyperparameters, device_type=BACKENDS.get(backend, "cpu"), **kind)
    source = generated_code(spec, backend)
    return RuleDescription(
        rule=rule,
        backend=backend,
        equations=inspect.cleandoc(rule.__doc__ or "No docstring."),
        states=_states(rule, spec, master_kind(kind.get("dtype", torch.float32), kind)),
        specialized=tuple(starmap(_true_condition, spec.program.graph.guards)),
        outputs=_outputs(spec),
        passes=tuple(_passes(spec, backend)),
        source=source,
    )


_SHAPES = {"param": "like the parameter", "scalar": "one for each tensor"}


def _states(rule: Rule, spec: KernelSpec, master: Any) -> dict[str, str]:
    states = {"step": "float32, one for each tensor"}
    if master is not None:
        states[master.key] = f"{dtype_name(master.buffer_dtype)}, like the parameter"
    graph = spec.program.graph
    for name in graph.states:
        if name in graph.matrix_states:
            states[name] = f"a matrix of {' by '.join(graph.matrix_states[name])} of the parameter"
            continue
        kept = dtype_name(spec.scalar_dtype(name)) if name in graph.scalar_states else str(spec.storages[name])
        shape = rule.states[name].shape
        states[name] = f"{kept}, {_SHAPES.get(shape, f'one for each {shape}')}"
    return states


def _passes(spec: KernelSpec, backend: str) -> list[PassDescription]:
    program = spec.program
    prefix = f"{spec.name}_" if backend == "triton" else ""
    passes: list[PassDescription] = []
    for index, scalar in enumerate(program.scalars):
        computed = ", ".join(dict.fromkeys(_in_words(value) for _, value in scalar.rows))
        stored = [*scalar.stores, *(["step"] if scalar.is_last else [])]
        what = f"for each tensor, in float64: {computed or 'nothing to compute'}"
        what += f"; keeps {', '.join(stored)}" if stored else ""
        passes.append(PassDescription("scalar", what, launches=(f"{prefix}scalar_pass_{index}",)))
        if scalar.global_reductions:
            sums = ", ".join(_reduced(value) for _, value in scalar.global_reductions)
            calls = ("torch, over all tensors",) * len(scalar.global_reductions)
            passes.append(PassDescription("across", f"over all tensors: {sums}", launches=calls))
        passes += [_tile_pass(spec, tile, prefix, backend) for tile in program.passes_of(index)]
        for matrix in program.matrices.passes[index : index + 1]:
            if matrix is not None:
                names = [value.operation for value in matrix.values]
                calls = tuple(f"torch, {name} for each shape" for name in names)
                passes.append(PassDescription("matrix", f"on whole matrices: {', '.join(names)}", launches=calls))
    return passes


def _reduced(value: Value) -> str:
    return f"{value.operation.split('_')[1]} of {_in_words(value.args[0])}"


def _outputs(spec: KernelSpec) -> tuple[str, ...]:
    """Results of a step besides the update, a line per kind."""
    kinds: dict[str, list[str]] = {}
    for entry in traced(spec):
        kind = "a bit of each element" if entry.output.reduce == "or" else "a number of each tensor"
        where = "" if entry.tile is not None else ", by torch from a copy made for the step"
        kinds.setdefault(kind + where, []).append(entry.output.name)
    return tuple(f"{kind}: {', '.join(names)}" for kind, names in kinds.items())


def _tile_pass(spec: KernelSpec, tile: TilePass, prefix: str, backend: str) -> PassDescription:
    unit = "element" if tile.over is None else slice_word(tile.over, spec.program.graph.dims)
    parts = [f"new {name}" for name in tile.stores]
    parts += [_in_words(value) for _, value in tile.kept]
    for _, value in (*tile.parts, *tile.reductions):
        kept = "" if value.over is None else f", one for each {slice_word(value.over, spec.program.graph.dims)}"
        parts.append(_reduced(value) + kept)
    title = tile.title or f"tile_pass_{tile.stage}"
    launches = [f"{prefix}{title}"]
    if backend == "triton":
        launches += ["combine_parts"] * len(tile.parts)
        finish = f"finish_{tile.stage}" if tile.view is None else f"{title}_finish"
        launches += [f"{prefix}{finish}"] if tile.reductions else []
    kind = "tile" if tile.over is None else unit
    return PassDescription(kind, f"for each {unit}: {', '.join(parts)}", tile_traffic(spec, [tile]), tuple(launches))


_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_SIGNS |= {"eq": "==", "ne": "!=", "and": "and", "or": "or"}
_LONGEST = 40
_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


def _true_condition(condition: Value, outcome: bool) -> str:
    """A guard as the condition that holds."""
    if condition.operation not in _OPPOSITE:
        return f"{_in_words(condition)} is {outcome}"
    operation = condition.operation if outcome else _OPPOSITE[condition.operation]
    left, right = map(_in_words, condition.args)
    return f"{left} {_SIGNS[operation]} {right}"


def _in_words(value: Value) -> str:
    """The value's name in the rule, or its formula if that is short."""
    if value.name:
        return value.name
    if value.operation == "constant":
        return f"{value.attribute:g}" if not isinstance(value.attribute, bool) else str(value.attribute)
    parts = [_in_words(arg) for arg in value.args]
    if value.operation in _SIGNS:
        parts = [f"({part})" if " " in part else part for part in parts]
        text = f" {_SIGNS[value.operation]} ".join(parts)
    else:
        text = f"{value.operation.removeprefix('reduce_')}({', '.join(parts)})"
    return text if len(text) <= _LONGEST else "an unnamed value"
