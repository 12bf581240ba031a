"""What tests of several folders begin with."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch.distributed as dist


def pytest_collection_finish() -> None:
    """What has been imported and collected is not looked through again whenever a test collects garbage."""
    gc.collect()
    gc.freeze()


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
