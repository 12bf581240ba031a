"""Outputs of a tile pass beside the update: sums and extremes of each tensor, and a bit for each changed weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..graph import Builder, TilePass, Value
from .spec import KernelSpec

NEAR, FAR = 2.0**40, 2.0**-11
"""What small and large magnitudes of states are multiplied by before they are squared: float32 then holds the sums of
squares of second moments too, from 1e-31 to 1e+22."""

SPLIT = 2.0**-10
"""Magnitudes from here on are large."""


class TapColumns:
    """The columns of the table of statistics, as kernels write it: sums, counts and extremes.

    Squares of states are in two columns, of small ones and of large ones; see `NEAR`.
    """

    def __init__(self, states: Sequence[str]) -> None:
        self.states = tuple(states)
        self.names = ["grad_squares", "grad_max", "grad_zeros", "param_squares", "param_max", "update_squares"]
        self.names += ["update_max", "lost"]
        self.names += [f"{state}_{what}" for state in states for what in ("near", "far", "max")]

    def __len__(self) -> int:
        return len(self.names)

    def slot(self, name: str) -> int:
        """The index of a column."""
        return self.names.index(name)

    def is_extreme(self, slot: int) -> bool:
        """Whether the values of tiles are combined by their maximum, not by their sum."""
        return self.names[slot].endswith("_max")


def tap_columns(spec: KernelSpec) -> TapColumns:
    """The columns of a spec's statistics; only states of the parameter's shape have some."""
    graph = spec.program.graph
    apart = {*graph.scalar_states, *graph.slice_states, *graph.matrix_states}
    return TapColumns([name for name in graph.states if name not in apart and name in spec.storages])


@dataclass(frozen=True)
class PassTaps:
    """The outputs of one tile pass beside the update."""

    spec: KernelSpec
    tile: TilePass
    grad: bool  # whether its statistics have the gradient's columns
    buffers: tuple[str, ...]  # the parameter and states that it writes

    @cached_property
    def columns(self) -> TapColumns:
        """The columns of all passes together."""
        return tap_columns(self.spec)

    @property
    def stats(self) -> bool:
        """Whether the pass has statistics."""
        return self.spec.taps.stats and bool(self.grad or self.buffers)

    @property
    def changes(self) -> bool:
        """Whether the pass marks changed weights."""
        return self.spec.taps.changes and "param" in self.buffers

    @property
    def slots(self) -> list[int]:
        """The columns that the pass fills."""
        first = [f"grad_{what}" for what in ("squares", "max", "zeros")] if self.grad else []
        if "param" in self.buffers:
            first += ["param_squares", "param_max", "update_squares", "update_max", "lost"]
        first += [f"{name}_{what}" for name in self.states for what in ("near", "far", "max")]
        return [self.columns.slot(name) for name in first]

    @property
    def states(self) -> list[str]:
        """The states that the pass writes."""
        return [name for name in self.columns.states if name in self.buffers]

    @property
    def compared(self) -> list[int]:
        """Indices of the parameter's arrays whose elements are compared with their values before the step."""
        arrays = self.spec.storages["param"].arrays("param")
        return list(range(len(arrays) if self.stats else 1)) if "param" in self.buffers else []

    @cached_property
    def moves(self) -> Value | None:
        """Whether the rule adds something to the parameter; None if the graph does not show it.

        No product of the rule is used in it: a compiler that finds one used beside a sum does not fuse the two, and
        steps that measure would round otherwise than those that do not.
        """
        new = self.tile.stores.get("param")
        if not self.stats or new is None or new.operation == "load":
            return None
        return _moves(Builder(), new, self.tile)

    @property
    def move_values(self) -> list[Value]:
        """The values from which `moves` is computed, in order, without those of the pass."""
        if self.moves is None:
            return []
        order: list[Value] = []
        seen = {id(value) for value in self.tile.values()}

        def visit(value: Value) -> None:
            if id(value) not in seen:
                seen.add(id(value))
                for arg in value.args:
                    visit(arg)
                order.append(value)

        visit(self.moves)
        return order


def _moves(build: Builder, value: Value, tile: TilePass) -> Value | None:
    """Whether a sum that begins with the parameter has other terms than 0."""
    if value.operation == "load" and value.attribute == "param" and id(value) not in tile.loads:
        return build.constant(False)
    if tile.leaves(value):
        return None
    if value.operation in ("add", "sub"):
        for kept, term in (value.args, value.args[::-1]) if value.operation == "add" else (value.args,):
            before = _moves(build, kept, tile)
            if before is not None:
                moves = _is_something(build, term, tile)
                return moves if before.operation == "constant" else build.apply("or", before, moves)
    if value.operation == "mul":
        for kept, factor in (value.args, value.args[::-1]):
            if kept.operation == "load" and _moves(build, kept, tile) is not None:
                scales = build.apply("ne", factor, build.constant(1.0))
                return build.apply("and", scales, build.apply("ne", kept, build.constant(0.0)))
    return None


def _is_something(build: Builder, value: Value, tile: TilePass) -> Value:
    """Whether a term is not 0: of a product, whether no factor is, but for what is too small for the type."""
    if not tile.leaves(value):
        if value.operation == "mul":
            return build.apply("and", *(_is_something(build, arg, tile) for arg in value.args))
        if value.operation in ("div", "neg"):
            return _is_something(build, value.args[0], tile)
    return build.apply("ne", value, build.constant(0.0))


def taps_of(spec: KernelSpec, tile: TilePass) -> PassTaps | None:
    """The outputs of a pass; None if it has none."""
    if not (spec.taps.stats or spec.taps.changes):
        return None
    columns = tap_columns(spec)
    grad = spec.taps.stats and spec.program.unscales(tile)
    buffers = tuple(name for name in ("param", *columns.states) if name in tile.stores)
    taps = PassTaps(spec, tile, grad, buffers)
    return taps if taps.stats or taps.changes else None


def kept_states(spec: KernelSpec) -> list[str]:
    """The states of the parameter's shape that no pass writes."""
    stored = {name for tile in spec.program.tile_passes() for name in tile.stores}
    return [name for name in tap_columns(spec).states if name not in stored]


def taps_fit(spec: KernelSpec) -> bool:
    """Whether kernels can have taps: they write the parameter, and no pass with outputs works on rows."""
    passes = spec.program.tile_passes()
    columns = tap_columns(spec)
    put_out = {"param", *columns.states}
    tapped = [
        tile_pass for tile_pass in passes if put_out.intersection(tile_pass.stores) or spec.program.unscales(tile_pass)
    ]
    is_written = any("param" in tile_pass.stores for tile_pass in tapped)
    return is_written and all(tile_pass.view is None for tile_pass in tapped)
