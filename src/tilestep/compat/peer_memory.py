"""Memory that the GPUs of one host read from each other, by torch's symmetric memory."""

from __future__ import annotations

from typing import Any

import torch


class PeerMemory:
    """Flat memory of one rank, and what stands for that of the others."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        if device.type != "cuda" or torch.version.cuda is None:
            raise RuntimeError(f"only NVIDIA's GPUs read each other's memory, and the parameters are on {device}")
        try:
            from torch.distributed import _symmetric_memory as symmetric

            self.memory: torch.Tensor = symmetric.empty(numel, dtype=dtype, device=device).zero_()
        except (ImportError, AttributeError) as error:
            raise RuntimeError(f"this version of torch has no symmetric memory: {error}") from error
        self._rendezvous: Any = symmetric.rendezvous
        self._handle: Any = None

    def meet_first(self, group: Any) -> None:
        """Find the others' memory; all ranks of the group call it."""
        self._handle = self._rendezvous(self.memory, group.group_name)

    def of(self, rank: int, first: int, stop: int) -> torch.Tensor:
        """Elements of a rank's memory, which copies read."""
        return self._handle.get_buffer(rank, (stop - first,), self.memory.dtype, first)

    def meet(self) -> None:
        """Let what comes next in the current stream wait until all ranks are here in theirs."""
        self._handle.barrier()
