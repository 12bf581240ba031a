"""The errors tilestep raises; each message names the parameter, group or source line it is about."""

from __future__ import annotations


class TilestepError(Exception):
    """Base of every error that is tilestep's own."""


class RuleError(TilestepError, TypeError):
    """An update rule cannot be translated: its signature, an operation, or a branch on data."""


class GradientError(TilestepError, ValueError):
    """A gradient or parameter cannot be updated: sparse, complex, overlapping, or of another shape, dtype or device."""


class MatrixError(RuleError, GradientError):
    """A parameter is not a matrix, and its rule works on matrices only."""


class StateError(TilestepError, ValueError):
    """A `state_dict` does not fit: other shapes, other state buffers, or another rule."""


class CaptureError(TilestepError, RuntimeError):
    """A step cannot be captured in a CUDA graph, or a captured one no longer fits its optimizer."""


class OffloadError(TilestepError, ValueError):
    """An optimizer's state cannot live in host memory: of another kind, on another device, or with another wrapper."""


class HostMemoryError(TilestepError, MemoryError):
    """There is not enough host memory: how much was asked for, and what would fit."""


class BuildError(TilestepError, RuntimeError):
    """Generated code could not be built or loaded."""


class RankError(TilestepError, RuntimeError):
    """Ranks cannot go on together: one of them is gone, or late.

    Args:
        message: what has happened.
        ranks: those of the default process group that are gone.
    """

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks
