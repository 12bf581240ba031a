"""The execution of a sharded optimizer: reduces gradients, updates this rank's sections, gathers parameters."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from ...compat import copy_all, is_capturing, zero_all
from ...errors import GradientError
from ...native import build
from ...native.table import SAME, Table, Writes
from ...optimizer import Optimizer
from ...optimizer.execution import Execution
from ...optimizer.graphs import prepare_capture, require_no_waits
from ...optimizer.parameters import evaluation_error, require_listed_once
from ...placement import PeerMemory
from ...placement.combinations import refuse_replaced
from ...runtime.capturing import PREPARE, require
from ...timeline.guards import Publication, guard_look_ups
from ...timeline.side_stream import SideStream, Ticket
from ...timeline.timeline import (
    NONE,
    TAKEN,
    Row,
    Timeline,
    gradientless,
    refuse_another_taker,
    refuse_taken_by_another,
)
from .buckets import Bucket, Options, allocate
from .checkpoint import sharded_states
from .core import Sharding
from .ranks import StepMessage, attempt_together, validate_across_ranks


class GradientBucket:
    """The gradients of a bucket, and their reduction."""

    def __init__(self, bucket: Bucket, memory: torch.Tensor | None, options: Options) -> None:
        self.bucket, self._average = bucket, options.average
        self.flat, self.views = memory, [] if memory is None else bucket.views_of(memory)
        self.own_section = None if memory is None else memory[bucket.own]
        """The destination of reductions in permanent memory; None if memory is allocated for each round."""
        # Bytearrays are filled in place: an allocation after a backward makes the allocator consolidate the memory that
        # backward has freed. Assigning from `bytes` would make a copy.
        self.filled = bytearray(len(bucket.params))  # 1 for a parameter whose gradient on this rank is in the bucket
        self.none, self._all = bytearray(len(self.filled)), bytearray(b"\1" * len(self.filled))
        self.section: torch.Tensor | None = None  # this rank's section of the reduced gradients
        self.was_summed = False  # whether the bucket was reduced since the last step, also if the result was dropped
        self.carried: torch.Tensor | None = None  # the sum of earlier rounds since the last step
        self.work: Any = None
        like = torch.empty(0, dtype=bucket.grad_dtype, device=bucket.flat.device)
        self.is_averaged = options.average and bucket.ranks.can_average(like)
        """Whether the reduce-scatter returns means instead of sums."""
        self.is_agreed = bucket.trains  # whether the bucket trains, as all ranks have agreed
        self.excluded = False  # whether this rank has sent zeros, since it has frozen the bucket
        self.keeps = False  # whether gradients of an unfrozen bucket wait until all ranks have agreed
        self.accumulates_in_place = bucket.grad_dtype == bucket.flat.dtype
        """Whether parameters keep gradients that are views of the bucket, into which backward accumulates."""

    def open(self) -> None:
        """Begin a round; carry the reduced gradients of earlier rounds over."""
        if self.section is not None:
            # With permanent memory, new gradients would overwrite the section.
            self.carried, self.section = self.section if self.own_section is None else self.section.clone(), None
        if self.is_agreed:
            self.filled[:] = self.none

    def collect(self, *, ends: bool = False) -> None:
        """Copy gradients into the bucket; unless the round `ends`, backward accumulates into the bucket's views."""
        # Call this and `reduce` under `torch.no_grad`.
        params, filled, keeps = self.bucket.params, self.filled, self.accumulates_in_place and not ends
        gradients: list[Any] = [param.grad for param in params]
        if 1 not in filled and all(map(operator.is_not, gradients, itertools.repeat(None))):
            views = self.views or self._memory_views()
            copy_all(views, gradients)
            for param, view in zip(params, views):
                param.grad = view if keeps else None
            filled[:] = self._all
            return
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        views = self.views
        for place, (param, gradient) in enumerate(zip(params, gradients)):
            if gradient is None:
                # The parameter had no gradient, or its gradient was moved into the bucket.
                filled[place] &= not self.accumulates_in_place
                continue
            views = views or self._memory_views()
            view = views[place]
            if gradient is not view:
                if filled[place] and not self.accumulates_in_place:
                    view.add_(gradient)
                else:
                    # Backward or the user replaced the view: the new gradient is the full gradient.
                    copied.append((view, gradient))
                filled[place] = 1
            param.grad = view if keeps else None
        copy_all([view for view, _ in copied], [gradient for _, gradient in copied])

    def _memory_views(self) -> list[torch.Tensor]:
        if self.flat is None:
            self.flat = self.bucket.flat.new_empty(self.bucket.layout.numel, dtype=self.bucket.grad_dtype)
            self.views = self.bucket.views_of(self.flat)
        return self.views

    def reduce(self, channel: SideStream, *, trains: bool) -> None:
        """Begin the reduce-scatter, with zeros for parameters without gradients, all zeros if frozen on this rank."""
        bucket, section = self.bucket, self.own_section if trains else None
        if trains:
            self.collect(ends=True)
            if 0 in self.filled:
                zero_all([view for view, is_there in zip(self._memory_views(), self.filled) if not is_there])
            flat: Any = self.flat
        else:
            flat = bucket.flat.new_zeros(bucket.layout.numel, dtype=bucket.grad_dtype)
        self.was_summed, self.excluded = True, not trains
        # Without permanent memory, the bucket is freed after the reduction.
        self.section = flat.new_empty(bucket.layout.section) if section is None else section
        with channel.after_compute(*((flat, self.section) if section is None else ()), self.carried):
            self.work = bucket.ranks.reduce_scatter(self.section, flat, mean=self.is_averaged)
            if channel.in_order:
                self.arrive()
        if trains and self.own_section is None:
            self.flat, self.views = None, []

    def arrive(self) -> None:
        """Wait for the reduce-scatter; all-reduce over copies, and average."""
        # The same order on every rank: replicas exchange sections here.
        if self.work is not None:
            self.work.wait()
        self.work, section, ranks = None, self.section, self.bucket.ranks
        assert section is not None
        if ranks.copies > 1:
            ranks.add_copies(section, mean=self.is_averaged)
        if self._average and not self.is_averaged and ranks.count > 1:
            section.div_(ranks.count)
        if self.carried is not None:
            section.add_(self.carried)
            self.carried = None


class ReduceScatter(Row):
    """Reduces gradients over the ranks during backward, bucket by bucket, in the same order on every rank."""

    # A round reduces every bucket once. A backward outside `no_sync` is a round, and ends it; `finish` begins another
    # if there was none since the last step, or if gradients were accumulated since. So ranks agree on the number of
    # rounds without communication, whichever parameters each rank uses. At the step ranks agree on which buckets train:
    # until then a rank sends zeros for a bucket that it has frozen, and keeps the gradients of a bucket that it has
    # unfrozen.

    choice = "shard"
    taken_by = (
        "shard() has reduced it over the ranks in backward: set max_grad_norm on the optimizer, which clips inside "
        "the step, or call the optimizer's clip_grad_norm_()"
    )

    def __init__(self, sharding: Sharding, channel: SideStream, message: StepMessage) -> None:
        self.message, self._sharding, self.channel = message, sharding, channel
        self.eager = sharding.options.overlap_grad_sync
        self.timeline = Timeline(self, channel)
        self.sums: list[GradientBucket] = []
        self._next = 0  # the next bucket to reduce in this round
        self._rounds = 0  # the number of rounds since the last step
        self.summed_in_graph = False  # whether the last round is a part of a CUDA graph under capture
        self._sections: list[torch.Tensor | None] = []  # the sections from which pieces last took their gradients
        self.has_gradient, self.assigned_trains = tuple[bool, ...](), b""
        """For each parameter whether it had a gradient then, and whether it trained."""
        self.unmoved = False  # whether pieces and their gradients are those of the last step, without writes since
        self.add_buckets(sharding.buckets)
        self.timeline.announce(sharding.model)

    def add_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Reduce the gradients of new buckets too; no gradients may be pending."""
        options, device = self._sharding.options, self._sharding.device
        kept = [bucket for bucket in buckets if bucket.trains and options.grad_buffer == "contiguous"]
        sizes, dtypes = [bucket.layout.numel for bucket in kept], [bucket.grad_dtype for bucket in kept]
        memory = dict(zip(kept, allocate(sizes, dtypes, device)))
        self.channel.keep(*memory.values())
        self.sums += [GradientBucket(bucket, memory.get(bucket), options) for bucket in buckets]
        for sums in self.sums:
            sums.is_agreed = sums.bucket.trains
        timeline = self.timeline
        timeline.count(sums.bucket.params for sums in self.sums)
        timeline.is_alone = False
        # Made once: the first allocation of a kilobyte after a backward makes the allocator consolidate freed memory.
        self._all_have, self._all_taken = (True,) * len(timeline.params), bytearray([TAKEN]) * len(timeline.params)
        self.message.reset(timeline.params, device)
        self.trains = self.message.trains  # which parameters train, as all ranks have agreed

    def begin(self) -> Set[int]:
        """Open every bucket for a new round."""
        if self.channel.in_order or any(sums.work is not None for sums in self.sums):
            self._await_all()
        for sums in self.sums:
            sums.open()
        self._next = 0
        return NONE

    def again(self, bucket: int, param: torch.Tensor) -> bool:
        """False: a bucket is not reduced twice in a round; `ready` begins another round if it must."""
        return False

    def ready(self, bucket: int) -> None:
        """Reduce a bucket whose gradients are complete, if it is the next bucket, and complete buckets after it."""
        sums, timeline = self.sums[bucket], self.timeline
        if sums.section is not None:
            # The bucket was reduced already: activation checkpoints that are recomputed separately share parameters.
            timeline.restart_round(bucket)
        reduces = timeline.when == "ready"
        if not reduces or self._next != bucket:
            sums.collect()
        if reduces:
            self._reduce()

    def collect(self) -> None:
        """Accumulate gradients into buckets of a wider dtype, before the next pass adds in the parameter's dtype."""
        for sums in self.sums:
            if not sums.accumulates_in_place:
                sums.collect()

    def _reduce(self, *, all_of_them: bool = False) -> None:
        """Reduce the next buckets, up to the first bucket that waits for gradients."""
        buckets = self.timeline.buckets
        while self._next < len(buckets) and (all_of_them or 1 not in buckets[self._next].places):
            sums, trains = self.sums[self._next], 1 in buckets[self._next].trains
            self._next += 1
            if sums.is_agreed:
                sums.reduce(self.channel, trains=trains)
            elif trains:
                sums.collect()
                sums.keeps = True

    def end(self) -> None:
        """Reduce the remaining buckets, and end the round."""
        timeline = self.timeline
        if self._next < len(self.sums):
            self._reduce(all_of_them=True)
        if not any(0 in sums.filled for sums in self.sums):
            timeline.taken[:] = self._all_taken
        else:
            for sums, awaited in zip(self.sums, timeline.buckets):
                for place, is_there in enumerate(sums.filled, awaited.first):
                    timeline.taken[place] |= is_there
        self.message.is_due = self._sharding.ranks.count > 1
        timeline.end()
        self._rounds += 1
        self.summed_in_graph = is_capturing()

    def _await_all(self) -> None:
        for sums in self.sums:
            if sums.work is not None:
                sums.arrive()
        if self.channel.in_order:
            self.channel.join()

    def finish(self, captures: bool) -> int:
        """Complete all reductions, and set the gradients of this rank's pieces. Call it under `torch.no_grad`.

        Returns the sum of the parameters' versions.
        """
        timeline, message = self.timeline, self.message
        if not timeline.is_alone:
            refuse_another_taker(timeline)
        versions, has_gradients, trains = timeline.survey(timeline.params)
        begins = not timeline.is_open and (not self._rounds or (has_gradients and self._set_by_hand()))
        if begins:
            self.begin()
        if begins or timeline.is_open:
            timeline.note_trains()
            self.end()
        if message.is_due or self._sharding.ranks.count == 1:
            message.trains = self._with_kept(trains) if any(sums.keeps for sums in self.sums) else trains
        if message.is_due:
            message.send(timeline.taken, self.channel, captures=captures)
        if not captures and self._sharding.ranks.count > 1:
            try:
                message.check()
            except ValueError:
                message.is_due = True  # the next `finish` checks again, on all ranks
                raise
        self._await_all()
        has_gradient = self._all_have if 0 not in timeline.taken else self._had_gradients()
        if message.trains != self.trains:
            self._follow_trains()
        sections = [sums.section for sums in self.sums]
        known = (self.has_gradient, self.assigned_trains) == (has_gradient, trains)
        if not known or not all(map(operator.is_, self._sections, sections)):
            self._assign_gradients(sections, has_gradient, trains)
        return versions

    def _assign_gradients(
        self, sections: list[torch.Tensor | None], has_gradient: tuple[bool, ...], trains: bytes
    ) -> None:
        timeline, member_of = self.timeline, self._sharding.member_of
        refuse_taken_by_another([one for one, has_grad in zip(timeline.params, has_gradient) if not has_grad], timeline)
        section_of = {sums.bucket: sums.section for sums in self.sums}
        members = [member_of[param] for param in timeline.params]
        for member, has_grad, is_trained in zip(members, has_gradient, trains):
            has_any = has_grad or member.param.grad is not None
            if has_any and not is_trained and section_of[member.bucket] is None:
                raise GradientError(
                    f"{member.name} has a gradient and is frozen with its whole bucket, so its gradient was not "
                    "reduced over the ranks: freeze parameters after step() or after a backward outside no_sync(), or "
                    "set their .grad to None"
                )
        self._sections, self.has_gradient, self.assigned_trains, self.unmoved = sections, has_gradient, trains, False
        for member, has_grad, is_trained in zip(members, has_gradient, trains):
            member.take_gradient(section_of[member.bucket] if has_grad else None, bool(is_trained))

    def _with_kept(self, trains: bytes) -> bytes:
        """Which parameters train, or trained when their bucket kept gradients."""
        kept = b"".join(bytes([sums.keeps]) * len(sums.filled) for sums in self.sums)
        return bytes(one | (has & was) for one, has, was in zip(trains, kept, self._trained()))

    def _trained(self) -> bytes:
        return self.timeline.trained or bytes(len(self.timeline.params))

    def _follow_trains(self) -> None:
        """Follow a change of the agreed set of training buckets: reduce kept gradients of unfrozen buckets."""
        self.trains = self.message.trains
        for sums, awaited in zip(self.sums, self.timeline.buckets):
            if sums.excluded:
                sums.section = None
            begins, sums.keeps = not sums.is_agreed, False
            sums.is_agreed = 1 in self.trains[awaited.first : awaited.first + len(awaited.params)]
            if begins and sums.is_agreed:
                sums.reduce(self.channel, trains=True)
        self._await_all()

    def _set_by_hand(self) -> bool:
        """Whether gradients were set by hand since the last round."""
        given = (sums.bucket.params for sums in self.sums if sums.bucket.trains and not sums.keeps)
        return any(param.grad is not None for params in given for param in params)

    def _had_gradients(self) -> tuple[bool, ...]:
        """For each parameter whether any rank had a gradient."""
        # The host reads device memory only if this rank lacks a gradient of a parameter that trains, or has trained
        # since the last step: another rank may have it.
        had, params = list(map(bool, self.timeline.taken)), self.timeline.params
        unsure = [
            place
            for place, (has_grad, trained) in enumerate(zip(had, self._trained()))
            if not has_grad and (trained or params[place].requires_grad)
        ]
        if unsure and self._sharding.ranks.count > 1:
            require(not is_capturing(), "a parameter has no gradient on this rank but may have on another rank")
            counts = self.message.sums[self.message.PARTS :].tolist()  # per parameter: ranks that have a gradient
            for place in unsure:
                had[place] = counts[place] > 0
        return tuple(had)

    @gradientless
    def reset(self) -> None:
        """Drop all gradients, including pending reductions."""
        if self.timeline.when == "ready":
            # A backward pass was interrupted; other ranks may have reduced more of this round.
            self.end()
        self._await_all()
        rounds, summed = self._rounds, [(sums.was_summed, sums.keeps) for sums in self.sums]
        self.forget()
        # A rank that drops its gradients alone must not start a round that the other ranks have finished; it still
        # joins their all-gathers.
        self._rounds = rounds
        for sums, (was_summed, keeps) in zip(self.sums, summed):
            sums.was_summed, sums.keeps = was_summed, keeps
            for param in sums.bucket.params:
                param.grad = None

    def forget(self) -> None:
        """After a step: drop all gradients, and begin to count rounds anew."""
        for sums in self.sums:
            sums.section = sums.carried = None
            sums.was_summed = sums.excluded = sums.keeps = False
            sums.filled[:] = sums.none
            if sums.own_section is None:
                sums.flat, sums.views = None, []
        self._rounds = self._next = 0
        self.summed_in_graph = False
        self.timeline.forget()


_NOTHING = nullcontext()


class GatherGroup(Ticket):
    """Buckets that are all-gathered together, since a call for each would cost the host more time than the network."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        super().__init__()
        self.buckets = list(buckets)
        self._chosen: list[Bucket] = []
        self.sent: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None
        """The tensors of the all-gather, whole buckets and this rank's sections, if none is converted."""
        self.peers: PeerMemory | None = None  # the peer memory of the buckets, if sections are fetched
        self.peer_sections: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Pairs of destination on this rank and source in the other rank's memory, if sections are fetched."""

    def choose(self, updated: Sequence[Bucket]) -> bool:
        """Choose the buckets to gather; returns whether there are any, the same on every rank."""
        self._chosen = [bucket for bucket in self.buckets if bucket in updated]
        plain = bool(self._chosen) and all(bucket.sync_dtype == bucket.flat.dtype for bucket in self._chosen)
        self.sent = self.send() if plain else None
        self.peer_sections = [pair for bucket in self._chosen for pair in bucket.peer_sections()] if plain else []
        self.peers = self._chosen[0].peers if self.peer_sections else None
        return bool(self._chosen)

    def send(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """The tensors of the all-gather: whole buckets, and this rank's sections."""
        wholes, sections = zip(*map(Bucket.sent, self._chosen))
        return wholes, sections

    def arrive(self, wholes: Sequence[torch.Tensor], works: Sequence[Any]) -> None:
        """Wait for the all-gather, and convert parameters that were sent in another dtype."""
        for work in works:
            if work is not None:
                work.wait()
        for bucket, whole in zip(self._chosen, wholes):
            if whole.dtype != bucket.flat.dtype and whole.is_floating_point():
                bucket.flat.copy_(whole)


PARTS = 6  # a group has about 1/6 of all bytes at most, so that most groups are gathered while forward runs


def group_buckets(buckets: Sequence[Bucket], together: bool) -> list[list[Bucket]]:
    """Join buckets, in the order of forward, into groups of as many bytes as all groups before, up to a limit."""
    # The first module still waits for a single bucket, and the number of calls grows with the logarithm of the number
    # of buckets. Converted buckets are gathered alone: each needs temporary memory of its size.
    most = sum(bucket.flat.nbytes for bucket in buckets) / PARTS
    groups: list[list[Bucket]] = []
    before = size = 0
    for bucket in buckets:
        last = groups[-1][-1] if groups else None
        kind = bucket.flat.dtype, bucket.sync_dtype
        fits = together and last is not None and kind == (last.flat.dtype, last.sync_dtype) and size < min(before, most)
        if fits and kind[1] in (kind[0], torch.uint8):
            groups[-1].append(bucket)
        else:
            groups.append([bucket])
            before, size = before + size, 0
        size += bucket.flat.nbytes
    return groups


class ParameterSync:
    """All-gathers buckets after a step, and detects writes of other code to their parameters."""

    def __init__(self, sharding: Sharding, channel: SideStream) -> None:
        self._sharding, self._channel = sharding, channel
        self.publication = Publication(channel)
        self._groups: list[GatherGroup] = []
        self._which = b""  # for each bucket 1 if the last step updated it, else 0
        self._updated_groups: list[GatherGroup] = []
        self.add_buckets(sharding.buckets)

    def add_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Gather new buckets too."""
        # Separately on a CPU: gloo would copy joined buckets, and its calls are cheap.
        together = all(bucket.flat.is_cuda for bucket in buckets)
        groups = list(map(GatherGroup, group_buckets(buckets[::-1], together=together)))
        own = {id(param): group for group in groups for bucket in group.buckets for param in bucket.params}
        for bucket in buckets:
            self._channel.keep(bucket.flat, bucket.exact)
        self._groups += groups
        self._which = b""
        self.publication.of = {**self.publication.of, **own}
        params = [param for bucket in self._sharding.buckets for param in bucket.params]
        self.fixed, self.writes, self._written = Table(states=params), Writes(params), list[torch.Tensor]()
        self.is_exact = any(bucket.exact is not None for bucket in self._sharding.buckets)
        if self._sharding.options.overlap_param_sync:
            guard_look_ups(self.publication, self._sharding.model)

    def _note_updated(self, which: bytes) -> None:
        self._which = which
        updated = [bucket for bucket, one in zip(self._sharding.buckets, which) if one]
        self.writes.attribute(self._written)
        self._written = [param for bucket in updated for param in bucket.params]
        self._updated_groups = [group for group in self._groups if group.choose(updated)]

    def gather(self, which: bytes | None = None, captures: bool | None = None) -> None:
        """After a step: start the all-gathers of updated parameters."""
        which = b"\1" * len(self._sharding.buckets) if which is None else which
        if which != self._which:
            self._note_updated(which)
        captures = is_capturing() if captures is None else captures
        channel, tickets = self._channel, self.publication.tickets
        with channel.after_compute() if channel.in_order else _NOTHING:
            # A captured step always uses collectives.
            fetched = {group: group.peers for group in self._updated_groups if group.peers and not captures}
            for peers in dict.fromkeys(fetched.values()):
                peers.barrier()
            for group in self._updated_groups:
                if group in fetched:
                    # A copy per section: contiguous copies between GPUs run on copy engines, not in a kernel. The
                    # barrier after them keeps ranks from overwriting sections that another rank still reads.
                    for own, other in group.peer_sections:
                        own.copy_(other)
                    fetched[group].barrier()
                    group.work = None
                else:
                    wholes, sections = group.sent or group.send()
                    works = self._sharding.ranks.all_gather(wholes, sections)
                    group.work = partial(group.arrive, wholes, works)
                if channel.in_order:
                    group.finish()
                    group.mark = channel.next_mark(group.mark)
                tickets[group] = group
        # Count the gathers as in-place writes: autograd must refuse graphs that saved the old values.
        build.bump(self._written)
        self.writes.total += len(self._written)
        if captures:
            self.publication.wait_in_graph()
        elif self.publication.compiled or not self._sharding.options.overlap_param_sync:
            self.publication.wait_all()

    def note_update(self) -> None:
        """After a replay, which updates and gathers all training buckets: count the writes as `gather` does."""
        self._note_updated(bytes(bucket.trains for bucket in self._sharding.buckets))
        build.bump(self._written)
        self.writes.total += len(self._written)

    def written(self, versions: int | None = None) -> list[torch.Tensor]:
        """Take over parameters that other code has written to since the last call; returns these parameters."""
        # Call it under `torch.no_grad`.
        moved: set[int] = set()
        params = self.writes.params
        self.writes.attribute(self._written)
        if self.fixed.look(1) != SAME:
            moved = {id(param) for bucket in self._sharding.buckets for param in bucket.restore_views()}
            self.fixed = Table(states=params)
        for bucket in self._sharding.buckets:
            # Version counters do not count writes through `param.data`.
            bucket.follow_writes()
        if self.writes.are_none(versions) and not moved:
            return []
        written = [params[place] for place in self.writes.take()]
        self.writes.note()
        return written + [param for param in params if id(param) in moved.difference(map(id, written))]


class ShardedExecution(Execution):
    """Reduces gradients in backward, updates this rank's sections in the step, and all-gathers parameters after it."""

    no_copy = "a sharded optimizer cannot be copied or pickled: save its state_dict() or full_state_dict()"
    creates_all_states = True

    def __init__(self, optimizer: Optimizer, sharding: Sharding) -> None:
        self._reference = weakref.ref(optimizer)
        self.sharding = sharding
        self.channel = SideStream(sharding.device, priority=-1)
        message = StepMessage(self._reference, sharding.ranks, sharding.members[0].name)
        self.gradients = ReduceScatter(sharding, self.channel, message)
        self.parameters = ParameterSync(sharding, self.channel)
        self._captures_alone = False  # whether a step is under capture without its backward
        self.consolidated: dict[str, Any] | None = None  # the full state, for the next `state_dict`
        self._overflows_are_shared = False  # whether a scaler has reduced its `found_inf` since the last step

    @property
    def optimizer(self) -> Optimizer:
        """The sharded optimizer."""
        optimizer = self._reference()
        if optimizer is None:
            raise RuntimeError("the sharded optimizer was deleted: keep a reference to it")
        return optimizer

    def building_plan(self) -> AbstractContextManager[None]:
        self.sharding.require_groups(self.optimizer)
        return super().building_plan()

    def step(self, plain: Callable[..., None]) -> None:
        """Update this rank's sections, and start the all-gathers of the parameters."""
        optimizer = self._reference()
        assert optimizer is not None
        if optimizer.is_evaluating:
            raise evaluation_error("step()")
        if hasattr(optimizer, "found_inf") and not self._overflows_are_shared:
            raise GradientError(
                "a scaler has computed found_inf on this rank alone, so the scales of ranks would differ: use "
                "tilestep.GradScaler or torch.amp.GradScaler, which reduce it over the ranks; nothing was updated"
            )
        self._overflows_are_shared = False
        sharding, gradients = self.sharding, self.gradients
        if [group.get("rule") for group in optimizer.param_groups] != sharding.rules:
            # Changed parameters need a new plan anyway, and `building_plan` checks them.
            sharding.require_groups(optimizer)
        captures = is_capturing()
        if captures:
            able = sharding.ranks.can_be_captured
            require(able, "CUDA graphs cannot capture the process group's backend; use NCCL")
            require(not self.parameters.publication.tickets, f"all-gathers of parameters are unfinished; {PREPARE}")
        versions, params = gradients.finish(captures), self.parameters
        if params.publication.tickets or params.is_exact or versions != params.writes.total or params.fixed.look(1):
            self.sync_masters(optimizer, versions)
        if not gradients.unmoved and 0 in gradients.has_gradient:
            refuse_replaced(sharding.model, sharding.member_of)
        if captures:
            require(
                self._captures_alone or gradients.summed_in_graph,
                "its gradients were reduced before the graph: capture backward too, or use tilestep.capture(optimizer)",
            )
        # Only this execution can change the pieces and their gradients, so `unmoved` tells whether they are unchanged
        # since the last step. A capture checks every tensor.
        unmoved = not captures and gradients.unmoved
        gradients.unmoved, self.consolidated = False, None
        # A parameter that is frozen after its reduction is updated too: torch updates every parameter with a gradient.
        updates = bytes(sums.was_summed or sums.bucket.trains for sums in gradients.sums)
        plain(unmoved=unmoved)
        gradients.unmoved = True
        if not unmoved:
            sharding.note_stepped(gradients.timeline.params, gradients.has_gradient, gradients.assigned_trains)
        if not captures or gradients.summed_in_graph:
            gradients.forget()
        params.gather(updates, captures)

    @gradientless
    def sync_masters(self, optimizer: Any, versions: int | None = None) -> None:
        """Wait for all parameters, and take over writes of other code; `versions`: the sum of versions, if known."""
        params = self.parameters
        params.publication.wait_all()
        written = [self.sharding.member_of[param].piece for param in params.written(versions)]
        if written:
            self.gradients.unmoved = False
            torch.autograd.graph.increment_version([piece for piece in written if piece is not None])

    @gradientless
    def complete_gradients(self, optimizer: Any) -> None:
        """Complete reductions and all-gathers; all ranks must call it."""
        self.sync_masters(optimizer, self.gradients.finish(is_capturing()))

    def step_of(self, optimizer: Any, group: Mapping[str, Any]) -> Any:
        """The step count of a group; on a rank without pieces of the group, the largest step count of other groups."""
        own = super().step_of(optimizer, group)
        members = (self.sharding.member_of[param] for param in group["params"])
        if own is not None or not any(self.sharding.holds_state(optimizer, member) for member in members):
            return own
        steps = [state["step"] for state in optimizer.state.values() if "step" in state]
        return torch.stack(steps).amax() if steps else None

    def before_zero_grad(self) -> None:
        """Drop reduced gradients too."""
        self.gradients.reset()

    def stepped(self, optimizer: Any) -> list[torch.Tensor]:
        return [
            param for param, has_grad in zip(self.gradients.timeline.params, self.gradients.has_gradient) if has_grad
        ]

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """This rank's part of the state, for `torch.distributed.checkpoint`, as tensors of the parameters' shapes.

        No rank waits for another. `torch.distributed.checkpoint` loads it on any number of ranks, and into an
        optimizer that is not sharded; use `full_state_dict` for everything else.
        """
        consolidated, self.consolidated = self.consolidated, None
        return consolidated or self.own_state_dict(plain)

    def own_state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        optimizer = self.optimizer
        self.sharding.require_groups(optimizer)
        self.sync_masters(optimizer)
        if optimizer.plan is not None:
            optimizer.plan.masters.sync()
        with sharded_states(optimizer, self.sharding):
            return plain()

    def load_state_dict(self, state_dict: Mapping[str, Any], plain: Callable[[Mapping[str, Any]], Any]) -> None:
        """Load a sharded or a full checkpoint of any optimizer of the rule; nothing changes on an error."""
        self.gradients.unmoved, self.consolidated = False, None
        optimizer, held_averages = self.optimizer, self.optimizer.is_evaluating
        self.sharding.require_groups(optimizer)
        if held_averages:
            self.sync_masters(optimizer)
        for member in self.sharding.members:
            if member.piece is not None:
                member.piece.requires_grad_(member.param.requires_grad)
        begun = plain(state_dict)
        if held_averages:
            self.parameters.gather()
        for member in self.sharding.members:
            # Loading a checkpoint with any state makes state for all parameters that train.
            has_state = member.param in begun or (begun and member.param.requires_grad)
            member.has_begun = True if has_state else None
        if state_dict["state"]:  # after set_optimizer_state_dict with flatten, this rank's entries may be empty
            self.sharding.show_begun(vars(optimizer)["state"])

    def add_param_group(self, param_group: dict[str, Any], plain: Callable[[dict[str, Any]], None]) -> None:
        """Add a param group, in separate buckets; all ranks must call it, while there are no gradients."""
        sharding, optimizer = self.sharding, self.optimizer

        def add() -> None:
            sharding.require_groups(optimizer)
            if optimizer.is_evaluating:
                raise evaluation_error("add_param_group()")
            if self.gradients.timeline.is_open or any(self.gradients.timeline.taken):
                raise RuntimeError(
                    "parameters have gradients: call add_param_group() right after step() or zero_grad()"
                )
            plain(param_group)
            require_listed_once("shard()", optimizer)

        attempt_together(sharding.ranks, add, "add the param group", RuntimeError)
        names = validate_across_ranks(optimizer, sharding.model, sharding.ranks, sharding.options)
        self.sync_masters(optimizer)
        buckets = sharding.lay_out(optimizer, names)
        self.gradients.add_buckets(buckets)
        self.parameters.add_buckets(buckets)
        self.gradients.has_gradient = ()

    def swap_weights(self, plain: Callable[[], None]) -> None:
        """Write the training or evaluation weights into this rank's sections, and gather the parameters."""
        # Running all-gathers still read the sections.
        self.sync_masters(self.optimizer)
        self.gradients.unmoved = False
        plain()
        # All buckets: a parameter that is frozen now may have an average.
        self.parameters.gather()

    def had_gradients(self, optimizer: Any) -> bool:
        """Whether the last step had gradients, on any rank."""
        return any(self.gradients.has_gradient)

    @gradientless
    def unscale(self, optimizer: Any, unscale: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients of this rank's pieces; an overflow on any rank counts on all ranks."""
        self.complete_gradients(optimizer)
        sharding = self.sharding
        dtypes = {bucket.grad_dtype for bucket in sharding.buckets if bucket.trains and self.had_gradients(optimizer)}
        # A scaler makes flags for the devices and dtypes of the gradients that it finds: empty gradients make all ranks
        # find the same.
        empty = [torch.zeros(0, dtype=dtype, device=sharding.device, requires_grad=True) for dtype in dtypes]
        for tensor in empty:
            tensor.grad = torch.zeros_like(tensor)
        sections = [member.piece for member in sharding.members if member.piece is not None]
        scaled = SimpleNamespace(param_groups=[{"params": [*sections, *empty]}])
        flags = unscale(scaled, *args, **kwargs)
        for flag in flags.values():
            sharding.deciders.add(flag)
        self._overflows_are_shared = True
        return flags

    @contextmanager
    def for_graph(self, optimizer: Any, *, alone: bool, replays: bool = False) -> Iterator[None]:
        """A block in which a step is captured or replayed: reductions and all-gathers are complete."""
        if not replays:
            require_no_waits(optimizer)
        self.sharding.require_groups(optimizer)
        if alone:
            self.complete_gradients(optimizer)
        else:
            self.sync_masters(optimizer)
        self.channel.settle()
        if not replays:
            self.parameters.publication.wait_on_host()
        self._captures_alone = alone and not replays
        try:
            yield
        finally:
            self._captures_alone = False
        if replays:
            if alone:
                self.gradients.forget()
            self.parameters.note_update()

    def prepare_capture(self, optimizer: Any) -> None:
        """Prepare a capture; the graph must contain backward too, or be made by `tilestep.capture`."""
        with self.for_graph(optimizer, alone=False):
            prepare_capture(optimizer)
