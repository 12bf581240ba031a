"""Mixed precision: a loss scaler whose work is part of the optimizer's own passes."""

from __future__ import annotations

from .grad_scaler import GradScaler
