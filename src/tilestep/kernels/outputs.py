"""Outputs of kernels (results besides the update) as graphs, each with the pass that computes it."""

from __future__ import annotations

from functools import cached_property

from ..graph import OPERATIONS, Level, TilePass, Value, ancestors
from ..storage import Leaf, Stored
from .spec import KernelSpec, Output


class Traced:
    """An output as a graph, and the pass that computes it."""

    def __init__(self, spec: KernelSpec, output: Output) -> None:
        self.output, self.root = output, output.of(Stored(spec.storages)).value
        self.root.name = output.name
        self._values = ancestors([self.root])
        self.leaves: list[Leaf] = [value.attribute for value in self._values if value.operation == "load"]
        tiles = {id(tile): tile for tile in (storing(spec, leaf[1]) for leaf in self.leaves)}
        only = next(iter(tiles.values())) if len(tiles) == 1 else None
        self.tile = only if only is not None and only.view is None else None
        """The pass that stores all buffers that the output reads. None without such a pass over elements: torch then
        evaluates the output around the step."""

    @property
    def reduction(self) -> Value:
        """The reduction over a tensor's elements."""
        return Value({"sum": "reduce_sum", "max": "reduce_amax"}[self.output.reduce], (self.root,), level=Level.TENSOR)

    @cached_property
    def ignores_zeros(self) -> bool:
        """Whether an element contributes nothing if all its leaves are 0 or false, so that no mask is needed."""
        results: dict[int, object] = {}
        for value in self._values:
            evaluate = OPERATIONS.get(value.operation)
            if value.operation == "load":
                results[id(value)] = False if value.is_bool else 0.0
            elif value.operation == "constant":
                results[id(value)] = value.attribute
            elif evaluate is None:
                return False
            else:
                results[id(value)] = evaluate(*(results[id(arg)] for arg in value.args))
        return not results[id(self.root)] and (self.output.reduce != "max" or self.root.operation == "abs")


def storing(spec: KernelSpec, buffer: str) -> TilePass | None:
    """The pass that stores a buffer; for the gradient, the pass that unscales it."""
    program = spec.program
    tiles = (t for t in program.tile_passes() if (program.unscales(t) if buffer == "grad" else buffer in t.stores))
    return next(tiles, None)


def traced(spec: KernelSpec) -> list[Traced]:
    """The outputs of a spec's kernels."""
    return [Traced(spec, output) for output in spec.outputs]
