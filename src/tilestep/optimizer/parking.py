"""Copies of state in host memory, while its device has other work: `Optimizer.park`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from ..devices import is_host, synchronize
from ..native.host_memory import HostMemory
from ..native.table import address_of


class Parking:
    """Page-locked memory for an optimizer's state, one buffer for each storage; later calls use the buffers again."""

    def __init__(self) -> None:
        self._memory: HostMemory | None = None
        self._buffers: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies in host memory, with equal strides, of tensors on devices, and tensors on the host as they are.

        Raises:
            HostMemoryError: if there is not enough host memory.
        """
        every = [tensor.untyped_storage() for tensor in tensors]
        storages = {address_of(storage): storage for storage in every if storage.nbytes()}
        own = {address_of(buffer): buffer for buffer in self._buffers}
        moved = {at: storage for at, storage in storages.items() if at not in own and not is_host(storage.device)}
        if not moved:
            return list(tensors)
        spare: dict[int, list[torch.Tensor]] = defaultdict(list)
        for at, buffer in own.items():
            if at not in storages:
                spare[buffer.numel()].append(buffer)
        sizes = {at: storage.nbytes() for at, storage in moved.items()}
        buffers = {at: spare[size].pop() for at, size in sizes.items() if spare[size]}
        missing = [at for at in moved if at not in buffers]
        devices = list(dict.fromkeys(storage.device for storage in moved.values()))
        self._memory = self._memory or HostMemory(devices[0])
        if missing:
            buffers.update(zip(missing, self._memory.take([sizes[at] for at in missing])))
        self._buffers = [*(own[at] for at in storages if at in own), *buffers.values()]
        for at, storage in moved.items():
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (sizes[at],), (1,))
            buffers[at].copy_(flat, non_blocking=True)
        taken = [
            _placed(tensor, buffers[at]) if at in moved else tensor if at in own else tensor.cpu()
            for tensor, at in zip(tensors, map(address_of, every))
        ]
        for device in devices:
            synchronize(device)
        return taken


def _placed(tensor: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """A tensor over another storage, with the same offset, shape and strides."""
    empty = torch.empty(0, dtype=tensor.dtype, device=buffer.device)
    return empty.set_(buffer.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
