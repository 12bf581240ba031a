"""Random trainings beside torch's on a GPU, with captured steps among what is drawn.

TILESTEP_FUZZ_SEEDS=200 python -m pytest tests/gpu/test_fuzz_gpu.py
"""

from __future__ import annotations

import pytest
import random_trainings
from random_trainings import FIRST, SEEDS


@pytest.mark.parametrize("tenth", range(10))
def test_random_trainings(tenth: int) -> None:
    for seed in range(FIRST + tenth, FIRST + SEEDS, 10):
        random_trainings.fuzz(seed, device="cuda")
