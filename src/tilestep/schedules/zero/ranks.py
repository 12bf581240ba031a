"""The ranks that share an optimizer: their groups, and which of them is gone when communication fails."""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...compat import default_store
from ...errors import RankError
from ...placement import Ranks


def ranks_of(mesh: Any) -> Ranks:
    """The ranks of a mesh."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("shard() needs torch.distributed: call torch.distributed.init_process_group() first")
    if mesh is None:
        return Ranks(dist.group.WORLD, None, rank_monitor())
    if mesh.ndim not in (1, 2):
        raise ValueError(f"shard() takes a mesh of one or two dimensions, not {mesh.ndim}: slice it, mesh['dp']")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} does not belong to {mesh}; only ranks of the mesh may call shard()")
    if mesh.ndim == 1:
        return Ranks(mesh.get_group(), None, rank_monitor())
    names = mesh.mesh_dim_names or ()
    bare = [name.removeprefix("dp_") for name in names]
    # Without names the second splits.
    sides = [dim for dim, name in enumerate(bare) if name.startswith("shard")]
    sides += [1 - dim for dim, name in enumerate(bare) if name.startswith("replicate")]
    if names and not sides:
        raise ValueError(
            f"which dimension of a mesh {tuple(names)} splits the state and which replicates it? Call them 'shard' and "
            "'replicate'"
        )
    shard = sides[0] if sides else 1
    return Ranks(mesh.get_group(shard), mesh.get_group(1 - shard), rank_monitor())


PATIENCE = 10.0  # seconds that a process has to answer
_LOG = logging.getLogger("tilestep")
_SIGNS = "signs_of_life"


class RankMonitor:
    """Finds out which ranks of the default process group are gone; also a block in which communication may fail."""

    # An error of communication says that something is wrong, not where. So a thread of each process answers roll calls
    # in the store of the process group. A rank that meets an error starts one; ranks that do not answer in time are
    # gone. The first caller keeps its finding for the others: when they meet the error, it may have ended too. NCCL
    # raises no error, it ends the process: there the thread watches the next rank's signs of life, and logs when they
    # stop.
    # Used as a context manager it raises `RankError` in the place of an error of communication.

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._group = dist.group.WORLD
        self._store: Any = None
        self._over = threading.Event()
        if store is not None and ranks > 1:
            # A connection on which nothing else waits. One written in Python lives as long as it is referred to.
            self._connection = store
            with suppress(AttributeError, RuntimeError):  # older stores, and those written in Python, make none
                self._connection = store.clone()
            self._store = dist.PrefixStore("tilestep/roll_call", self._connection)
            self._thread = threading.Thread(target=self._answer, name="tilestep roll call", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    @property
    def is_current(self) -> bool:
        """Whether its process group is still the default one."""
        return dist.is_initialized() and dist.group.WORLD is self._group

    def close(self) -> None:
        """Answer no more."""
        self._over.set()
        self._thread.join(2)

    def _answer(self) -> None:
        number, next_rank = 1, (self.rank + 1) % self.ranks
        last_sign, since, signed = b"", time.monotonic(), 0.0
        try:
            while not self._over.wait(min(1.0, PATIENCE / 5)) and self.is_current:
                if self._store.check([f"call/{number}"]):
                    self._store.set(f"here/{number}/{self.rank}", b"1")
                    number += 1
                if time.monotonic() - signed < PATIENCE:
                    continue
                signed = time.monotonic()
                self._store.set(f"{_SIGNS}/{self.rank}", str(signed))
                if not self._store.check([f"{_SIGNS}/{next_rank}"]):
                    continue
                sign = self._store.get(f"{_SIGNS}/{next_rank}")
                if sign != last_sign:
                    last_sign, since = sign, signed
                elif last_sign and sign != b"ended" and signed - since > 3 * PATIENCE:
                    _LOG.error("%s. Other ranks will wait for it until their time is over", _gone(self.missing()))
                    last_sign = b"ended"
            self._store.set(f"{_SIGNS}/{self.rank}", b"ended")
            atexit.unregister(self.close)
        except Exception:
            # The store is gone, and with it all that could be answered.
            return

    def missing(self) -> list[int]:
        """The ranks that are gone, the same for every rank that asks; none if all of them answer."""
        store = self._store
        last = store.add("verdicts", 0)
        if last and (absent := json.loads(store.get(f"verdict/{last}"))):
            return absent
        number = last + 1
        store.set(f"here/{number}/{self.rank}", b"1")
        if store.add(f"called/{number}", 1) == 1:
            store.set(f"call/{number}", b"1")
            absent = self._count(number)
            store.set(f"verdict/{number}", json.dumps(absent))
            store.add("verdicts", 1)
            return absent
        try:
            store.wait([f"verdict/{number}"], timedelta(seconds=3 * PATIENCE))
            return json.loads(store.get(f"verdict/{number}"))
        except RuntimeError:
            # The rank that has called the roll is gone by now.
            return self._count(number)

    def _count(self, number: int) -> list[int]:
        until = time.monotonic() + PATIENCE
        absent = list(range(self.ranks))
        while absent and time.monotonic() < until:
            time.sleep(PATIENCE / 50)
            absent = [rank for rank in absent if not self._store.check([f"here/{number}/{rank}"])]
        return absent

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            self.explain(error)

    def explain(self, error: RuntimeError) -> None:
        """Raise what is known about an error of communication, in its place; nothing for other errors."""
        if not isinstance(error, (RankError, torch.OutOfMemoryError)) and self._store is not None:
            raise self.explained(error) from error

    def explained(self, error: BaseException) -> RankError:
        """The error to raise in the place of one of communication."""
        try:
            absent = self.missing()
        except RuntimeError:
            return RankError(
                "communication has failed, and the store in which the processes have found each other, kept by rank 0 "
                f"or by what has started it, does not answer either: {_first_line(error)}",
                [],
            )
        if absent:
            return RankError(
                f"{_gone(absent)}, and the others cannot go on without: begin again from the last checkpoint "
                f"({_first_line(error)})",
                absent,
            )
        return RankError(
            f"communication has failed, though the processes of all ranks answer: one of them is late, or has met an "
            f"error of its own ({_first_line(error)})",
            [],
        )


def _gone(absent: list[int]) -> str:
    listed = ", ".join(map(str, absent))
    return f"rank {listed} is gone: its process does not answer" if len(absent) == 1 else f"ranks {listed} are gone"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_current: list[RankMonitor] = []


def rank_monitor() -> RankMonitor:
    """The monitor of the default process group; it begins to answer when it is first asked for."""
    if not _current or not _current[0].is_current:
        _current[:] = [RankMonitor(default_store(), dist.get_rank(), dist.get_world_size())]
    return _current[0]
