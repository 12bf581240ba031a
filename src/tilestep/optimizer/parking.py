"""Copies of state in host memory while the device does other work: `Optimizer.park`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from ..compat import local_parts, ready
from ..devices import is_host
from ..devices.garbage import without_collections
from ..native.host_memory import HostMemory
from ..native.table import address_of
from ..placement.local import distribute
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
    @without_collections()
    def copy_state(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """Replace all state tensors on devices, step counts included, by copies in host memory.

        Copies keep the strides. Returns the tensors, which the current streams copy: keep them until these are done.

        Raises:
            HostMemoryError: if host memory does not suffice; nothing has changed then.
        """
        named: list[tuple[dict[str, Any], str]] = []
        for share in shares_of(optimizer):
            state, rule = optimizer.state.get(share.param, {}), optimizer.rule_of(share.group)
            names = {TRAINING, "step", *MASTER_KEYS, *rule.state_names, *entries_of(state, rule.state_names)}
            named += [(state, key) for key, value in state.items() if key in names and isinstance(value, torch.Tensor)]
        parts = [ready(part) for part in local_parts([state[name] for state, name in named])]  # this rank's
        places = [address_of(part.untyped_storage()) for part in parts]
        own = {address_of(buffer): buffer for buffer in self._buffers}
        spare = defaultdict[int, list[torch.Tensor]](list)
        for at in own.keys() - places:
            spare[own[at].numel()].append(own.pop(at))
        moving = [one for one in zip(named, parts, places) if one[2] not in own and not is_host(one[1].device)]
        storages = {at: storage for _, part, at in moving if (storage := part.untyped_storage()).nbytes()}
        if not storages:
            return []
        self._memory = self._memory or HostMemory(moving[0][1].device)
        buffers = {at: spare[size].pop() for at, storage in storages.items() if spare[size := storage.nbytes()]}
        missing = {at: storage.nbytes() for at, storage in storages.items() if at not in buffers}
        buffers.update(zip(missing, self._memory.take(list(missing.values()))))
        self._buffers = [*own.values(), *buffers.values()]
        for at, storage in storages.items():
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
            buffers[at].copy_(flat, non_blocking=True)
        for (state, name), part, at in moving:
            if at in buffers:
                moved = torch.empty(0, dtype=part.dtype, device="cpu")
                moved.set_(buffers[at].untyped_storage(), part.storage_offset(), part.shape, part.stride())
            else:
                moved = part.cpu()  # an empty storage
            state[name] = distribute(moved, state[name])
        return [part for _, part, _ in moving]
