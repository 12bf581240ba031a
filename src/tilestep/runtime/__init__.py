"""Tables and launches: `DeviceEngine` runs the passes of all tensors on one device."""

from __future__ import annotations

from .decision import Control, StepInputs
from .engine import DeviceEngine, build_ahead, check_reductions, pass_calls, run_marked
from .gradients import READABLE, Stale, grad_dtype
from .kernel_cache import graph_for, kernel_spec
from .norms import GradNorm
from .segment import Entry, check_no_overlap, is_dense
