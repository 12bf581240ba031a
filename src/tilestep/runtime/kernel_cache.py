"""Graphs and kernel specs, cached for all optimizers of the process."""

from __future__ import annotations

import os
import threading
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..devices import is_host
from ..errors import MatrixError
from ..graph import Graph, known_numbers, outcome, partition, size_from_end, sizes_of, trace
from ..kernels.spec import KernelSpec, Output
from ..linalg.scalar_values import PYTHON_TYPES, as_python
from ..rules import Rule
from ..storage import Plain, Storage

NUMBER = "<number>"  # placeholder of any number in a static description

KNOWN_NUMBERS = frozenset({"step", "numel", "gradient_scale", "machine_epsilon"})
"""Numbers that scalar passes know without a column of the hyperparameter table, as they know the parameter's sizes."""

_lock = threading.RLock()


def _after_fork() -> None:
    """Replace the lock: another thread of the parent may have held it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)

_graphs: weakref.WeakKeyDictionary[Rule, dict[Any, list[Graph]]] = weakref.WeakKeyDictionary()
"""By rule and static description. Rules and functions are referenced weakly: they may hold a model."""

_refusals: weakref.WeakKeyDictionary[Rule, dict[Any, str]] = weakref.WeakKeyDictionary()
"""By rule, static description and dimensions: the reason why a rule of matrices rejects such parameters."""

_specs: weakref.WeakValueDictionary[Any, KernelSpec] = weakref.WeakValueDictionary()
"""By graph, storages, compute dtype and device type: a launch per spec. Graphs keep their specs alive."""


def statics_of(hyperparameters: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the static description of hyperparameters: flags, strings and None, and which entries are numbers."""

    def kind(value: Any, depth: int = 0) -> Any:
        value = value if type(value) in PYTHON_TYPES else as_python(value)
        if isinstance(value, (tuple, list)):
            return tuple(kind(entry, depth + 1) for entry in value)
        if isinstance(value, Mapping):
            return tuple((key, kind(entry, 2)) for key, entry in value.items())
        is_number = isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)
        return NUMBER if is_number and depth < 2 else value

    kinds = []
    for key, value in hyperparameters.items():
        is_number, is_flag = type(value) in (float, int), type(value) in PYTHON_TYPES
        kinds.append((key, NUMBER if is_number else value if is_flag else kind(value)))
    return tuple(sorted(kinds))


def graph_for(
    rule: Rule,
    hyperparameters: Mapping[str, Any],
    dims: int,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Graph:
    """Return the rule's graph for these hyperparameters; traced unless the guards of a cached graph hold.

    `dtype` is the compute dtype, float32 or float64.
    """
    shape = (1,) * dims if shape is None else shape
    hyperparameters = {
        name: value if type(value) in PYTHON_TYPES else _on_host(value) for name, value in hyperparameters.items()
    }
    with _lock:
        graphs = _graphs.setdefault(rule, {})
        key: Any = statics_of(hyperparameters)
        simple = (*PYTHON_TYPES, tuple)
        plain = all([type(value) in simple for _, value in key])
        if not plain or any([any(map(callable, v)) or tuple in map(type, v) for _, v in key if type(v) is tuple]):
            key = _weakly(key, graphs)
        for graph in graphs.get(key, ()):
            fits = (not graph.reads_shape or graph.dims == dims) and (not graph.reads_dtype or graph.dtype is dtype)
            if fits and guards_hold(graph, hyperparameters, shape):
                return graph
        refusals = _refusals.setdefault(rule, {})
        if (key, dims) in refusals:
            raise MatrixError(refusals[key, dims])
        try:
            graph = trace(rule, hyperparameters, dims, shape, dtype)
        except MatrixError as error:
            refusals[key, dims] = str(error)
            raise
        graphs.setdefault(key, []).append(graph)
        return graph


def _weakly(value: Any, graphs: dict[Any, list[Graph]]) -> Any:
    """Return a static description without strong references to functions; a function's graphs are deleted with it."""
    if isinstance(value, tuple):
        return tuple(_weakly(entry, graphs) for entry in value)
    if not callable(value):
        return value

    def forget(reference: Any) -> None:
        for key in [key for key in graphs if _contains(key, reference)]:
            graphs.pop(key, None)

    try:
        kind = weakref.WeakMethod if isinstance(value, types.MethodType) else weakref.ref
        reference = kind(value, forget)
        hash(reference)
        return reference
    except TypeError:  # callables without weak references or hash
        return value


def _contains(key: Any, reference: Any) -> bool:
    return any(_contains(entry, reference) for entry in key) if isinstance(key, tuple) else key is reference


def _on_host(value: Any) -> Any:
    """Convert tensors that the host can read to numbers; a rule may branch on them."""
    value = as_python(value)
    if isinstance(value, (tuple, list)):
        return tuple(_on_host(entry) for entry in value)
    return float(value) if isinstance(value, torch.Tensor) and is_host(value.device) else value


def guards_hold(graph: Graph, hyperparameters: Mapping[str, Any], shape: Sequence[int]) -> bool:
    """Whether a parameter of this shape would take every branch that the graph was traced through."""
    if not graph.guards:
        return True
    hosted = {name: _on_host(value) for name, value in hyperparameters.items()}
    numbers, unread = known_numbers(hosted)
    if graph.branches_on_sizes:
        numbers.update(sizes_of(shape))
    return all(outcome(condition, numbers, unread) is required for condition, required in graph.guards)


def kernel_spec(
    graph: Graph,
    storages: Mapping[str, Storage],
    compute: torch.dtype,
    device_type: str,
    outputs: tuple[Output, ...] = (),
) -> KernelSpec:
    """Return the cached spec of this graph with these storages on this type of device."""
    signature = (id(graph), tuple(storages.items()), compute, device_type, outputs)
    with _lock:
        spec = _specs.get(signature)
        if spec is None:
            exact = [name for name, storage in storages.items() if storage.is_exact(compute)]
            names = [name for name in graph.hypers() if name not in KNOWN_NUMBERS and not size_from_end(name)]
            cut = partition(graph, exact)
            scratch = {name: Plain(dtype or compute) for name, dtype in cut.matrices.scratch.items()}
            spec = KernelSpec(cut, {**storages, **scratch}, compute, (*names, "max_grad_norm"), outputs)
            _specs[signature] = graph.specs[signature] = spec
        return spec
