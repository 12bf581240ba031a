"""Whether ranks that train the same parameters step with the same numbers: compared once, at the first step."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_SETTLED = 3  # at which step a rank has taken the first one of all of its optimizers
_LATER_STEPS = 100  # in how many further steps a rank looks, without waiting, whether the others have stepped since

Shared = Mapping[tuple[int, ...], Sequence[str]]
"""What describes the parameters that ranks share, sorted."""


def compare_ranks(optimizer: Optimizer, *, has_loss: bool, sends: Callable[[], bool]) -> None:
    """Raise on ranks whose groups have other numbers than those of a rank with which they share parameters.

    Optimizers whose steps send something, as `sends` says, must also have their first steps in one order.
    """
    # Later changes are not compared: a rank does not know that another one's have changed, and finding out would be a
    # message at every step.
    control = optimizer.control
    if is_capturing() or fake_mode_is_active():
        return
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not several:
        control.compared = True
        return
    # The numbers of sharded optimizers are compared at every step.
    is_sharded = "shard" in optimizer.attached
    if not is_sharded and _has_no_rate(optimizer):
        return
    comparison, control.comparison = control.comparison, None
    with suppress(RuntimeError):  # the process group has no store, or the process that keeps it has ended
        patience = PATIENCE if comparison is None else 0.0
        if comparison is None:
            # Modules may have meshes of their own, of the same ranks.
            shared = optimizer.schedule.shared() if is_sharded else _shared(optimizer)
            lines = None if is_sharded else list(_lines(optimizer, has_loss))
            comparison = RankComparison(shared, lines, sends=is_sharded or sends())
        if not comparison.is_over(patience):
            control.comparison = comparison
    control.compared = control.comparison is None


class RankComparison:
    """A comparison of what ranks are about to do, through the store in which they have found each other."""

    # No collective: a rank that skips its first step would answer with the next one that it calls, which is another.
    # The store is looked up each time: one that outlives its process group answers the next one on its port.

    def __init__(self, shared: Shared, lines: Sequence[str] | None, *, sends: bool) -> None:
        self._rank, self._looks, self._sends = dist.get_rank(), 0, sends
        self._compares, self._shared = lines is not None, dict(sorted(shared.items()))
        self._open: list[tuple[tuple[int, ...], str, Sequence[str]]] = []
        for ranks, params in self._shared.items():
            self._note(ranks, params)
            # Ranks may step several optimizers in other orders, unless their steps send something. Among those of the
            # same parameters the n-th comparison of each rank is one with the n-th of the others.
            own = ["a step"] if lines is None else [*lines, f"parameters {_digest(params)}"]
            place = f"tilestep/numbers/{len(ranks)}-{_digest([ranks, params[0]])}"
            place = f"{place}/{_store_at(place).add(f'begun by {self._rank}', 1)}"
            store, digest = _store_at(place), _digest(own)
            store.set(str(self._rank), "\n".join(own))
            store.add(digest, 1)
            if store.add("arrived", 1) == len(ranks):
                store.set("equal", str(int(store.add(digest, 0) == len(ranks))))
            self._open.append((ranks, place, own))

    def _note(self, ranks: tuple[int, ...], params: Sequence[str]) -> None:
        """Tell the other ranks that this one steps an optimizer of these parameters."""
        store, own = _store_at(f"tilestep/params/{_digest(ranks)}"), _digest(params)
        store.add(f"{own} on {self._rank}", 1)
        if self._sends:
            store.set(f"{own} sends", str(self._rank))
        if store.add(own, 1) == 1:
            store.set(str(store.add("kinds", 1)), "\n".join([str(self._rank), *params]))

    def is_over(self, patience: float) -> bool:
        """Whether nothing more will be compared; waits at most so many seconds for ranks that have not begun.

        Raises:
            ValueError: if a rank has other lines, or steps optimizers that send something in another order.
        """
        end, pause = time.monotonic() + patience, 0.001
        while not self._answered() and time.monotonic() < end:
            time.sleep(pause)
            pause = min(1.5 * pause, 0.25)
            if pause == 0.25:
                self._look_for_others()
        self._looks += 1
        self._look_for_others()
        return not self._open or self._looks > _LATER_STEPS

    def _answered(self) -> bool:
        for ranks, place, lines in list(self._open):
            store = _store_at(place)
            if not store.check(["equal"]):
                continue
            self._open.remove((ranks, place, lines))
            if store.get("equal") == b"0":
                self._look_at_others(ranks, has_answer=True)
                self._refuse(lines, {rank: store.get(str(rank)).decode().split("\n") for rank in ranks})
        return not self._open

    def _refuse(self, lines: Sequence[str], lines_of: Mapping[int, Sequence[str]]) -> None:
        other = next(rank for rank, theirs in lines_of.items() if theirs != lines)
        own = [line for line in lines if line not in lines_of[other]][:8]
        raise ValueError(
            "ranks disagree on what a step does, and would drift apart or wait for each other forever: rank "
            f"{self._rank} has {', '.join(own) or 'fewer groups or parameters'}, and rank {other} has not; give all "
            "ranks the same numbers and parameters, and step their optimizers in the same order"
        )

    def _look_for_others(self) -> None:
        for ranks, *_ in self._open:
            self._look_at_others(ranks)

    def _look_at_others(self, ranks: tuple[int, ...], *, has_answer: bool = False) -> None:
        """Raise if another rank has begun by another optimizer than this one, and they send something.

        Or if one has some of the parameters, after steps in which ranks may have stepped others first.
        """
        params = self._shared[ranks]
        store, own = _store_at(f"tilestep/params/{_digest(ranks)}"), _digest(params)

        def is_ahead(kind: str, rank: Any, other: Any) -> bool:
            return store.add(f"{kind} on {rank}", 0) > store.add(f"{kind} on {other}", 0)

        for number in range(1, store.add("kinds", 0) + 1):
            rank, *theirs = store.get(str(number)).decode().split("\n")
            kind, shares = _digest(theirs), any(not line.startswith(" ") for line in set(theirs).intersection(params))
            if self._sends and store.check([f"{kind} sends"]):
                sender = store.get(f"{kind} sends").decode()
                if is_ahead(kind, sender, self._rank) and is_ahead(own, self._rank, sender):
                    self._refuse(
                        [f"a step of the optimizer of {params[0]} before that of {theirs[0]}"], {int(sender): []}
                    )
            is_late = has_answer or self._looks >= _SETTLED
            if (
                self._compares
                and shares
                and is_late
                and is_ahead(kind, rank, self._rank)
                and is_ahead(own, self._rank, rank)
            ):
                self._refuse(params, {int(rank): theirs})


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


def _shared(optimizer: Optimizer) -> Shared:
    """For the ranks of each mesh the parameters that they share; for those of DistributedDataParallel the first."""
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
            if ranks_of[mesh] and _is_everywhere(param):
                add(ranks_of[mesh], key)
    split = {ranks: sorted(params) for ranks, params in shared.items()}
    shared.clear()
    for wrapper in wrappers:
        ranks = tuple(sorted(dist.get_process_group_ranks(wrapper.process_group)))
        for key in set(map(id, wrapper.parameters())).intersection(own):
            add(ranks, key)
    # Ranks that have all of the others' parameters may update other ones each, and send them to each other.
    return {ranks: [min(params)] for ranks, params in shared.items()} | split


def _is_everywhere(param: Any) -> bool:
    """Whether every rank has some of a DTensor; where one has nothing, its optimizer may leave it out."""
    cuts = [
        (param.shape[cut.dim], size) for cut, size in zip(param.placements, param.device_mesh.shape) if cut.is_shard()
    ]
    return all(length and -(-length // -(-length // size)) == size for length, size in cuts)


def _digest(of: Sequence[Any]) -> str:
    return f"{zlib.crc32(repr(list(of)).encode()):08x}"
