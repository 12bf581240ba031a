"""What optimizers give out beside updates: statistics of every parameter, and which weights have changed."""

from __future__ import annotations

from .changes import Change, Changes
from .stats import Stats, StatsPlot, StepStats
from .taps import Taps, names_of, require_no_taps
