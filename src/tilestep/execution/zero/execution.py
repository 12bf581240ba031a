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
from ...optimizer.parameters import evaluating, require_listed_once
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
    """The gradients of one bucket."""

    def __init__(self, bucket: Bucket, memory: torch.Tensor | None, options: Options) -> None:
        self.bucket, self._average = bucket, options.average
        self.flat, self.views = memory, [] if memory is None else bucket.views_of(memory)
        self.own_section = None if memory is None else memory[bucket.own]
        """Where sums go in memory that is always there; None for memory that is only taken for a round."""
        # Of fixed size, and so are their values: what is allocated after a backward has the allocator tidy up what that
        # has freed. Of bytes a copy would be made.
        self.filled = bytearray(len(bucket.params))  # a one where this rank's gradient is in the bucket, else a zero
        self.none, self._all = bytearray(len(self.filled)), bytearray(b"\1" * len(self.filled))
        self.section: torch.Tensor | None = None  # this rank's section of the summed gradients, once they are there
        self.was_summed = False  # whether there was a section since the last step, dropped or not
        self.carried: torch.Tensor | None = None  # sums of earlier rounds since the last step, for the next
        self.work: Any = None
        like = torch.empty(0, dtype=bucket.grad_dtype, device=bucket.flat.device)
        self.comes_averaged = options.average and bucket.ranks.can_average(like)
        """Whether what comes from the other ranks is divided by their number already."""
        self.is_agreed = bucket.trains  # whether it trains on all ranks, as they have told each other
        self.excluded = False  # whether this rank has sent zeros, for a bucket that it has frozen
        self.keeps = False  # whether gradients of what was thawed wait until ranks have told each other so
        self.accumulates_in_place = bucket.grad_dtype == bucket.flat.dtype
        """Whether parameters keep their gradient, as a view of the bucket, for backward to add to."""

    def open(self) -> None:
        """Begin a round; gradients that are summed already are added to its sums."""
        if self.section is not None:
            # The section lies where new gradients are going to be written, unless the memory was given back.
            self.carried, self.section = self.section if self.own_section is None else self.section.clone(), None
        if self.is_agreed:
            self.filled[:] = self.none

    def collect(self, *, ends: bool = False) -> None:
        """Bring gradients into the bucket; backward adds further ones to them there, unless the round `ends`."""
        # Call it in `torch.no_grad`, as `reduce`.
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
                # There was none, or it was taken away.
                filled[place] &= not self.accumulates_in_place
                continue
            views = views or self._memory_views()
            view = views[place]
            if gradient is not view:
                if filled[place] and not self.accumulates_in_place:
                    view.add_(gradient)
                else:
                    # It was put there after the view, by backward or by the user: it holds all there is.
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
        """Begin to sum it up over the ranks, with zeros for parameters without gradient; zeros if it is frozen here."""
        bucket, section = self.bucket, self.own_section if trains else None
        if trains:
            self.collect(ends=True)
            if 0 in self.filled:
                zero_all([view for view, is_there in zip(self._memory_views(), self.filled) if not is_there])
            flat: Any = self.flat
        else:
            flat = bucket.flat.new_zeros(bucket.layout.numel, dtype=bucket.grad_dtype)
        self.was_summed, self.excluded = True, not trains
        # Without a section of its own the memory of the bucket is given back.
        self.section = flat.new_empty(bucket.layout.section) if section is None else section
        with channel.after_compute(*((flat, self.section) if section is None else ()), self.carried):
            self.work = bucket.ranks.reduce_scatter(self.section, flat, mean=self.comes_averaged)
            if channel.in_order:
                self.arrive()
        if trains and self.own_section is None:
            self.flat, self.views = None, []

    def arrive(self) -> None:
        """Wait for the sums over the ranks that split the state, and complete them."""
        # In one order on every rank: copies exchange sections here.
        if self.work is not None:
            self.work.wait()
        self.work, section, ranks = None, self.section, self.bucket.ranks
        assert section is not None
        if ranks.copies > 1:
            ranks.add_copies(section, mean=self.comes_averaged)
        if self._average and not self.comes_averaged and ranks.count > 1:
            section.div_(ranks.count)
        if self.carried is not None:
            section.add_(self.carried)
            self.carried = None


class ReduceScatter(Row):
    """Sums gradients over the ranks, bucket by bucket in one order on every rank, while backward still runs."""

    # A round brings every bucket once. Backward outside `no_sync` is one round, which it ends itself; `finish` begins
    # one if there was none since the last step, or if gradients were accumulated since. So ranks agree on the number of
    # rounds without asking each other, whichever parameters each of them uses. Which buckets train they tell each other
    # at the step: until then a rank that has frozen one sends zeros, and one that has thawed one keeps its gradients.

    choice = "shard"
    taken_by = (
        "shard() has reduced it over the ranks during backward: set max_grad_norm on the optimizer, which clips inside "
        "the step, or call clip_grad_norm_() of the optimizer"
    )

    def __init__(self, sharding: Sharding, channel: SideStream, message: StepMessage) -> None:
        self.message, self._sharding, self.channel = message, sharding, channel
        self.eager = sharding.options.overlap_grad_sync
        self.timeline = Timeline(self, channel)
        self.sums: list[GradientBucket] = []
        self._next = 0  # the next bucket to reduce in this round
        self._rounds = 0  # since the last step
        self.summed_in_graph = False  # whether the last round is a part of a CUDA graph that is being captured
        self._sections: list[torch.Tensor | None] = []  # of each bucket what was given to this rank's sections
        self.has_gradient, self.given_as = tuple[bool, ...](), b""
        """For each parameter whether it had a gradient then, and whether it trained."""
        self.unmoved = False  # whether these were the gradients of the last step, and no section was written to since
        self.take_in(sharding.buckets)
        self.timeline.announce(sharding.model)

    def take_in(self, buckets: Sequence[Bucket]) -> None:
        """Sum up the gradients of further buckets too; there must be none of others now."""
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
        # Made once: the first allocation of a kilobyte after a backward has the allocator tidy up what that has freed.
        self._all_have, self._all_taken = (True,) * len(timeline.params), bytearray([TAKEN]) * len(timeline.params)
        self.message.reset(timeline.params, device)
        self.trains = self.message.trains  # as ranks have told each other

    def begin(self) -> Set[int]:
        """Have every bucket take gradients; sums of earlier rounds are added to theirs."""
        if self.channel.in_order or any(sums.work is not None for sums in self.sums):
            self._await_all()
        for sums in self.sums:
            sums.open()
        self._next = 0
        return NONE

    def again(self, bucket: int, param: torch.Tensor) -> bool:
        """Not in the same round: `ready` begins another one if it must."""
        return False

    def ready(self, bucket: int) -> None:
        """Reduce a bucket of which this rank has all gradients, if it is the next one, and others that wait for it."""
        sums, timeline = self.sums[bucket], self.timeline
        if sums.section is not None:
            # It is sent: checkpoints that are recomputed apart share parameters.
            timeline.begin_another(bucket)
        reduces = timeline.when == "ready"
        if not reduces or self._next != bucket:
            sums.collect()
        if reduces:
            self._reduce()

    def collect(self) -> None:
        """Take gradients that the next pass would add to in the parameters' own type."""
        for sums in self.sums:
            if not sums.accumulates_in_place:
                sums.collect()

    def _reduce(self, *, all_of_them: bool = False) -> None:
        """Reduce the next buckets, up to the first one that waits for gradients."""
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
        """Reduce the buckets that are left."""
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
        """Give the sections the summed gradients of every bucket, None for one that does not train. Without gradients.

        Returns the sum of the parameters' versions.
        """
        timeline, message = self.timeline, self.message
        if not timeline.is_alone:
            refuse_another_taker(timeline)
        versions, has_gradients, trains = timeline.survey(timeline.params)
        begins = not timeline.is_open and (not self._rounds or (has_gradients and self._was_given()))
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
                message.is_due = True  # the next `finish` asks again, on all ranks
                raise
        self._await_all()
        has_gradient = self._all_have if 0 not in timeline.taken else self._had_gradients()
        if message.trains != self.trains:
            self._follow_trains()
        sections = [sums.section for sums in self.sums]
        known = (self.has_gradient, self.given_as) == (has_gradient, trains)
        if not known or not all(map(operator.is_, self._sections, sections)):
            self._give(sections, has_gradient, trains)
        return versions

    def _give(self, sections: list[torch.Tensor | None], has_gradient: tuple[bool, ...], trains: bytes) -> None:
        timeline, member_of = self.timeline, self._sharding.member_of
        refuse_taken_by_another([one for one, has_one in zip(timeline.params, has_gradient) if not has_one], timeline)
        section_of = {sums.bucket: sums.section for sums in self.sums}
        members = [member_of[param] for param in timeline.params]
        for member, has_one, is_trained in zip(members, has_gradient, trains):
            left_behind = has_one or member.param.grad is not None
            if left_behind and not is_trained and section_of[member.bucket] is None:
                raise GradientError(
                    f"{member.name} has a gradient and is frozen, as all parameters of its bucket: the gradient is "
                    "not summed over the ranks. Freeze parameters after the backward outside of no_sync() or after "
                    "step(), or set their .grad to None"
                )
        self._sections, self.has_gradient, self.given_as, self.unmoved = sections, has_gradient, trains, False
        for member, has_one, is_trained in zip(members, has_gradient, trains):
            member.take_gradient(section_of[member.bucket] if has_one else None, bool(is_trained))

    def _with_kept(self, trains: bytes) -> bytes:
        """Which parameters train, and those that did when gradients were kept."""
        kept = b"".join(bytes([sums.keeps]) * len(sums.filled) for sums in self.sums)
        return bytes(one | (has & was) for one, has, was in zip(trains, kept, self._trained()))

    def _trained(self) -> bytes:
        return self.timeline.trained or bytes(len(self.timeline.params))

    def _follow_trains(self) -> None:
        """On ranks that agree on what trains: sum up what was kept of what was thawed."""
        self.trains = self.message.trains
        for sums, awaited in zip(self.sums, self.timeline.buckets):
            if sums.excluded:
                sums.section = None
            begins, sums.keeps = not sums.is_agreed, False
            sums.is_agreed = 1 in self.trains[awaited.first : awaited.first + len(awaited.params)]
            if begins and sums.is_agreed:
                sums.reduce(self.channel, trains=True)
        self._await_all()

    def _was_given(self) -> bool:
        """Whether gradients were set by hand since the last round."""
        given = (sums.bucket.params for sums in self.sums if sums.bucket.trains and not sums.keeps)
        return any(param.grad is not None for params in given for param in params)

    def _had_gradients(self) -> tuple[bool, ...]:
        """For each parameter whether any rank had a gradient of it."""
        # The host looks at the device only if this rank had none for a parameter that trains. What is frozen by now may
        # have had a gradient on another rank.
        had, params = list(map(bool, self.timeline.taken)), self.timeline.params
        unsure = [
            place
            for place, (has_one, trained) in enumerate(zip(had, self._trained()))
            if not has_one and (trained or params[place].requires_grad)
        ]
        if unsure and self._sharding.ranks.count > 1:
            require(not is_capturing(), "a parameter has no gradient here, and only the device knows of other ranks")
            counts = self.message.sums[self.message.PARTS :].tolist()  # for each parameter, of ranks with a gradient
            for place in unsure:
                had[place] = counts[place] > 0
        return tuple(had)

    @gradientless
    def reset(self) -> None:
        """Drop the gradients of every parameter, those on their way too."""
        if self.timeline.when == "ready":
            # A backward pass was broken off; other ranks may be further in this round.
            self.end()
        self._await_all()
        rounds, summed = self._rounds, [(sums.was_summed, sums.keeps) for sums in self.sums]
        self.forget()
        # A rank that drops its gradients alone must not begin a round that the others have behind them, and takes part
        # where they gather.
        self._rounds = rounds
        for sums, (was_summed, keeps) in zip(self.sums, summed):
            sums.was_summed, sums.keeps = was_summed, keeps
            for param in sums.bucket.params:
                param.grad = None

    def forget(self) -> None:
        """After a step: the gradients are used up."""
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
    """Buckets that are gathered together, since calls for each would take the host longer than the network."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        super().__init__()
        self.buckets = list(buckets)
        self._chosen: list[Bucket] = []
        self.sent: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None
        """What travels, whole buckets and this rank's sections, if nothing is converted for the way."""
        self.peers: PeerMemory | None = None  # what it lies in, if sections are fetched and not sent
        self.theirs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Sections of other ranks, in this rank's memory and in theirs, if this rank fetches them."""

    def choose(self, updated: Sequence[Bucket]) -> bool:
        """Note which buckets are gathered; whether there are any, which is the same on every rank."""
        self._chosen = [bucket for bucket in self.buckets if bucket in updated]
        plain = bool(self._chosen) and all(bucket.sync_dtype == bucket.flat.dtype for bucket in self._chosen)
        self.sent = self.send() if plain else None
        self.theirs = [pair for bucket in self._chosen for pair in bucket.theirs()] if plain else []
        self.peers = self._chosen[0].peers if self.theirs else None
        return bool(self._chosen)

    def send(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """What travels, all of each bucket and this rank's section."""
        wholes, sections = zip(*map(Bucket.sent, self._chosen))
        return wholes, sections

    def arrive(self, wholes: Sequence[torch.Tensor], works: Sequence[Any]) -> None:
        """Wait for what travels, and take over what was converted for the way."""
        for work in works:
            if work is not None:
                work.wait()
        for bucket, whole in zip(self._chosen, wholes):
            if whole.dtype != bucket.flat.dtype and whole.is_floating_point():
                bucket.flat.copy_(whole)


PARTS = 6  # a group has at most this part of all bytes, but for the last group: many are gathered while a forward runs


def group_buckets(buckets: Sequence[Bucket], together: bool) -> list[list[Bucket]]:
    """Buckets in the order of the forward that needs them, put together: as many bytes as all before, up to a part."""
    # So the first module waits for one bucket, as if there were no groups, and the number of calls grows with the
    # logarithm of the number of buckets. What is converted for the way goes alone: it takes memory for a bucket.
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
    """Gathers buckets after a step, and follows what other code writes to their parameters."""

    def __init__(self, sharding: Sharding, channel: SideStream) -> None:
        self._sharding, self._channel = sharding, channel
        self.publication = Publication(channel)
        self._groups: list[GatherGroup] = []
        self._which = b""  # for each bucket a one if it was updated the last time, else a zero
        self._updated_groups: list[GatherGroup] = []
        self.take_in(sharding.buckets)

    def take_in(self, buckets: Sequence[Bucket]) -> None:
        """Gather further buckets too."""
        # Not together on a CPU: gloo would copy them, and its calls cost little.
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
        """After a step: let every rank have the parameters that the others have updated."""
        which = b"\1" * len(self._sharding.buckets) if which is None else which
        if which != self._which:
            self._note_updated(which)
        captures = is_capturing() if captures is None else captures
        channel, tickets = self._channel, self.publication.tickets
        with channel.after_compute() if channel.in_order else _NOTHING:
            # A graph is sent what it holds.
            fetched = {group: group.peers for group in self._updated_groups if group.peers and not captures}
            for peers in dict.fromkeys(fetched.values()):
                peers.meet()
            for group in self._updated_groups:
                if group in fetched:
                    # One by one: copies of whole ranges between GPUs are the copy engines' work, and not that of a
                    # kernel. No rank writes to a section that another rank has not read.
                    for own, other in group.theirs:
                        own.copy_(other)
                    fetched[group].meet()
                    group.work = None
                else:
                    wholes, sections = group.sent or group.send()
                    works = self._sharding.ranks.all_gather(wholes, sections)
                    group.work = partial(group.arrive, wholes, works)
                if channel.in_order:
                    group.finish()
                    group.mark = channel.next_mark(group.mark)
                tickets[group] = group
        # As in-place writes do: what was computed from the old values must not be differentiated, as after any step.
        build.bump(self._written)
        self.writes.total += len(self._written)
        if captures:
            self.publication.wait_in_graph()
        elif self.publication.compiled or not self._sharding.options.overlap_param_sync:
            self.publication.wait_all()

    def note_update(self) -> None:
        """After a replay, which has updated and gathered what trains: count the writes as `gather` does."""
        self._note_updated(bytes(bucket.trains for bucket in self._sharding.buckets))
        build.bump(self._written)
        self.writes.total += len(self._written)

    def written(self, versions: int | None = None) -> list[torch.Tensor]:
        """The parameters that other code has written to since the last call; their values are taken over."""
        # Call it without gradients.
        moved: set[int] = set()
        params = self.writes.params
        self.writes.attribute(self._written)
        if self.fixed.look(1) != SAME:
            moved = {id(param) for bucket in self._sharding.buckets for param in bucket.take_back()}
            self.fixed = Table(states=params)
        for bucket in self._sharding.buckets:
            # No version counts what is written through `param.data`.
            bucket.follow_writes()
        if self.writes.are_none(versions) and not moved:
            return []
        written = [params[place] for place in self.writes.take()]
        self.writes.note()
        return written + [param for param in params if id(param) in moved.difference(map(id, written))]


class ShardedExecution(Execution):
    """Reduces gradients in backward, updates this rank's sections in the step, and gathers the parameters after it."""

    not_copied = "a sharded optimizer cannot be copied or pickled: save its state_dict() or full_state_dict()"
    begins_together = True

    def __init__(self, optimizer: Optimizer, sharding: Sharding) -> None:
        self._reference = weakref.ref(optimizer)
        self.sharding = sharding
        self.channel = SideStream(sharding.device, priority=-1)
        message = StepMessage(self._reference, sharding.ranks, sharding.members[0].name)
        self.gradients = ReduceScatter(sharding, self.channel, message)
        self.parameters = ParameterSync(sharding, self.channel)
        self._captures_alone = False  # whether a step is being captured without its backward
        self.consolidated: dict[str, Any] | None = None  # gathered for the next `state_dict`
        self._overflows_are_shared = False  # whether a scaler has combined its overflow flags since the last step

    @property
    def optimizer(self) -> Optimizer:
        """The sharded optimizer."""
        optimizer = self._reference()
        if optimizer is None:
            raise RuntimeError("the sharded optimizer is gone: keep a reference to it")
        return optimizer

    def making_plan(self) -> AbstractContextManager[None]:
        self.sharding.require_groups(self.optimizer)
        return super().making_plan()

    def step(self, plain: Callable[..., None]) -> None:
        """Update this rank's sections and begin to gather the parameters."""
        optimizer = self._reference()
        assert optimizer is not None
        if optimizer.is_evaluating:
            raise evaluating("step()")
        if hasattr(optimizer, "found_inf") and not self._overflows_are_shared:
            raise GradientError(
                "a scaler has looked for overflows on this rank alone, and scales of ranks would drift apart: use "
                "tilestep.GradScaler or torch.amp.GradScaler, which ask all of them; nothing was updated"
            )
        self._overflows_are_shared = False
        sharding, gradients = self.sharding, self.gradients
        if [group.get("rule") for group in optimizer.param_groups] != sharding.rules:
            # Other parameters need a new plan, which checks them.
            sharding.require_groups(optimizer)
        captures = is_capturing()
        if captures:
            able = sharding.ranks.can_be_captured
            require(able, "its ranks communicate by a backend that graphs cannot hold; NCCL can")
            require(not self.parameters.publication.tickets, f"parameters are still on their way; {PREPARE}")
        versions, params = gradients.finish(captures), self.parameters
        if params.publication.tickets or params.is_exact or versions != params.writes.total or params.fixed.look(1):
            self.sync_masters(optimizer, versions)
        if not gradients.unmoved and 0 in gradients.has_gradient:
            refuse_replaced(sharding.model, sharding.member_of)
        if captures:
            require(
                self._captures_alone or gradients.summed_in_graph,
                "its gradients were summed before the graph: capture backward too, or use tilestep.capture(optimizer)",
            )
        # Nothing else holds the sections and their gradients: they are unchanged since the last step, unless this
        # execution has changed them. A capture looks at every tensor.
        unmoved = not captures and gradients.unmoved
        gradients.unmoved, self.consolidated = False, None
        # A parameter that was frozen after its gradient was reduced is updated: torch updates all that have a gradient.
        updates = bytes(sums.was_summed or sums.bucket.trains for sums in gradients.sums)
        plain(unmoved=unmoved)
        gradients.unmoved = True
        if not unmoved:
            sharding.note_stepped(gradients.timeline.params, gradients.has_gradient, gradients.given_as)
        if not captures or gradients.summed_in_graph:
            gradients.forget()
        params.gather(updates, captures)

    @gradientless
    def sync_masters(self, optimizer: Any, versions: int | None = None) -> None:
        """Wait for all parameters, and take over writes of other code; `versions`: their sum, if it is known."""
        params = self.parameters
        params.publication.wait_all()
        written = [self.sharding.member_of[param].piece for param in params.written(versions)]
        if written:
            self.gradients.unmoved = False
            torch.autograd.graph.increment_version([piece for piece in written if piece is not None])

    @gradientless
    def complete_gradients(self, optimizer: Any) -> None:
        """Give the sections their reduced gradients and the parameters' values; all ranks call it."""
        self.sync_masters(optimizer, self.gradients.finish(is_capturing()))

    def step_of(self, optimizer: Any, group: Mapping[str, Any]) -> Any:
        """As of a plain optimizer; the step count of other groups on a rank without shares of this group."""
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
        return [param for param, has_one in zip(self.gradients.timeline.params, self.gradients.has_gradient) if has_one]

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """This rank's part of the state, for `torch.distributed.checkpoint`, as tensors of the parameters' shapes.

        No rank waits for another. Loading it on another number of ranks, or in an optimizer that is not sharded, is
        `torch.distributed.checkpoint`'s work; `full_state_dict` is for everything else.
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
        """Take a checkpoint or nothing: what `state_dict` has given, or a full one of any optimizer of the rule."""
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
            # A checkpoint with any state gives state to all parameters that train.
            has_state = member.param in begun or (begun and member.param.requires_grad)
            member.has_begun = True if has_state else None

    def add_param_group(self, param_group: dict[str, Any], plain: Callable[[dict[str, Any]], None]) -> None:
        """Add parameters of the model as a group, in buckets of their own; all ranks call it, without gradients."""
        sharding, optimizer = self.sharding, self.optimizer

        def add() -> None:
            sharding.require_groups(optimizer)
            if optimizer.is_evaluating:
                raise evaluating("add_param_group()")
            if self.gradients.timeline.is_open or any(self.gradients.timeline.taken):
                raise RuntimeError("add param groups right after step() or zero_grad(): there are gradients now")
            plain(param_group)
            require_listed_once("shard()", optimizer)

        attempt_together(sharding.ranks, add, "add the param group", RuntimeError)
        names = validate_across_ranks(optimizer, sharding.model, sharding.ranks, sharding.options)
        self.sync_masters(optimizer)
        buckets = sharding.lay_out(optimizer, names)
        self.gradients.take_in(buckets)
        self.parameters.take_in(buckets)
        self.gradients.has_gradient = ()

    def hold_weights(self, plain: Callable[[], None]) -> None:
        """Write the weights that train, or the weights to evaluate, into the sections, and gather the parameters."""
        # Gathers read the sections until they have finished.
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
        """Unscale the sections' gradients; an overflow on one rank is an overflow on all ranks."""
        self.complete_gradients(optimizer)
        sharding = self.sharding
        dtypes = {bucket.grad_dtype for bucket in sharding.buckets if bucket.trains and self.had_gradients(optimizer)}
        # A scaler has a flag for each device and dtype that it finds: all ranks must find the same.
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
        """A block in which a step is captured or replayed: gradients and parameters are complete."""
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
