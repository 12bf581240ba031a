"""Random trainings beside torch's, in both looks; `make fuzz SEEDS=1000` does more of them."""

from __future__ import annotations

import pytest
import random_trainings
import torch
from random_trainings import FIRST, SEEDS

from tilestep import native


@pytest.mark.parametrize("look", ["native", "python"])
def test_random_trainings(look: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if look == "python":
        monkeypatch.setattr(native, "module", lambda tensors: None)
    elif not native.wait():
        pytest.skip("no C++ compiler, or TILESTEP_NATIVE=0")
    for seed in range(FIRST, FIRST + SEEDS):
        random_trainings.fuzz(seed)


def test_a_write_beside_a_tensor_is_noticed() -> None:
    guards = random_trainings.Guarded()
    tensor = guards.copy(torch.ones(3, 2), [1, 0])
    assert tensor.stride() == (1, 3)
    guards.check()
    tensor.as_strided((8,), (1,))[7] = 0.0
    with pytest.raises(AssertionError, match="written outside"):
        guards.check()
