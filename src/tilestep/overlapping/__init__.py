"""When a step runs beside other work: inside backward, or inside the next forward."""

from __future__ import annotations

from .optimizer import OverlappedOptimizer, overlap

__all__ = ["OverlappedOptimizer", "overlap"]
