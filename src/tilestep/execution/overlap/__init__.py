"""When a step runs beside other work: inside backward, or inside the next forward."""

from __future__ import annotations

from .execution import OverlappedOptimizer, overlap
