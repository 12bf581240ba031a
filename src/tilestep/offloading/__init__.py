"""State in host memory: `offload`."""

from __future__ import annotations

from .offloaded import OffloadedOptimizer
from .optimizer import offload
from .plan import OffloadReport

__all__ = ["OffloadReport", "OffloadedOptimizer", "offload"]
