"""Host memory that stands for a device's, so that `park` moves state on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilestep.compat import local_parts
from tilestep.native.host_memory import HostMemory
from tilestep.optimizer import parking, states


class Device:
    """Host memory that no `HostMemory` has taken stands for a device's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memories: list[HostMemory] = []
        self.taken = 0
        take, is_usable = HostMemory.take, states._is_usable

        def taking(memory: HostMemory, sizes: Any) -> Any:
            self.memories.append(memory)
            self.taken += any(sizes)
            return take(memory, sizes)

        def usable_here(buffer: torch.Tensor, *rest: Any, **more: Any) -> bool:
            return not self.is_parked(buffer) and is_usable(buffer, *rest, **more)

        monkeypatch.setattr(HostMemory, "take", taking)
        monkeypatch.setattr(states, "_is_usable", usable_here)
        monkeypatch.setattr(parking, "is_host", lambda device: False)

    def is_parked(self, tensor: torch.Tensor) -> bool:
        (part,) = local_parts([tensor])
        return any(memory.holds(part) for memory in self.memories)

    def parked(self, optimizer: Any) -> set[bool]:
        """Whether states are in host memory: all, none, or both."""
        values = [value for state in optimizer.state.values() for value in state.values()]
        return {self.is_parked(value) for value in values if value.numel()}
