"""From a rule to a small typed graph: `trace` is the door."""

from __future__ import annotations

from .hyperparameters import flat_numbers, known_numbers
from .ir import SCALAR_LEVELS, Builder, Graph, Guard, Level, Over, Value, ancestors, evaluate, join, outcome
from .matrix_passes import MatrixPass, MatrixProgram
from .operations import ACROSS, OPERATIONS, REDUCTIONS
from .passes import ScalarPass, TilePass
from .phases import Program, partition, scalar_needs
from .reductions import size_from_end, sizes_of
from .signs import never_negative
from .slices import Slices
from .tracer import trace
from .views import View

__all__ = [
    "ACROSS",
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
