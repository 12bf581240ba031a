"""From a rule to a small typed graph: `trace` is the door."""

from __future__ import annotations

from .analysis import never_negative
from .ir import (
    GLOBAL_REDUCTIONS,
    OPERATIONS,
    REDUCTIONS,
    SCALAR_LEVELS,
    Builder,
    Graph,
    Guard,
    Level,
    Over,
    Value,
    ancestors,
    evaluate,
    join,
    outcome,
)
from .lowering import size_from_end, sizes_of
from .partition import MatrixPass, MatrixProgram, Program, ScalarPass, Slices, TilePass, View, partition, scalar_needs
from .tracer import flat_numbers, known_numbers, trace

__all__ = [
    "GLOBAL_REDUCTIONS",
    "OPERATIONS",
    "REDUCTIONS",
    "SCALAR_LEVELS",
    "Builder",
    "Graph",
    "Guard",
    "Level",
    "MatrixProgram",
    "MatrixPass",
    "Over",
    "Program",
    "ScalarPass",
    "Slices",
    "TilePass",
    "Value",
    "View",
    "ancestors",
    "evaluate",
    "flat_numbers",
    "join",
    "known_numbers",
    "never_negative",
    "outcome",
    "partition",
    "scalar_needs",
    "size_from_end",
    "sizes_of",
    "trace",
]
