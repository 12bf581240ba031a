"""Tables and launches: `DeviceEngine` runs the passes of all tensors on one device."""

from __future__ import annotations

from ..backends.registry import load_ahead, segment_class
from .control import StepInputs
from .decider import Decider, JointNorm, SharedNorm
from .engine import DeviceEngine, are_built_ahead, build_ahead, pass_calls, run_marked, run_passes
from .gradients import Stale, grad_dtype
from .kernel_cache import graph_for, kernel_spec
from .segment import Entry, check_no_overlap, is_dense

__all__ = [
    "Decider",
    "StepInputs",
    "DeviceEngine",
    "Entry",
    "JointNorm",
    "SharedNorm",
    "Stale",
    "are_built_ahead",
    "build_ahead",
    "check_no_overlap",
    "grad_dtype",
    "graph_for",
    "is_dense",
    "kernel_spec",
    "load_ahead",
    "pass_calls",
    "run_marked",
    "run_passes",
    "segment_class",
]
