"""What one pass of a program is: numbers once a tensor, or work on tiles of elements, rows, columns, ..."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .ir import SCALAR_LEVELS, Level, Over, Value
from .operations import REDUCTIONS
from .views import View


@dataclass
class ScalarPass:
    """Numbers computed once per tensor, in float64.

    Args:
        rows: column of the row table and the value written there, for the tile passes after this one.
        across: slot and value of what is reduced over all tensors after this pass.
        stores: new values of scalar state buffers; only in the last scalar pass, which also advances the step.
    """

    rows: list[tuple[int, Value]] = field(default_factory=list)
    across: list[tuple[int, Value]] = field(default_factory=list)
    stores: dict[str, Value] = field(default_factory=dict)
    is_last: bool = False  # whether this is the last scalar pass


@dataclass
class TilePass:
    """Work on elements, or on slices (one number a row, a column, ...): one launch over the tiles of all tensors.

    Args:
        reductions: slot and reduction computed here, one number a tensor.
        loads: values read from a buffer rather than computed, because an earlier pass stored them.
        stages: the stage of every value of the graph, by identity.
        kept: slot and slice-level value computed here for other passes to read.
    """

    stores: dict[str, Value] = field(default_factory=dict)  # new value of each buffer written here
    reductions: list[tuple[int, Value]] = field(default_factory=list)
    loads: dict[int, str] = field(default_factory=dict)
    title: str = ""  # its name in generated code
    stage: int = 0  # the scalar pass that it follows
    over: Over | None = None  # the dimensions that the slices have not; None for a pass over elements
    stages: Mapping[int, int] = field(default_factory=dict, repr=False)
    kept: list[tuple[int, Value]] = field(default_factory=list)
    parts: list[tuple[int, Value]] = field(default_factory=list)  # slot and reduction computed here, one number a slice
    view: View | None = None  # how its tiles are cut along rows and columns; None for one that sees its tensors as flat

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.stores or self.reductions or self.kept or self.parts)

    def leaves(self, value: Value) -> bool:
        """Whether the value is not computed here: a number per tensor, already stored, or of other slices."""
        if value.level is Level.SLICE and id(value) not in self.loads:
            return not self._computes_slice(value)
        return value.level in SCALAR_LEVELS or id(value) in self.loads

    def _computes_slice(self, value: Value) -> bool:
        if value.over != self.over or value.operation in REDUCTIONS:
            return False
        return value.operation == "load" or self.stages[id(value)] == self.stage

    def values(self) -> list[Value]:
        """What this pass computes and reads, in order; leaves included, not what they depend on."""
        reduced = (reduction.args[0] for _, reduction in (*self.reductions, *self.parts))
        return _cut([*self.stores.values(), *(value for _, value in self.kept), *reduced], self)

    def slices(self) -> list[Value]:
        """The slice-level values that this pass reads because another one keeps them."""
        return [
            value
            for value in self.values()
            if value.level is Level.SLICE and self.leaves(value) and id(value) not in self.loads
        ]

    def reads(self) -> list[str]:
        """Buffers this pass loads."""
        names = []
        for value in self.values():
            if id(value) in self.loads:
                names.append(self.loads[id(value)])
            elif value.operation == "load" and not self.leaves(value):
                names.append(value.attribute)
        return list(dict.fromkeys(names))


def _cut(roots: list[Value], tile: TilePass) -> list[Value]:
    order: list[Value] = []
    seen: set[int] = set()

    def visit(value: Value) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if not tile.leaves(value):
            for arg in value.args:
                visit(arg)
        order.append(value)

    for root in roots:
        visit(root)
    return order
