"""`overlap`: updates run concurrently with backward, or with the next forward."""

from __future__ import annotations

from .execution import OverlappedOptimizer, overlap
