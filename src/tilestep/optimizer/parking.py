"""Copies of state in host memory while the device does other work: `Optimizer.park`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from ..compat import distributed_like
from ..devices import is_host, synchronize
from ..native.host_memory import HostMemory
from ..native.table import address_of
from ..placement.local import is_distributed, local_part
from ..storage import entries_of
from .masters import MASTER_KEYS
from .parameters import Optimizer, shares_of
from .states import TRAINING


class Parking:
    """Page-locked memory for an optimizer's state, a buffer per storage; later calls reuse the buffers."""

    def __init__(self) -> None:
        self._memory: HostMemory | None = None
        self._buffers: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, optimizer: Optimizer) -> bool:
        """Replace all state tensors on devices, step counts included, by copies in host memory.

        Copies keep the strides. Returns whether any tensor was copied.

        Raises:
            HostMemoryError: if host memory does not suffice; nothing has changed then.
        """
        held: list[
            tuple[dict[str, Any], str, torch.Tensor, int]
        ] = []  # with this rank's part and the address of its storage
        for share in shares_of(optimizer):
            state, rule = optimizer.state.get(share.param, {}), optimizer.rule_of(share.group)
            names = {TRAINING, "step", *MASTER_KEYS, *rule.state_names, *entries_of(state, rule.state_names)}
            for name in [name for name, value in state.items() if name in names and isinstance(value, torch.Tensor)]:
                part = local_part(state[name])
                held.append((state, name, part, address_of(part.untyped_storage())))
        own = {address_of(buffer): buffer for buffer in self._buffers}
        moving = [one for one in held if one[3] not in own and not is_host(one[2].device)]
        storages = {at: storage for _, _, part, at in moving if (storage := part.untyped_storage()).nbytes()}
        if not storages:
            return False
        spare = defaultdict[int, list[torch.Tensor]](list)
        for at in own.keys() - {one[3] for one in held}:
            spare[own[at].numel()].append(own.pop(at))
        buffers = {at: spare[size].pop() for at, storage in storages.items() if spare[size := storage.nbytes()]}
        missing = [at for at in storages if at not in buffers]
        devices = list(dict.fromkeys(storage.device for storage in storages.values()))
        self._memory = self._memory or HostMemory(devices[0])
        if missing:
            buffers.update(zip(missing, self._memory.take([storages[at].nbytes() for at in missing])))
        self._buffers = [*own.values(), *buffers.values()]
        for at, storage in storages.items():
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
            buffers[at].copy_(flat, non_blocking=True)
        for state, name, part, at in moving:
            like, moved = state[name], torch.empty(0, dtype=part.dtype, device="cpu")
            if at not in buffers:
                moved = part.cpu()  # an empty storage
            else:
                moved.set_(buffers[at].untyped_storage(), part.storage_offset(), part.shape, part.stride())
            if is_distributed(like):
                moved = distributed_like(moved, like, like.shape, like.stride(), like.placements)
            state[name] = moved
        for device in devices:
            synchronize(device)
        return True
