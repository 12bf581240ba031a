"""From a rule to a small typed graph; `trace` is the entry."""

from __future__ import annotations

from .analysis import never_negative
from .ir import (
    GLOBAL_REDUCTIONS,
    OPERATIONS,
    REDUCTIONS,
    SCALAR_LEVELS,
    Builder,
    Condition,
    Graph,
    Level,
    Value,
    ancestors,
    evaluate,
    folded,
    outcome,
)
from .lowering import is_matrix_work, size_from_end, sizes_of
from .partition import MatrixPass, Program, ScalarPass, Slices, TilePass, View, partition, scalar_needs
from .stacked import combines, stacked
from .tracer import flat_numbers, known_numbers, rule_place, trace
