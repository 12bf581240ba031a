"""Overlapped optimizers of models on several meshes, of shared and unused weights, of offloaded state; gloo ranks."""

from __future__ import annotations

from overlapped_meshes import CHECKS, WIDE_CHECKS
from rank_processes import each_passes

test_two_ranks = each_passes(CHECKS, 2)


test_four_ranks = each_passes(WIDE_CHECKS, 4)
