"""What tests of several folders begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def device() -> str:
    """Where tests that run on a CPU here run on a GPU in the GPU suite, which has a fixture of its own."""
    return "cpu"
