"""The ranks that share an optimizer: which of them is gone when communication fails, and what all must agree on."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import logging
import os
import platform
import tempfile
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ...combinations import kind_of, refuse, split_kind, wrappers_around
from ...compat import default_store
from ...errors import RankError, first_line
from ...graph import Graph, ancestors
from ...optimizer import Optimizer
from ...optimizer.build import graph_of
from ...optimizer.groups import GROUP_OPTIONS, about_group, deciding_keys, described_numbers, plain_value
from ...optimizer.parameters import iter_params
from ...placement import Ranks, is_distributed
from .buckets import Options, loses_bits, memory_order

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def ranks_of(mesh: Any) -> Ranks:
    """The ranks of a mesh, whose processes the monitor knows from now on; all of them must ask."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("shard() needs torch.distributed: call torch.distributed.init_process_group() first")
    shard, replicate = (dist.group.WORLD, None) if mesh is None else _groups_of(mesh)
    ranks = Ranks(shard, replicate, rank_monitor())
    # Other backends raise an error on the ranks that are left.
    processes = ranks.gather_objects(ranks.monitor.own)
    ranks.monitor.watch(processes, logs=ranks.can_be_captured)
    ranks.members = tuple(sorted(one.rank for one in processes))
    return ranks


def _groups_of(mesh: Any) -> tuple[Any, Any]:
    """The group of a mesh that splits the state, and the one that replicates it, if there is one."""
    if mesh.ndim not in (1, 2):
        raise ValueError(f"shard() takes a mesh of one or two dimensions, not {mesh.ndim}: slice it, mesh['dp']")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} does not belong to {mesh}; only ranks of the mesh may call shard()")
    if mesh.ndim == 1:
        return mesh.get_group(), None
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
    return mesh.get_group(shard), mesh.get_group(1 - shard)


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
    # the process: there a thread tries the locks each second, and logs who is gone. It does nothing else, since a
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
        """Where ranks tell each other which ranks are gone; None if the group has no store."""
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
        """The ranks that another rank has noted as gone."""
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
                f"({first_line(error)})",
                absent,
            )
        there = "no host says that a process is gone" if self._hosts else "the processes of all ranks are there"
        return RankError(
            f"communication has failed, though {there}: a rank is late, or has met an error of its own "
            f"({first_line(error)})",
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


_current: list[RankMonitor] = []


def rank_monitor() -> RankMonitor:
    """The monitor of the default process group."""
    if not _current or not _current[0].is_current:
        for old in _current:
            old.close()
        _current[:] = [RankMonitor(default_store, dist.get_rank(), dist.get_world_size())]
    return _current[0]


Result = TypeVar("Result")

_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules of models that have a sharded optimizer


def validate_locally(optimizer: Optimizer, model: nn.Module, options: Options) -> dict[Any, str]:
    """What a rank can see by itself."""
    options.check()
    for index, group in enumerate(optimizer.param_groups):
        about_group(index, partial(options.check_group, group))
        if any(loses_bits(param.dtype, options.sync_dtypes(group)[1]) for param in group["params"]):
            refuse("shard with narrower parameters", optimizer.attached)
    for name, module in model.named_modules():
        refuse("shard", [kind_of(module)], f"module {name!r}" if name else "the model")
    names: dict[Any, str] = {param: name for name, param in model.named_parameters()}
    groups = {param: index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    if not groups:
        raise ValueError("the optimizer has no parameters to shard")
    for wrapper in wrappers_around(lambda param: param in groups):
        refuse("shard", [kind_of(wrapper)], "what the model is wrapped in")
    for param, index in groups.items():
        refuse("shard", [split_kind(param)], "what parameters of the optimizer are wrapped in")
        if param not in names:
            raise ValueError(f"a parameter of shape {tuple(param.shape)} in group {index} is not one of the model's")
        if is_distributed(param):
            raise ValueError(f"{names[param]} is a DTensor already: shard() takes plain parameters")
        if param.is_meta:
            raise ValueError(f"{names[param]} is on the meta device: give it memory and values first")
    devices = {param.device: names[param] for param in groups}
    if len(devices) > 1:
        described = " and ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"shard() takes parameters on one device for each rank, not {described}")
    return {param: name for param, name in names.items() if param in groups}


def attempt_together(
    ranks: Ranks, attempt: Callable[[], Result], failure: str = "be sharded", raises: type[Exception] = ValueError
) -> Result:
    """What an attempt gives on this rank if it succeeds on all of them: else they all raise."""
    error: Exception | None = None
    try:
        result = attempt()
    except Exception as own:
        error = own
    errors = ranks.gather_objects("" if error is None else str(error) or type(error).__name__)
    if error is not None:
        raise error
    for rank, text in enumerate(errors):
        if text:
            raise raises(f"rank {rank} cannot {failure}: {text}")
    return result


def validate_across_ranks(
    optimizer: Optimizer, model: nn.Module, ranks: Ranks, options: Options, also: Callable[[], Iterable[str]] = tuple
) -> dict[Any, str]:
    """`validate_locally`, with its errors raised on every rank; and the first thing in which ranks differ."""

    def described() -> tuple[dict[Any, str], list[str]]:
        names = validate_locally(optimizer, model, options)
        return names, [*_described(optimizer, model, names, ranks, options), *also()]

    names, lines = attempt_together(ranks, described)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(ranks.gather_objects(digest))) > 1:
        raise ValueError(first_difference(ranks.gather_objects(lines)))
    return names


def first_difference(lines_of: Sequence[Sequence[str]]) -> str:
    """The first line in which two ranks differ."""
    for lines in itertools.zip_longest(*lines_of, fillvalue="nothing more"):
        other = next((rank for rank, line in enumerate(lines) if line != lines[0]), None)
        if other is not None:
            return (
                f"ranks disagree, and would wait for each other forever: rank 0 has {lines[0]}; rank {other} has "
                f"{lines[other]}"
            )
    return "ranks disagree"


def _described(
    optimizer: Optimizer, model: nn.Module, names: dict[Any, str], ranks: Ranks, options: Options
) -> Iterator[str]:
    """What must be the same on all ranks, one line for each."""
    yield f"{ranks.size} ranks that split the state and {ranks.copies} copies"
    for name, value in vars(options).items():
        yield f"{name}={value}"
    yield f"{optimizer.control.policy}"
    groups = {param: index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    for param, name in names.items():
        trains = "trains" if param.requires_grad else "frozen"
        yield (
            f"parameter {name} {tuple(param.shape)} {param.dtype} on {param.device.type} in group {groups[param]}, "
            f"{trains}, in memory by dimensions {memory_order(param)}"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor not in names:
            described = f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device.type}"
            yield f"beside the optimizer's parameters {described}"
    for index, group in enumerate(optimizer.param_groups):
        rule = optimizer.rule_of(group)
        yield f"group {index} rule={rule.name}"
        for key in sorted({*group, *GROUP_OPTIONS}, key=str):
            if key not in ("params", "param_names", "rule"):
                yield f"group {index} {key}={plain_value(group.get(key, GROUP_OPTIONS.get(key)))}"
        shapes = dict.fromkeys(param.shape for param in group["params"])
        for graph in {id(graph): graph for graph in (graph_of(rule, group, shape) for shape in shapes)}.values():
            yield from (f"in group {index} rule {rule.name} with {step}" for step in _steps(graph))


def _steps(graph: Graph) -> Iterator[str]:
    """What a rule computes: rules of one name, and functions of the step, may differ in numbers inside of them."""
    places: dict[int, int] = {}
    for value in (*graph.values(), *ancestors(guard.condition for guard in graph.guards)):
        if id(value) in places:
            continue
        places[id(value)] = len(places)
        operands = [f"[{places[id(operand)]}]" for operand in value.args]
        if value.attribute is not None:
            operands.append(repr(value.attribute))
        over = "" if value.over is None else f" over {value.over}"
        yield f"[{places[id(value)]}] = {value.operation}({', '.join(operands)}){over}"
    yield ", ".join(f"new {name} [{places[id(value)]}]" for name, value in graph.outputs.items())


def apart_from_others(ranks: Ranks, model: nn.Module) -> Ranks:
    """The ranks, over groups of their own if another optimizer is sharded that has parameters of the same modules."""
    # One backward completes buckets of both, which may come in other orders on other ranks.
    modules = set(model.modules())
    is_first = _models.isdisjoint(modules)
    _models.update(modules)
    return ranks if is_first else ranks.apart()


_BITS = 11  # of each part of a digest: as float32 numbers, sums of thousands of them are exact
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


class _Received(NamedTuple):
    """The sums of all ranks' digests, which may be on their way to the host."""

    expected: list[float]
    values: torch.Tensor
    event: torch.cuda.Event | None


class HyperparameterDigest:
    """Finds out whether ranks step with other hyperparameters than each other: a scheduler may run on one alone."""

    # Each rank adds the parts of its digest to numbers that are summed over the ranks for every step. If no rank
    # differs the sums are the rank's own parts times the number of ranks; if one does, no rank finds them so. On a CPU
    # that is known before the step. The host of a GPU does not wait for it: it is known before the next step, but for
    # what makes ranks send other messages, a clip that one of them does not have or a parameter that one of them has
    # frozen, for which it waits when that changes.

    PARTS = 3

    def __init__(self, optimizer: Callable[[], Optimizer | None], ranks: Ranks) -> None:
        self._optimizer, self._ranks = optimizer, ranks
        self._values: Any = None
        self._parts = [0.0] * self.PARTS
        self._written: list[float] = []
        self._expected: list[float] = []
        self._received: deque[_Received] = deque()
        self.trains = self._trained = b""  # which parameters train
        self._shape: Any = None  # what decides which messages a step sends
        self._keys: dict[Any, tuple[str, ...]] = {}

    def reset(self) -> None:
        """The numbers that are summed are others, and have no digest yet."""
        self._written = []

    def write(self, parts: torch.Tensor) -> None:
        """Put this rank's digest into numbers that are going to be summed; the last ones stay there."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        values: list[Any] = []
        for group in optimizer.param_groups:
            name = group.get("rule")
            keys = self._keys.get(name)
            if keys is None:
                keys = self._keys[name] = deciding_keys(optimizer.rule_of(group))
            # One by one: a list in which one was replaced is the same list.
            settings = map(group.get, keys)
            values.append(
                [one for value in settings for one in (value if isinstance(value, (tuple, list)) else (value,))]
            )
            if not _TENSORS.isdisjoint(map(type, values[-1])):
                # One that has been written to is the same tensor.
                self._values = None
        if values != self._values or self.trains != self._trained:
            self._values, self._trained = values, self.trains
            digest = zlib.crc32(repr([*described_numbers(optimizer), self.trains]).encode())
            self._parts = [float(digest >> place & (1 << _BITS) - 1) for place in range(0, 32, _BITS)]
        if self._parts != self._written:
            self._written = self._parts
            self._expected = [part * self._ranks.count for part in self._parts]
            for part, value in zip(parts.unbind(), self._parts):
                part.fill_(value)

    def receive(self, sums: torch.Tensor) -> None:
        """Have the sums come to the host."""
        if not sums.is_cuda:
            self._received.append(_Received(self._expected, sums.clone(), None))
            return
        values = torch.empty(self.PARTS, dtype=torch.float32, device="cpu", pin_memory=True)
        values.copy_(sums, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._received.append(_Received(self._expected, values, event))

    def check(self) -> None:
        """Raise on all ranks if they differ; before a step."""
        if not self._received:
            return
        waits = self._received[-1].event is None
        if not waits:
            optimizer = self._optimizer()
            unclipped = [group.get("max_grad_norm") is None for group in optimizer.param_groups] if optimizer else None
            shape = unclipped, self.trains
            waits, self._shape = shape != self._shape, shape
        while self._received and (waits or len(self._received) > 1):
            expected, values, event = self._received.popleft()
            if event is not None:
                event.synchronize()
            if values.tolist() != expected:
                self._received.clear()
                raise ValueError(self._difference(known_now=event is None))

    def _difference(self, *, known_now: bool) -> str:
        optimizer = self._optimizer()
        assert optimizer is not None
        lines = list(described_numbers(optimizer))
        params = [(label, param) for label, *_, param in iter_params(optimizer)]
        trains = [f"{label} {'trains' if param.requires_grad else 'frozen'}" for label, param in params]
        if known_now:
            return f"{first_difference(self._ranks.gather_objects(lines + trains))}; nothing was updated"
        lines += [line for line in trains if line.endswith(" frozen")]
        return (
            "ranks step with other hyperparameters or frozen parameters than each other, for a step or two by now: a "
            f"scheduler, or a clip, that one rank alone has changed; rank {self._ranks.rank} has {', '.join(lines)}"
        )
