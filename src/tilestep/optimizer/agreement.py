"""Whether ranks that train the same parameters step with the same numbers: compared once, at the first step."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from ..combinations import DDP, kind_of, wrappers_around
from ..compat import default_store, fake_mode_is_active, fsdp_module_type, is_capturing
from ..garbage import living
from ..placement import is_distributed
from .groups import described_numbers
from .parameters import Optimizer

PATIENCE = 10.0  # seconds that a rank's first step waits for the first steps of the other ranks
_LATER_STEPS = 100  # in how many further steps a rank looks, without waiting, whether the others have stepped since


def compare_ranks(optimizer: Optimizer, *, has_loss: bool) -> None:
    """Raise on ranks whose groups have other numbers than those of a rank with which they share parameters."""
    # Later changes are not compared: a rank does not know that another one's have changed, and finding out would be a
    # message at every step.
    control = optimizer.control
    if is_capturing() or fake_mode_is_active():
        return
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not several or "shard" in optimizer.attached:
        control.compared = True
        return
    if _has_no_rate(optimizer):
        return
    comparison, control.comparison = control.comparison, None
    with suppress(RuntimeError):  # the process group has no store, or the process that keeps it has ended
        patience = PATIENCE if comparison is None else 0.0
        if comparison is None:
            # Modules may have meshes of their own, of the same ranks.
            comparison = RankComparison(_shared(optimizer), list(_lines(optimizer, has_loss)))
        if not comparison.is_over(patience):
            control.comparison = comparison
    control.compared = control.comparison is None


class RankComparison:
    """A comparison of what ranks are about to do, through the store in which they have found each other."""

    # No collective: a rank that skips its first step would answer with the next one that it calls, which is another.
    # The store is looked up each time: one that outlives its process group answers the next one on its port.

    def __init__(self, shared: Mapping[tuple[int, ...], str], lines: Sequence[str]) -> None:
        self._rank, self._lines, self._looks = dist.get_rank(), lines, 0
        text = "\n".join(lines)
        digest = f"{zlib.crc32(text.encode()):08x}"
        self._open: list[tuple[tuple[int, ...], str]] = []
        for ranks, first in sorted(shared.items()):
            place = f"tilestep/numbers/{len(ranks)}-{zlib.crc32(repr((ranks, first)).encode()):08x}"
            # Ranks may step several optimizers in other orders. Among those of the same parameters the n-th comparison
            # of each rank is one with the n-th of the others.
            place = f"{place}/{_store_at(place).add(f'begun by {self._rank}', 1)}"
            store = _store_at(place)
            store.set(str(self._rank), text)
            store.add(digest, 1)
            if store.add("arrived", 1) == len(ranks):
                store.set("equal", str(int(store.add(digest, 0) == len(ranks))))
            self._open.append((ranks, place))

    def is_over(self, patience: float) -> bool:
        """Whether nothing more will be compared; waits at most so many seconds for ranks that have not begun.

        Raises:
            ValueError: if a rank has other lines.
        """
        end, pause = time.monotonic() + patience, 0.001
        while not self._answered() and time.monotonic() < end:
            time.sleep(pause)
            pause = min(1.5 * pause, 0.25)
        self._looks += 1
        return not self._open or self._looks > _LATER_STEPS

    def _answered(self) -> bool:
        for ranks, place in list(self._open):
            store = _store_at(place)
            if not store.check(["equal"]):
                continue
            self._open.remove((ranks, place))
            if store.get("equal") == b"0":
                self._refuse({rank: store.get(str(rank)).decode().split("\n") for rank in ranks})
        return not self._open

    def _refuse(self, lines_of: dict[int, list[str]]) -> None:
        other = next(rank for rank, lines in lines_of.items() if lines != self._lines)
        own = [line for line in self._lines if line not in lines_of[other]]
        raise ValueError(
            "ranks disagree on what a step does, and would drift apart or wait for each other forever: rank "
            f"{self._rank} has {', '.join(own) or 'fewer param groups'}, and rank {other} has not; give all ranks the "
            "same numbers"
        )


def _has_no_rate(optimizer: Optimizer) -> bool:
    """Whether the learning rates are 0, as in a step that only makes state: torch's checkpoints take such a step."""
    # Perhaps on one rank alone, and with other rates than those of the training in any case.
    rates = [group.get("lr") for group in optimizer.param_groups]
    return bool(rates) and all(
        (isinstance(rate, (int, float)) or (isinstance(rate, torch.Tensor) and not rate.is_cuda)) and float(rate) == 0
        for rate in rates
    )


def _store_at(place: str) -> dist.Store:
    store = default_store()
    if store is None:
        raise RuntimeError("the process group has no store")
    return dist.PrefixStore(place, store)


def _lines(optimizer: Optimizer, has_loss: bool) -> Iterator[str]:
    yield f"{optimizer.control.policy}"
    if optimizer.control.takes_loss:
        # Ranks that have one average theirs, and would wait for the others.
        yield "a loss for step()" if has_loss else "no loss for step()"
    for index, group in enumerate(optimizer.param_groups):
        yield f"group {index} rule={optimizer.rule_of(group).name}"
    for line in described_numbers(optimizer):
        # What ranks that each have a part draw for it may be their own.
        if " seed=" not in line:
            yield line


def _shared(optimizer: Optimizer) -> dict[tuple[int, ...], str]:
    """For the ranks of each mesh, and of DistributedDataParallel, the first of the parameters that they share."""
    # Not only of parameters that have a gradient, which on another rank others may have.
    own = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    sharded = fsdp_module_type()
    modules: list[Any] = living(sharded) if sharded is not None and any(map(is_distributed, own.values())) else []
    wrappers: list[Any] = [one for one in wrappers_around(lambda param: id(param) in own) if kind_of(one) == DDP]
    names: dict[int, str] = {}
    for module in [*modules, *wrappers]:
        for name, param in module.named_parameters():
            # The outermost module has the longest name.
            if id(param) in own and len(name) > len(names.get(id(param), "")):
                names[id(param)] = name
    shared: dict[tuple[int, ...], list[str]] = {}
    ranks_of: dict[Any, tuple[int, ...]] = {}

    def add(ranks: tuple[int, ...], key: int) -> None:
        param = own[key]
        shared.setdefault(ranks, []).append(f"{names.get(key, '')} {tuple(param.shape)} {param.dtype}")

    for key, param in own.items():
        if is_distributed(param):
            mesh = param.device_mesh
            if mesh not in ranks_of:
                ranks_of[mesh] = ()
                if mesh.get_coordinate() is not None:
                    with suppress(RuntimeError):  # made without process groups
                        mesh.get_group(0)
                        ranks_of[mesh] = tuple(sorted(mesh.mesh.flatten().tolist()))
            if ranks_of[mesh]:
                add(ranks_of[mesh], key)
    for wrapper in wrappers:
        ranks = tuple(sorted(dist.get_process_group_ranks(wrapper.process_group)))
        for key in set(map(id, wrapper.parameters())).intersection(own):
            add(ranks, key)
    return {ranks: min(params) for ranks, params in shared.items()}
