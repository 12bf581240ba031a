"""Optimizer steps at memory bandwidth.

Write an update rule once as plain PyTorch (`rule`), or take one of the named optimizers; the step runs as one kernel
over all parameters, with the global-norm clip inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import lr_scheduler, swa_utils

from . import schedule
from ._version import __version__ as __version__
from .amp import GradScaler
from .errors import (
    BuildError,
    CaptureError,
    GradientError,
    HostMemoryError,
    MatrixError,
    OffloadError,
    RuleError,
    StateError,
    TilestepError,
)
from .execution.capture import CapturedStep, capture
from .execution.overlap import OverlappedOptimizer, overlap
from .execution.zero import ShardedOptimizer, load_checkpoint, save_checkpoint, shard
from .integrations.checkpoints import averaged_momentum  # load_state_dict reads checkpoints of other libraries
from .kernels.cache import compile_count
from .linalg import limit_workspace, orthogonalize
from .memory.offload import offload
from .memory.offloaded import OffloadedOptimizer
from .norm import clip_grad_norm_, total_norm
from .optimizer import Optimizer, full_precision, joint_norm, muon_groups, named_optimizers, param_groups
from .rules import Interval, Rule, State, at_least, between, registry, rule, where
from .rules.adaptive_clip import AdaGC, adaptive_clip
from .rules.compose import (
    cautious,
    cautious_weight_decay,
    centralize,
    clip_update,
    coupled_weight_decay,
    decoupled_weight_decay,
    ema,
    lookahead,
    scaled_states,
)
from .rules.limits import Limit, Sigma, TimesMean, Window, ZClip
from .rules.scalars import machine_epsilon, max_over_tensors, sum_over_tensors
from .stats import Stats, StatsPlot, StepStats
from .tracing import Profile, profile

if TYPE_CHECKING:
    from .execution.zero.planner import LoadPlanner
    from .optimizer.named_types import *  # noqa: F403

globals().update(named_optimizers())

_ELSEWHERE = {
    "LBFGS": "it evaluates the model inside its step",
    "SparseAdam": "it takes sparse gradients, and gradients here are dense",
}

if not TYPE_CHECKING:  # with __getattr__ type checkers accept any name

    def __getattr__(name: str) -> Any:
        """Import slow attributes at their first use; raise for unknown names, with the reason if known."""
        if name == "LoadPlanner":
            # Its base class is in torch.distributed.checkpoint, which takes longer to import than all of tilestep.
            from .execution.zero.planner import LoadPlanner

            globals()[name] = LoadPlanner
            return LoadPlanner
        if name in _ELSEWHERE:
            raise AttributeError(f"tilestep has no {name}: {_ELSEWHERE[name]}; use torch.optim.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "AdaGC",
    "BuildError",
    "CaptureError",
    "CapturedStep",
    "GradScaler",
    "GradientError",
    "HostMemoryError",
    "Interval",
    "Limit",
    "LoadPlanner",
    "MatrixError",
    "OffloadError",
    "OffloadedOptimizer",
    "Optimizer",
    "OverlappedOptimizer",
    "Profile",
    "Rule",
    "RuleError",
    "ShardedOptimizer",
    "Sigma",
    "State",
    "StateError",
    "Stats",
    "StatsPlot",
    "StepStats",
    "TilestepError",
    "TimesMean",
    "Window",
    "ZClip",
    "adaptive_clip",
    "at_least",
    "averaged_momentum",
    "between",
    "capture",
    "cautious",
    "cautious_weight_decay",
    "centralize",
    "clip_grad_norm_",
    "clip_update",
    "compile_count",
    "coupled_weight_decay",
    "decoupled_weight_decay",
    "ema",
    "full_precision",
    "joint_norm",
    "limit_workspace",
    "load_checkpoint",
    "lookahead",
    "lr_scheduler",
    "machine_epsilon",
    "max_over_tensors",
    "muon_groups",
    "offload",
    "orthogonalize",
    "overlap",
    "param_groups",
    "profile",
    "registry",
    "rule",
    "scaled_states",
    "save_checkpoint",
    "schedule",
    "shard",
    "sum_over_tensors",
    "swa_utils",
    "total_norm",
    "where",
    *registry,
]
