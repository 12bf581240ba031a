"""The ranks that share an optimizer: their groups, and which of them is gone when communication fails."""

from __future__ import annotations

import atexit
import json
import logging
import os
import platform
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...compat import default_store
from ...errors import RankError
from ...placement import Ranks

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def ranks_of(mesh: Any) -> Ranks:
    """The ranks of a mesh."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("shard() needs torch.distributed: call torch.distributed.init_process_group() first")
    if mesh is None:
        return _watched(Ranks(dist.group.WORLD, None, rank_monitor()))
    if mesh.ndim not in (1, 2):
        raise ValueError(f"shard() takes a mesh of one or two dimensions, not {mesh.ndim}: slice it, mesh['dp']")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} does not belong to {mesh}; only ranks of the mesh may call shard()")
    if mesh.ndim == 1:
        return _watched(Ranks(mesh.get_group(), None, rank_monitor()))
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
    return _watched(Ranks(mesh.get_group(shard), mesh.get_group(1 - shard), rank_monitor()))


def _watched(ranks: Ranks) -> Ranks:
    """Ranks whose processes the monitor knows from now on; all of them must ask."""
    # Other backends raise an error on the ranks that are left.
    ranks.monitor.watch(ranks.everyone(ranks.monitor.own), logs=ranks.can_be_captured)
    return ranks


PATIENCE = 5.0  # seconds after an error of communication in which the end of a process shows
_LOG = logging.getLogger("tilestep")


class Process(NamedTuple):
    """What one rank tells the others of its process."""

    rank: int
    host: str
    path: str  # of a file that it has locked, and removes when it ends as it should; empty where it cannot
    number: int = 0  # by which its host knows it


class RankMonitor:
    """Finds out which ranks of the default process group are gone; also a block in which communication may fail."""

    # An error of communication says that something is wrong, not where. So each process holds a lock on a file of its
    # own, which the system lets go when the process is gone. A rank that meets an error tries the locks of its host and
    # writes what it finds into the store of the process group, for those of other hosts. NCCL raises no error, it ends
    # the process: there a thread has tried the locks each second, and logs who is gone. It does nothing else, since a
    # thread that waits for a store when the interpreter ends aborts the process.
    # Used as a context manager it raises `RankError` in the place of an error of communication.

    def __init__(self, find_store: Callable[[], Any], rank: int, ranks: int) -> None:
        # Neither group nor store is kept: a store that outlives its group answers the next one on its port with what
        # the last one has left there, addresses too.
        world = dist.group.WORLD
        self._group: Callable[[], Any] = (lambda: None) if world is None else weakref.ref(world)
        self._find_store = find_store
        self._over = threading.Event()
        self._beside: dict[int, Process] = {}
        self._hosts: set[str] = set()
        self._watches_all = False
        self._thread: threading.Thread | None = None
        self.own = Process(rank, platform.node(), "")
        if fcntl is not None and ranks > 1:
            # Where there is no place for such a file only its explanations are lost: ranks train as well.
            with suppress(OSError):
                self._lock(rank)

    def _lock(self, rank: int) -> None:
        folder = os.stat(tempfile.gettempdir())
        descriptor, path = tempfile.mkstemp(prefix=f"tilestep-rank-{rank}-")
        try:
            # Not inherited by processes that this one forks, as the locks of `flock` are.
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
        except OSError:
            os.close(descriptor)
            os.unlink(path)
            raise
        self._descriptor = descriptor
        self.own = Process(rank, f"{self.own.host} {folder.st_dev} {folder.st_ino}", path, os.getpid())
        atexit.register(self.close)

    @property
    def is_current(self) -> bool:
        """Whether its process group is still the default one."""
        return dist.is_initialized() and dist.group.WORLD is self._group()

    @property
    def _store(self) -> Any:
        """Where ranks tell each other who is gone; None where there is none."""
        store = self._find_store() if self.is_current else None
        return None if store is None else dist.PrefixStore("tilestep/ranks", store)

    def close(self) -> None:
        """Look at no other process any more; this one ends as it should."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(2)
        if self.own.path and os.getpid() == self.own.number:
            Path(self.own.path).unlink(missing_ok=True)
            os.close(self._descriptor)
            self.own = Process(self.own.rank, self.own.host, "")
            atexit.unregister(self.close)

    def watch(self, processes: list[Process], *, logs: bool = False) -> None:
        """Know the processes of other ranks; log as soon as one is gone, where communication raises no error."""
        for one in [one for one in processes if one.rank != self.own.rank]:
            if one.host == self.own.host and one.path and os.path.exists(one.path):
                self._beside[one.rank] = one
            else:
                self._hosts.add(one.host)
        if logs and self._thread is None and self._beside:
            self._thread = threading.Thread(target=self._look, name="tilestep ranks", daemon=True)
            self._thread.start()

    def watch_all(self) -> None:
        """Know the processes of all ranks, which must all ask; the first time is communication."""
        if not self._watches_all:
            self._watches_all = True
            processes: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(processes, self.own)
            self.watch(processes)

    def _look(self) -> None:
        while not self._over.wait(min(1.0, PATIENCE / 5)) and self.is_current:
            if absent := [rank for rank, one in list(self._beside.items()) if _is_free(one.path)]:
                _LOG.error("%s. Other ranks will wait for it until their time is over", _gone(absent))
                return

    def _ended_beside(self) -> list[int]:
        return sorted(rank for rank, one in self._beside.items() if _is_free(one.path) or _has_ended(one))

    def missing(self) -> list[int]:
        """The ranks whose process has ended, as the first rank that looked has found: the others may end by now too."""
        until = time.monotonic() + PATIENCE
        while not (absent := self._told() or self._ended_beside()) and time.monotonic() < until:
            time.sleep(PATIENCE / 50)
        if absent and not self._told():
            # Those that are ended together do not end in the same instant.
            time.sleep(0.1)
            absent = self._told() or self._ended_beside()
            with suppress(RuntimeError):  # the store may be what is gone
                if (store := self._store) is not None:
                    store.set("gone", json.dumps(absent))
        return absent

    def _told(self) -> list[int]:
        """What another rank has found."""
        with suppress(RuntimeError):
            if (store := self._store) is not None and store.check(["gone"]):
                return json.loads(store.get("gone"))
        return []

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            self.explain(error)

    def explain(self, error: RuntimeError) -> None:
        """Raise what is known about an error of communication, in its place; nothing for other errors."""
        if not isinstance(error, (RankError, torch.OutOfMemoryError)) and (self._beside or self._hosts):
            raise self.explained(error) from error

    def explained(self, error: BaseException) -> RankError:
        """The error to raise in the place of one of communication."""
        absent = self.missing()
        if absent:
            return RankError(
                f"{_gone(absent)}, and the others cannot go on without: begin again from the last checkpoint "
                f"({_first_line(error)})",
                absent,
            )
        there = "no host says that a process is gone" if self._hosts else "the processes of all ranks are there"
        return RankError(
            f"communication has failed, though {there}: a rank is late, or has met an error of its own "
            f"({_first_line(error)})",
            [],
        )


def _is_free(path: str) -> bool:
    """Whether the process that locked a file is gone, and has not removed it."""
    try:
        with open(path) as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return os.path.exists(path)
    except OSError:
        return False


def _has_ended(process: Process) -> bool:
    """Whether a process removed its file and ended; what tidies up a folder for temporary files removes some too."""
    if os.path.exists(process.path):
        return False
    try:
        os.kill(process.number, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


def _gone(absent: list[int]) -> str:
    listed = ", ".join(map(str, absent))
    return f"rank {listed} is gone: its process has ended" if len(absent) == 1 else f"ranks {listed} are gone"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_current: list[RankMonitor] = []


def rank_monitor() -> RankMonitor:
    """The monitor of the default process group."""
    if not _current or not _current[0].is_current:
        for old in _current:
            old.close()
        _current[:] = [RankMonitor(default_store, dist.get_rank(), dist.get_world_size())]
    return _current[0]
