"""The ranks that share an optimizer: their groups, and which of them is gone when communication fails."""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...compat import default_store, gather_together
from ...errors import RankError

# Their names until torch 2.12.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_AVERAGED = (torch.bfloat16, torch.float32, torch.float64)
"""Not float16: a small gradient that is divided before it is added up loses bits, or becomes zero."""


_OPERATIONS: tuple[Any, Any] = (dist.ReduceOp.SUM, dist.ReduceOp.AVG) if dist.is_available() else (None, None)
"""Those of sums and of means."""


class Awaited(NamedTuple):
    """Communication that has begun."""

    works: Sequence[Any]
    monitor: RankMonitor | None

    def wait(self) -> None:
        """Let the host, or the current stream of a GPU, wait for it."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            if self.monitor is not None:
                self.monitor.explain(error)
            raise


ARRIVED = Awaited((), None)
"""What runs in the order of the current stream: there is nothing to wait for."""


class Ranks:
    """The process groups of a sharded optimizer, as one rank sees them; sums over them as `Agreement` makes.

    Communication that fails because a rank is gone raises `RankError`.
    """

    def __init__(self, shard: Any, replicate: Any = None) -> None:
        self.shard = shard
        self.replicate = replicate
        self.rank = dist.get_rank(shard)
        self.size = dist.get_world_size(shard)
        self.copies = 1 if replicate is None else dist.get_world_size(replicate)
        self.count = self.size * self.copies
        """All ranks, those that hold copies too."""
        self.monitor = rank_monitor()

    def __deepcopy__(self, memo: Any) -> Ranks:
        # Who copies what ranks have together does not make other ranks; process groups cannot be copied.
        return self

    def apart(self) -> Ranks:
        """The same ranks over groups of their own, in which no other messages come between; all of them call it."""
        made = [
            dist.new_group(dist.get_process_group_ranks(each), use_local_synchronization=True) for each in self.groups
        ]
        return Ranks(*made)

    @property
    def can_be_captured(self) -> bool:
        """Whether what they do together can be a part of a CUDA graph."""
        return all("nccl" in dist.get_backend_config(group) for group in self.groups)

    def can_average(self, flat: torch.Tensor) -> bool:
        """Whether messages bring means as exactly as sums that are divided; then nobody has to divide them.

        NCCL multiplies by 1/N in the type of the tensor before it adds up. That is exact for powers of two alone: in
        bfloat16 a third is wrong by 0.2%.
        """
        powers_of_two = all(number & (number - 1) == 0 for number in (self.size, self.copies))
        return powers_of_two and self.count > 1 and flat.is_cuda and self.can_be_captured and flat.dtype in _AVERAGED

    @property
    def groups(self) -> list[Any]:
        """The groups that together reach all ranks."""
        return [self.shard] if self.copies == 1 else [self.shard, self.replicate]

    def add(self, values: torch.Tensor) -> None:
        """Replace numbers by their sums over the ranks that split the state; copies hold the same sums."""
        self.add_in(self.shard, values)

    def add_in(self, group: Any, values: torch.Tensor, *, mean: bool = False) -> None:
        """Replace numbers by their sums over a group of ranks; by their means where it `can_average` them."""
        try:
            dist.all_reduce(values, _OPERATIONS[mean], group)
        except RuntimeError as error:
            self.monitor.explain(error)
            raise

    def begin_to_add(self, values: torch.Tensor) -> Any:
        """Begin to replace numbers by their sums over the ranks that split the state; gives what to wait for.

        On a GPU it runs in the current stream.
        """
        try:
            work = dist.all_reduce(values, dist.ReduceOp.SUM, self.shard, async_op=not values.is_cuda)
        except RuntimeError as error:
            self.monitor.explain(error)
            raise
        return ARRIVED if work is None else Awaited((work,), self.monitor)

    def largest(self, values: torch.Tensor) -> None:
        """Replace numbers by the largest over these ranks; NaN on one gives NaN on all."""
        missing = values.isnan()
        both = torch.stack([torch.where(missing, -torch.inf, values), missing.to(values.dtype)])
        with self.monitor:
            dist.all_reduce(both, dist.ReduceOp.MAX, self.shard)
        values.copy_(torch.where(both[1] > 0, torch.nan, both[0]))

    def reduce_scatter(self, section: torch.Tensor, flat: torch.Tensor, *, mean: bool = False) -> Any:
        """Begin to sum flat memory up over the ranks that split the state, each receiving its section.

        On a GPU it runs in the current stream: the library's own would only be waited for by ours.
        """
        try:
            work = _reduce_scatter(section, flat, _OPERATIONS[mean], self.shard, async_op=not flat.is_cuda)
        except RuntimeError as error:
            self.monitor.explain(error)
            raise
        return ARRIVED if work is None else Awaited((work,), self.monitor)

    def all_gather(self, flats: Sequence[torch.Tensor], sections: Sequence[torch.Tensor]) -> Any:
        """Begin to give all of these ranks every section; several tensors go in one message, where the backend can."""
        try:
            began, work = gather_together(self.shard, flats, sections) if len(flats) > 1 else (False, None)
            if began:
                return ARRIVED if work is None else Awaited((work,), self.monitor)
            works = [
                _all_gather(flat, section, group=self.shard, async_op=not flat.is_cuda)
                for flat, section in zip(flats, sections)
            ]
        except RuntimeError as error:
            self.monitor.explain(error)
            raise
        works = [work for work in works if work is not None]
        return Awaited(works, self.monitor) if works else ARRIVED

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank what the first one has."""
        with self.monitor:
            for group in self.groups:
                dist.broadcast(tensor, dist.get_global_rank(group, 0), group)

    def send(self, tensor: torch.Tensor, source: int) -> None:
        """Give the ranks that split the state what one of them has."""
        with self.monitor:
            dist.broadcast(tensor, dist.get_global_rank(self.shard, source), self.shard)

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """What each rank that splits the state has; of one shape on all of them."""
        found = [torch.empty_like(values) for _ in range(self.size)]
        with self.monitor:
            dist.all_gather(found, values, self.shard)
        return found

    def leads(self, tensor: Any) -> bool:
        """Whether this is the first of them that holds a piece: no other has it."""
        return True

    def everyone(self, value: Any) -> list[Any]:
        """One object of each rank, on every rank."""
        found = [value]
        for group in self.groups:
            found = [each for part in self._each_of(group, found) for each in part]
        return found

    def each(self, value: Any) -> list[Any]:
        """One object of each rank that splits the state, on each of them."""
        return self._each_of(self.shard, value)

    def _each_of(self, group: Any, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(group)
        with self.monitor:
            dist.all_gather_object(found, value, group)
        return found


class Deciders:
    """All ranks that decide a step together: those that share an optimizer, and those with other parts of the model."""

    def __init__(self, ranks: Ranks, others: Sequence[Any] = ()) -> None:
        self._ranks, self.others = ranks, list(others)
        self._groups = [group for group in (ranks.shard, *self.others) if dist.get_world_size(group) > 1]

    def add(self, values: torch.Tensor) -> None:
        """Replace numbers by their sums over all of them; copies of a part of the state count once."""
        for group in self._groups:
            self._ranks.add_in(group, values)


def ranks_of(mesh: Any) -> Ranks:
    """The ranks of a mesh."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("shard() needs torch.distributed: call torch.distributed.init_process_group() first")
    if mesh is None:
        return Ranks(dist.group.WORLD)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"shard() takes a mesh of one or two dimensions, not {mesh.ndim}: slice it, mesh['dp']")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} does not belong to {mesh}; only ranks of the mesh may call shard()")
    if mesh.ndim == 1:
        return Ranks(mesh.get_group())
    shard = _shard_dimension(mesh.mesh_dim_names)
    return Ranks(mesh.get_group(shard), mesh.get_group(1 - shard))


def _shard_dimension(names: Sequence[str] | None) -> int:
    for dim, name in enumerate(names or ()):
        bare = name.removeprefix("dp_")
        if bare.startswith("shard"):
            return dim
        if bare.startswith("replicate"):
            return 1 - dim
    if names:
        raise ValueError(
            f"which dimension of a mesh {tuple(names)} splits the state and which replicates it? Call them 'shard' and "
            "'replicate'"
        )
    return 1


PATIENCE = 10.0
"""Seconds that a process has to answer."""

_LOG = logging.getLogger("tilestep")
_SIGNS = "signs_of_life"


class RankMonitor:
    """Finds out which ranks of the default process group are gone; also a block in which communication may fail.

    An error of communication says that something is wrong, not where. So a thread of each process answers roll calls
    in the store of the process group. A rank that meets an error starts one; ranks that do not answer in time are gone.
    The first caller keeps its finding for the others: when they meet the error, it may have ended too. NCCL raises no
    error, it ends the process: there the thread watches the next rank's signs of life, and logs when they stop.

    Used as a context manager it raises `RankError` in the place of an error of communication.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._group = dist.group.WORLD
        self._store: Any = None
        self._over = threading.Event()
        if store is not None and ranks > 1:
            # One written in Python lives as long as somebody refers to it.
            self._connection = _own_connection(store)
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
        asked, next_rank = 1, (self.rank + 1) % self.ranks
        known, since, signed = b"", time.monotonic(), 0.0
        try:
            while not self._over.wait(min(1.0, PATIENCE / 5)) and self.is_current:
                if self._store.check([f"call/{asked}"]):
                    self._store.set(f"here/{asked}/{self.rank}", b"1")
                    asked += 1
                if time.monotonic() - signed < PATIENCE:
                    continue
                signed = time.monotonic()
                self._store.set(f"{_SIGNS}/{self.rank}", str(signed))
                if not self._store.check([f"{_SIGNS}/{next_rank}"]):
                    continue
                sign = self._store.get(f"{_SIGNS}/{next_rank}")
                if sign != known:
                    known, since = sign, signed
                elif known and sign != b"ended" and signed - since > 3 * PATIENCE:
                    _LOG.error("%s. Other ranks will wait for it until their time is over", _gone(self.missing()))
                    known = b"ended"
            self._store.set(f"{_SIGNS}/{self.rank}", b"ended")
            atexit.unregister(self.close)
        except Exception:
            # Nobody is left to be answered: the store is gone.
            return

    def missing(self) -> list[int]:
        """The ranks that are gone, the same for every rank that asks; none if all of them answer."""
        store = self._store
        last = store.add("verdicts", 0)
        if last and (found := json.loads(store.get(f"verdict/{last}"))):
            return found
        number = last + 1
        store.set(f"here/{number}/{self.rank}", b"1")
        if store.add(f"called/{number}", 1) == 1:
            store.set(f"call/{number}", b"1")
            found = self._count(number)
            store.set(f"verdict/{number}", json.dumps(found))
            store.add("verdicts", 1)
            return found
        try:
            store.wait([f"verdict/{number}"], timedelta(seconds=3 * PATIENCE))
            return json.loads(store.get(f"verdict/{number}"))
        except RuntimeError:
            # Who has called the roll is gone by now.
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


def _own_connection(store: Any) -> Any:
    """A connection to a store on which nobody else is waiting, where the store can make one."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError):
        # Older ones, and stores written in Python.
        return store


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
