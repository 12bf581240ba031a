"""One matrix pass over some of a batch's matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..control_numbers import SKIP
from ..graph import SCALAR_LEVELS, MatrixPass, Value
from .batch import Batch, MatrixSegment
from .operations import MATRIX_OPERATIONS

_OTHERWISE: dict[str, Callable[..., Any]] = {
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "number": lambda value: value,
}


def elementwise(operation: str, arguments: list[torch.Tensor]) -> torch.Tensor:
    """An operation of the graph by torch's function of the same name.

    Example:
        >>> elementwise("maximum", [torch.tensor([1.0, 5.0]), torch.tensor(3.0)])
        tensor([3., 5.])
    """
    function = _OTHERWISE.get(operation) or getattr(torch, operation)
    return function(*arguments)


Known = dict[int, torch.Tensor]
"""Batches by the identity of their value."""


def run_chunk(
    segment: MatrixSegment,
    matrix_pass: MatrixPass,
    batch: Batch,
    chunk: slice,
    skipped_values: frozenset[int],
    stores: bool,
) -> None:
    """Compute a pass for some matrices of a batch."""
    known: Known = {identity: batch.arrays[name][chunk] for identity, name in matrix_pass.inputs.items()}
    for value in matrix_pass.values:
        for arg in value.args:
            if arg.operation == "load" and arg.attribute in batch.states:
                known[id(arg)] = batch.states[arg.attribute][chunk]
    kept = {id(value) for value in matrix_pass.states.values()}
    last_use = {id(arg): place for place, value in enumerate(matrix_pass.values) for arg in value.args}
    for place, value in enumerate(matrix_pass.values):
        if id(value) not in skipped_values:
            name = matrix_pass.outputs.get(id(value))
            out = None if name is None else batch.arrays[name][chunk]
            known[id(value)] = _compute(segment, value, known, batch, chunk, out)
        for arg in value.args:
            if last_use[id(arg)] == place and id(arg) not in kept:
                known.pop(id(arg), None)
    if matrix_pass.states and stores:
        _store(segment, matrix_pass.states, known, batch, chunk)


def _compute(
    segment: MatrixSegment, value: Value, known: Known, batch: Batch, chunk: slice, out: torch.Tensor | None
) -> torch.Tensor:
    compute = segment.spec.compute
    operation = MATRIX_OPERATIONS.get(value.operation)
    if operation is not None:
        operands = [known[id(arg)].to(operation.dtype or compute) for arg in value.args[: operation.operands]]
        return operation.run(operands, [batch.numbers[id(arg)] for arg in value.args[operation.operands :]], out)
    if value.operation == "where":
        branches = [known[id(arg)] for arg in value.args[1:] if id(arg) in known or arg.level in SCALAR_LEVELS]
        if len(branches) == 1:  # the other is spared, since the step does not take it
            return branches[0]
    arguments = [known[id(arg)] if id(arg) in known else _number(segment, arg, batch, chunk) for arg in value.args]
    result = elementwise(value.operation, arguments)
    return result if out is None else out.copy_(result)


def _number(segment: MatrixSegment, value: Value, batch: Batch, chunk: slice) -> torch.Tensor:
    """A number of each tensor, [matrices, 1, 1]; a constant without dimensions."""
    table = segment.row_table()
    if value.operation == "constant":
        dtype = torch.bool if value.is_bool else table.dtype
        return torch.full((), value.attribute, dtype=dtype, device=table.device)
    numbers = table[:, segment.spec.program.columns[id(value)]][batch.index[chunk], None, None]
    return numbers != 0 if value.is_bool else numbers


def _store(segment: MatrixSegment, states: Mapping[str, Value], known: Known, batch: Batch, chunk: slice) -> None:
    """Write new matrix states where the tensor has a gradient and the step is not skipped."""
    active = (segment.grads[batch.index[chunk]] != 0) & (segment.control[SKIP] == 0)
    found = {name: known.get(id(value)) for name, value in states.items()}
    new = {name: value for name, value in found.items() if value is not None}
    # All are chosen before any is written: one may be another's old value.
    chosen = {
        name: torch.where(active[:, None, None], value, batch.states[name][chunk])
        for name, value in new.items()
        if value.data_ptr() != batch.states[name][chunk].data_ptr()
    }
    for name, value in chosen.items():
        batch.states[name][chunk].copy_(value)
