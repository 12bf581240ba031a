"""The graph of a rule for a stack of matrices, made from its graph for a matrix."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..errors import MatrixError
from .ir import GLOBAL_REDUCTIONS, REDUCTIONS, Builder, Graph, Level, Over, Value, folded
from .lowering import is_matrix_work


def combines(graph: Graph) -> bool:
    """Whether a graph for a matrix has a number per matrix, row or column; a stack has several of them."""
    kept = bool(graph.slice_states or graph.matrix_states or graph.scalar_states)
    return kept or any(value.operation in REDUCTIONS | GLOBAL_REDUCTIONS for value in graph.values())


def stacked(graph: Graph) -> Graph:
    """The graph with a leading dimension; reductions over a matrix give a number per matrix.

    Raises:
        MatrixError: for a rule that stores a number or a square matrix per matrix, or reduces over all tensors.
    """
    if graph.stack is not None:
        return graph.stack
    spans = any(value.operation in GLOBAL_REDUCTIONS for value in graph.values())
    if graph.matrix_states or graph.scalar_states or spans:
        reason = "reduces over all tensors" if spans else f"keeps {min((*graph.matrix_states, *graph.scalar_states))!r}"
        raise MatrixError(f"{graph.title} {reason}, which is not supported for several matrices in one tensor")
    build = Builder(graph.dims + 1, graph.dtype)
    made = folded(graph.outputs.values(), partial(_rebuilt, build, graph.dims))
    graph.stack = replace(
        graph,
        outputs={name: made[id(value)] for name, value in graph.outputs.items()},
        slice_states={name: _shifted(over) for name, over in graph.slice_states.items()},
        dims=build.dims,
        reads_shape=True,
        specs={},
    )
    return graph.stack


def _shifted(over: Over) -> Over:
    return over[0] + 1, over[1] + 1


def _rebuilt(build: Builder, dims: int, value: Value, args: list[Value]) -> Value:
    over = None if value.over is None else _shifted(value.over)
    if value.operation == "constant":
        return build.constant(value.attribute) if not value.dtype else build.integer(value.attribute)
    if value.operation == "hyper":
        made = build.hyper(value.attribute, value.level)
    elif value.operation == "load":
        made = build.load(value.attribute, value.level, over, value.dtype)
    elif value.operation in REDUCTIONS:
        over = over or (1, dims + 1)
        made = build.apply(value.operation, *args, attribute=over, level=Level.SLICE, over=over)
    elif is_matrix_work(value):
        made = build.apply(value.operation, *args, attribute=value.attribute, level=value.level)
        made.space = value.space
    else:
        made = build.apply(value.operation, *args, attribute=value.attribute, dtype=value.dtype)
    made.name, made.line = made.name or value.name, made.line or value.line
    return made
