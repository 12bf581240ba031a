"""The optimizer and the classes made from named rules."""

from __future__ import annotations

from .decide import TimesMean
from .full_precision import full_precision
from .groups import param_groups
from .joint import joint_norm
from .muon_groups import muon_groups
from .named import named_optimizers
from .optimizer import Optimizer

__all__ = ["Optimizer", "TimesMean", "full_precision", "joint_norm", "muon_groups", "named_optimizers", "param_groups"]
