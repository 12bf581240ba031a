"""Bytes that a rule keeps, and moves in a step, for each element of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..describe import describe, spec_for
from ..optimizer.masters import MasterWeights
from ..optimizer.states import compute_dtype
from ..rules import Rule


@dataclass(frozen=True)
class Footprint:
    """Bytes for each element of the parameters."""

    parameter: float  # of the parameter, as it travels to other ranks
    gradient: float  # of its gradient, as it is summed over the ranks
    state: float  # of everything else the optimizer keeps, masters too
    moved: float  # read and written by the update, in all passes
    notes: tuple[str, ...] = ()  # what is not in these numbers


def footprint(
    rule: Rule,
    hyperparameters: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    master_weights: MasterWeights = False,
    state_dtype: Any = None,
    rounding: str = "nearest",
    grad_sync_dtype: torch.dtype | None = None,
) -> Footprint:
    """What a rule keeps and moves for the elements of a matrix.

    Example:
        >>> from tilestep.rules import registry
        >>> found = footprint(registry["AdamW"], master_weights=True)
        >>> found.state, found.moved
        (12.0, 30.0)
        >>> found = footprint(registry["AdamW"], master_weights="remainder")
        >>> found.state, found.moved
        (10.0, 26.0)
    """
    kept: dict[str, Any] = {"master_weights": master_weights, "state_dtype": state_dtype, "rounding": rounding}
    spec = spec_for(rule, hyperparameters, dtype=dtype, **kept)
    graph, notes, state = spec.program.graph, [], 0.0
    for name, storage in spec.storages.items():
        if name in ("grad", *spec.program.library.scratch):
            continue
        arrays = [array for array in storage.arrays(name) if array.name != "param"]
        if name == "param" or rule.states[name].shape == "param":
            state += sum(array.dtype.itemsize / array.elements for array in arrays)
        else:
            notes.append(f"{name}, one number for each {rule.states[name].shape}")
    squares = len(graph.matrix_states)
    if squares:
        like = torch.empty(0, dtype=dtype, device="meta")
        state += squares * compute_dtype(like).itemsize
        notes.append("for matrices that are not square, what squares of their sides need beyond the matrix itself")
    if spec.program.library.passes:
        notes.append("the time of matrix products")
    if spec.draws:
        notes.append("the arithmetic of random bits, for " + ", ".join(spec.draws))
    described = describe(rule, hyperparameters, backend="cpp", dtype=dtype, **kept)
    gradient = (grad_sync_dtype or dtype).itemsize
    moved = described.bytes_read + described.bytes_written + gradient - dtype.itemsize
    return Footprint(float(dtype.itemsize), float(gradient), state, float(moved), tuple(notes))
