"""The control numbers of a step: eight float64 on its device."""

from __future__ import annotations

import sys

NORM, SKIP, INVERSE_SCALE, UNSCALE, SKIPPED, MEAN, MEAN_COUNT, CLIP = range(8)
"""Places in the control numbers. The first four are of one step (UNSCALE: tile passes write the unscaled gradients
back), as is CLIP; the others outlive it: skipped steps, running mean of the norm, norms that went into it."""

CONTROL_SIZE = 8

LARGEST_SUM = sys.float_info.max
"""A sum of squares that stands for a larger one, of finite float64 gradients: overflow checks tell it from infinity,
which is its root, as torch's."""
