"""Copies of state in host memory, while its device has other work: `Optimizer.park`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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


class _Held(NamedTuple):
    """A tensor of a state, this rank's part of it, and the address of that part's storage."""

    state: dict[str, Any]
    name: str
    part: torch.Tensor
    at: int


class Parking:
    """Page-locked memory for an optimizer's state, one buffer for each storage; later calls use the buffers again."""

    def __init__(self) -> None:
        self.is_full = False  # whether there is state to give back
        self._memory: HostMemory | None = None
        self._buffers: dict[int, tuple[torch.Tensor, torch.device]] = {}  # by address, and whose memory they stand for

    @torch.no_grad()
    def take(self, optimizer: Optimizer) -> bool:
        """Replace the tensors of all states on devices, step counts included, by copies in host memory.

        Copies have equal strides. Returns whether there were any.

        Raises:
            HostMemoryError: if there is not enough host memory. Nothing is changed then.
        """
        held = _held(optimizer)
        moving = [one for one in held if one.at not in self._buffers and not is_host(one.part.device)]
        storages = {one.at: storage for one in moving if (storage := one.part.untyped_storage()).nbytes()}
        if not storages:
            return False
        spare = defaultdict[int, list[torch.Tensor]](list)
        kept = dict(self._buffers)
        for at in kept.keys() - {one.at for one in held}:
            buffer, _ = kept.pop(at)
            spare[buffer.numel()].append(buffer)
        buffers = {at: spare[size].pop() for at, storage in storages.items() if spare[size := storage.nbytes()]}
        missing = [at for at in storages if at not in buffers]
        self._memory = self._memory or HostMemory(next(iter(storages.values())).device)
        if missing:
            buffers.update(zip(missing, self._memory.take([storages[at].nbytes() for at in missing])))
        self._buffers = kept | {address_of(buffers[at]): (buffers[at], own.device) for at, own in storages.items()}
        for at, storage in storages.items():
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
            buffers[at].copy_(flat, non_blocking=True)
        _replace([one._replace(part=one.part if one.at in buffers else one.part.cpu()) for one in moving], buffers)
        self.is_full = True
        self._wait()
        return True

    @contextmanager
    def given_back(self, optimizer: Optimizer) -> Iterator[None]:
        """Replace copies that `take` has made by copies on their devices, which arrive while the block runs."""
        held = [one for one in _held(optimizer) if one.at in self._buffers]
        made: dict[int, torch.Tensor] = {}
        for at in dict.fromkeys(one.at for one in held):
            buffer, device = self._buffers[at]
            made[at] = torch.empty_like(buffer, device=device).copy_(buffer, non_blocking=True)
        _replace(held, made)
        self.is_full = False
        try:
            yield
        finally:
            self._wait()

    def _wait(self) -> None:
        for device in {device for _, device in self._buffers.values()}:
            synchronize(device)


def _held(optimizer: Optimizer) -> list[_Held]:
    """The tensors of all states."""
    held = []
    for share in shares_of(optimizer):
        state, rule = optimizer.state.get(share.param, {}), optimizer.rule_of(share.group)
        names = {TRAINING, "step", *MASTER_KEYS, *rule.state_names, *entries_of(state, rule.state_names)}
        for name in [name for name, value in state.items() if name in names and isinstance(value, torch.Tensor)]:
            part = local_part(state[name])
            held.append(_Held(state, name, part, address_of(part.untyped_storage())))
    return held


def _replace(held: Sequence[_Held], buffers: Mapping[int, torch.Tensor]) -> None:
    """Have states hold views of other storages, by the address of theirs, or without one the parts."""
    for state, name, part, at in held:
        like = state[name]
        if at in buffers:
            empty = torch.empty(0, dtype=part.dtype, device=buffers[at].device)
            part = empty.set_(buffers[at].untyped_storage(), part.storage_offset(), part.shape, part.stride())
        if is_distributed(like):
            part = distributed_like(part, like, like.shape, like.stride(), like.placements)
        state[name] = part
