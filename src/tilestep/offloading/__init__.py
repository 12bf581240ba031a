"""State in host memory: `offload`."""

from __future__ import annotations

from .optimizer import OffloadedOptimizer, offload
from .plan import OffloadReport

__all__ = ["OffloadReport", "OffloadedOptimizer", "offload"]
