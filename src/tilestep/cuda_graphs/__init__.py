"""Steps inside CUDA graphs: `capture` is the door."""

from __future__ import annotations

from .capture import CapturedStep, capture

__all__ = ["CapturedStep", "capture"]
