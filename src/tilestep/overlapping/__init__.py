"""When a step runs beside other work: inside backward, or inside the next forward."""

from __future__ import annotations

from .choice import OverlapReport
from .optimizer import OverlappedOptimizer
from .overlap import overlap

__all__ = ["OverlapReport", "OverlappedOptimizer", "overlap"]
