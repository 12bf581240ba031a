"""The moves of sharded buckets: gradients to the rank that needs them, summed up; updated parameters to all others."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence, Set
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ...compat import copy_all, is_capturing, zero_all
from ...native.table import SAME, Table, Writes
from ...placement import ARRIVED, PeerMemory
from ...runtime.capturing import require
from ...timeline.guards import Publication, guard_model, guard_sharers
from ...timeline.side_stream import SideStream, Ticket
from ...timeline.timeline import NONE, TAKEN, Row, Timeline, gradientless
from .buckets import Bucket, Options, allocate, view_of
from .ranks import StepMessage


class GradientBucket:
    """The gradients of one bucket."""

    def __init__(self, bucket: Bucket, memory: torch.Tensor | None, options: Options) -> None:
        self.bucket, self._ranks, self._average = bucket, bucket.ranks, options.average
        self._memory = memory
        self.keeps_memory = memory is not None  # whether its memory is always there
        self.flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        # Of fixed size, and so are their values: what is allocated after a backward has the allocator tidy up what that
        # has freed. Of bytes a copy would be made.
        self.filled = bytearray(len(bucket.params))  # a one where this rank's gradient is in the bucket, else a zero
        self.none, self._all = bytearray(len(self.filled)), bytearray(b"\1" * len(self.filled))
        self.section: torch.Tensor | None = None  # this rank's section of the summed gradients, once they are there
        self.was_summed = False  # whether there was a section since the last step, dropped or not
        self.carried: torch.Tensor | None = None  # sums of earlier rounds since the last step, for the next
        self.work: Any = None
        like = torch.empty(0, dtype=bucket.grad_dtype, device=bucket.flat.device)
        self.comes_averaged = options.average and self._ranks.can_average(like)
        """Whether what comes from the other ranks is divided by their number already."""
        self.own_section = None if memory is None else memory[bucket.own]  # where sums go
        self.is_agreed = bucket.trains  # whether it trains on all ranks, as they have told each other
        self.excluded = False  # whether this rank has sent zeros, for a bucket that it has frozen
        self.keeps = False  # whether gradients of what was thawed wait until ranks have told each other so
        self.accumulates_in_place = bucket.grad_dtype == bucket.dtype
        """Whether parameters keep their gradient, as a view of the bucket, for backward to add to."""
        if memory is not None:
            self._attach(memory)

    def _attach(self, memory: torch.Tensor) -> None:
        self.flat = memory
        self.views = [
            view_of(memory[slot.offset : slot.offset + slot.numel], param)
            for slot, param in zip(self.bucket.layout.slots, self.bucket.params)
        ]

    def open(self) -> None:
        """Begin a round; gradients that are summed already are added to its sums."""
        if self.section is not None:
            # The section lies where new gradients are going to be written, unless the memory was given back.
            self.carried = self.section.clone() if self._memory is not None else self.section
            self.section = None
        if self.is_agreed:
            self.filled[:] = self.none

    def collect(self, *, ends: bool = False) -> None:
        """Bring gradients into the bucket; backward adds further ones to them there."""
        # Call it in `torch.no_grad`, as `reduce`.
        if 1 in self.filled or not self._collect_all(ends):
            self._collect_some(ends)

    def _collect_all(self, ends: bool) -> bool:
        """Bring in the gradients of all parameters if all have one and none is in the bucket; whether that was so."""
        params = self.bucket.params
        gradients: list[Any] = [param.grad for param in params]
        if not all(map(operator.is_not, gradients, itertools.repeat(None))):
            return False
        views = self.views or self._memory_views()
        copy_all(views, gradients)
        if self.accumulates_in_place and not ends:
            for param, view in zip(params, views):
                param.grad = view
        else:
            for param in params:
                param.grad = None
        self.filled[:] = self._all
        return True

    def _collect_some(self, ends: bool) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        views = self.views
        for place, param in enumerate(self.bucket.params):
            gradient = param.grad
            if gradient is None:
                if self.accumulates_in_place:
                    # There was none, or it was taken away.
                    self.filled[place] = 0
                continue
            if not views:
                views = self._memory_views()
            view = views[place]
            if gradient is view:
                if ends:
                    param.grad = None
                continue
            if self.filled[place] and not self.accumulates_in_place:
                view.add_(gradient)
            else:
                # One that is not the view was put there after it, by backward or by the user: it holds all there is.
                targets.append(view)
                sources.append(gradient)
            param.grad = view if self.accumulates_in_place and not ends else None
            self.filled[place] = 1
        copy_all(targets, sources)

    def _memory_views(self) -> list[torch.Tensor]:
        if self.flat is None:
            bucket = self.bucket
            self._attach(torch.empty(bucket.layout.numel, dtype=bucket.grad_dtype, device=bucket.flat.device))
        return self.views

    def reduce(self, channel: SideStream, *, trains: bool) -> None:
        """Begin to sum it up over the ranks, with zeros for parameters without gradient; zeros if it is frozen here."""
        bucket, section = self.bucket, self.own_section if trains else None
        flat: torch.Tensor | None
        if trains:
            if 1 in self.filled or not self._collect_all(True):
                self._collect_some(True)
            if 0 in self.filled:
                views = self._memory_views()
                zero_all([view for view, is_there in zip(views, self.filled) if not is_there])
            flat = self.flat
        else:
            flat = torch.zeros(bucket.layout.numel, dtype=bucket.grad_dtype, device=bucket.flat.device)
        assert flat is not None
        self.was_summed, self.excluded = True, not trains
        if section is None:
            # The memory of the bucket is given back.
            section = flat.new_empty(bucket.layout.section)
        self.section = section
        given_back = () if self.keeps_memory and trains else (flat, section)
        with channel.after_compute(*given_back, self.carried):
            self.work = self._ranks.reduce_scatter(section, flat, mean=self.comes_averaged)
            if channel.in_order:
                self.arrive()
        if not self.keeps_memory and trains:
            self.release()

    def arrive(self) -> None:
        """Wait for the sums over the ranks that split the state, and complete them."""
        # In one order on every rank: copies exchange sections here.
        self.work.wait()
        self.work, section = None, self.section
        assert section is not None
        if self._ranks.copies > 1:
            self._ranks.add_copies(section, mean=self.comes_averaged)
        if self._average and not self.comes_averaged and self._ranks.count > 1:
            section.div_(self._ranks.count)
        if self.carried is not None:
            section.add_(self.carried)
            self.carried = None

    def release(self) -> None:
        """Give back memory that is only taken for a round."""
        if self._memory is None:
            self.flat, self.views = None, []


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

    def __init__(
        self,
        buckets: Sequence[Bucket],
        options: Options,
        channel: SideStream,
        message: StepMessage,
        model: torch.nn.Module | None = None,
    ) -> None:
        self.message, self._options, self.channel = message, options, channel
        self.eager = options.overlap_grad_sync
        self.timeline = Timeline(self, channel)
        self.sums: list[GradientBucket] = []
        self._next = 0  # the next bucket to reduce in this round
        self._rounds = 0  # since the last step
        self.summed_in_graph = False  # whether the last round is a part of a CUDA graph that is being captured
        self.take_in(buckets)
        self.timeline.announce(model)

    def take_in(self, buckets: Sequence[Bucket]) -> None:
        """Sum up the gradients of further buckets too; there must be none of others now."""
        kept = [bucket for bucket in buckets if bucket.trains and self._options.grad_buffer == "contiguous"]
        sizes, dtypes = [bucket.layout.numel for bucket in kept], [bucket.grad_dtype for bucket in kept]
        memory = dict(zip(kept, allocate(sizes, dtypes, buckets[0].flat.device)))
        self.channel.keep(*memory.values())
        self.sums += [GradientBucket(bucket, memory.get(bucket), self._options) for bucket in buckets]
        for sums in self.sums:
            sums.is_agreed = sums.bucket.trains
        timeline = self.timeline
        timeline.count(sums.bucket.params for sums in self.sums)
        timeline.is_alone = False
        self._ranks = buckets[0].ranks
        # Made once: the first allocation of a kilobyte after a backward has the allocator tidy up what that has freed.
        self._all_have, self._all_taken = (True,) * len(timeline.params), bytearray([TAKEN]) * len(timeline.params)
        self.message.reset(timeline.params, buckets[0].flat.device)
        self.trains = self.message.trains  # as ranks have told each other

    @property
    def is_idle(self) -> bool:
        """Whether there are no gradients but those set by hand: after a step, or when they were dropped."""
        return not self.timeline.is_open and not any(self.timeline.taken)

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
        self.message.is_due = self._ranks.count > 1
        timeline.end()
        self._rounds += 1
        self.summed_in_graph = is_capturing()

    def _await_all(self) -> None:
        for sums in self.sums:
            if sums.work is not None:
                sums.arrive()
        if self.channel.in_order:
            self.channel.join()

    def finish(self, captures: bool) -> tuple[int, bytes, tuple[bool, ...]]:
        """Have the summed gradients of every bucket; those of one that does not train are None. Without gradients.

        Gives the sum of the parameters' versions, which of them train, and of which any rank had a gradient.
        """
        timeline, message = self.timeline, self.message
        versions, has_gradients, trains = timeline.survey(timeline.params)
        begins = not timeline.is_open and (not self._rounds or (has_gradients and self._was_given()))
        if begins:
            self.begin()
        if begins or timeline.is_open:
            timeline.note_trains()
            self.end()
        if message.is_due or self._ranks.count == 1:
            message.trains = self._with_kept(trains) if any(sums.keeps for sums in self.sums) else trains
        if message.is_due:
            message.send(timeline.taken, self.channel, captures=captures)
        if not captures and self._ranks.count > 1:
            try:
                message.check()
            except ValueError:
                message.is_due = True  # the next `finish` asks again, on all ranks
                raise
        self._await_all()
        return versions, trains, self._all_have if 0 not in timeline.taken else self._had_gradients()

    def _with_kept(self, trains: bytes) -> bytes:
        """Which parameters train, and those that did when gradients were kept."""
        kept = b"".join(bytes([sums.keeps]) * len(sums.filled) for sums in self.sums)
        return bytes(one | (has & was) for one, has, was in zip(trains, kept, self._trained()))

    def _trained(self) -> bytes:
        return self.timeline.trained or bytes(len(self.timeline.params))

    def follow_trains(self) -> None:
        """After `finish`, on ranks that agree on what trains: sums up what was kept of what was thawed."""
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
        if unsure and self._ranks.count > 1:
            require(not is_capturing(), "a parameter has no gradient here, and only the device knows of other ranks")
            counts = self.message.counts()
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
            if not sums.keeps_memory:
                sums.release()
        self._rounds = self._next = 0
        self.summed_in_graph = False
        self.timeline.forget()


_NOTHING = nullcontext()


class GatherGroup:
    """Buckets that are gathered together, since calls for each would take the host longer than the network."""

    def __init__(self, buckets: Sequence[Bucket], channel: SideStream) -> None:
        self.buckets = list(buckets)
        self._chosen: list[Bucket] = []
        self._as_they_are: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None
        """What travels, whole buckets and this rank's sections, if nothing is converted for the way."""
        self.theirs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Sections of other ranks, in this rank's memory and in theirs, if this rank fetches them."""
        self._channel = channel
        self._work: Any = None
        self._travel: list[tuple[Bucket, torch.Tensor]] = []
        self.ticket = Ticket()

    def choose(self, updated: Sequence[Bucket]) -> bool:
        """Note which buckets are gathered; whether there are any, which is the same on every rank."""
        self._chosen = [bucket for bucket in self.buckets if bucket in updated]
        plain = bool(self._chosen) and all(bucket.sync_dtype == bucket.dtype for bucket in self._chosen)
        self._as_they_are = self._all_sent() if plain else None
        self.theirs = [pair for bucket in self._chosen for pair in bucket.theirs()] if plain else []
        return bool(self._chosen)

    @property
    def peers(self) -> PeerMemory | None:
        """What it lies in, if it is fetched and not sent; a graph is sent what it holds."""
        return self._chosen[0].peers if self.theirs and not is_capturing() else None

    def begin(self) -> None:
        """Begin to gather; fetched sections, and those that a stream gathers, are there for what follows in it."""
        peers = self.peers if self.theirs else None
        if peers is not None:
            # One by one: copies of whole ranges between GPUs are the copy engines' work, and not that of a kernel.
            for own, other in self.theirs:
                own.copy_(other)
            # No rank writes to a section that another rank has not read.
            peers.meet()
            self._work = ARRIVED
        else:
            wholes, sections = self._as_they_are or self._all_sent()
            self._work = self.buckets[0].ranks.all_gather(wholes, sections)
        self.ticket.work = self._arrive
        if self._channel.in_order:
            self.ticket.finish()
            self.ticket.mark = self._channel.next_mark(self.ticket.mark)

    def _all_sent(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        self._travel.clear()
        wholes, sections = zip(*map(self._sent, self._chosen))
        return wholes, sections

    def _sent(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """What travels for a bucket, all of it and this rank's section."""
        if bucket.sync_dtype == bucket.dtype:
            return bucket.flat, bucket.updated
        if not bucket.sync_dtype.is_floating_point:
            # The same bytes, seen as whole numbers.
            return bucket.flat.view(bucket.sync_dtype), bucket.updated.view(bucket.sync_dtype)
        whole = torch.empty_like(bucket.flat, dtype=bucket.sync_dtype)
        own = whole[bucket.own]
        own.copy_(bucket.updated)
        self._travel.append((bucket, whole))
        return whole, own

    def _arrive(self) -> None:
        self._work.wait()
        self._work = None
        for bucket, travelled in self._travel:
            bucket.flat.copy_(travelled)
        self._travel.clear()


PARTS = 6  # a group has at most this part of all bytes, but for the last group: many are gathered while a forward runs


def group_buckets(buckets: Sequence[Bucket], together: bool) -> list[list[Bucket]]:
    """Buckets in the order of the forward that needs them, put together: as many bytes as all before, up to a part."""
    # So the first module waits for one bucket, as if there were no groups, and the number of calls grows with the
    # logarithm of the number of buckets. What is converted for the way goes alone: it takes memory for a bucket.
    most = sum(bucket.layout.numel * bucket.dtype.itemsize for bucket in buckets) / PARTS
    groups: list[list[Bucket]] = []
    before = size = 0
    for bucket in buckets:
        last = groups[-1][-1] if groups else None
        is_same_kind = last is not None and (last.dtype, last.sync_dtype) == (bucket.dtype, bucket.sync_dtype)
        fits = together and is_same_kind and size < min(before, most)
        if fits and bucket.sync_dtype in (bucket.dtype, torch.uint8):
            groups[-1].append(bucket)
        else:
            groups.append([bucket])
            before, size = before + size, 0
        size += bucket.layout.numel * bucket.dtype.itemsize
    return groups


class ParameterSync:
    """Gathers buckets after a step, and follows what other code writes to their parameters."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket], options: Options, channel: SideStream) -> None:
        self._channel = channel
        self.publication = Publication(channel)
        self._overlaps = options.overlap_param_sync
        self.params: list[torch.Tensor] = []
        self._buckets: list[Bucket] = []
        self._groups: list[GatherGroup] = []
        self._which = b""  # for each bucket a one if it was updated the last time, else a zero
        self._written: list[torch.Tensor] | None = None  # the parameters that were updated; None for all
        self._updated_groups: list[GatherGroup] = []
        self.take_in(model, buckets)

    def take_in(self, model: nn.Module, buckets: Sequence[Bucket]) -> None:
        """Gather further buckets too."""
        # Not together on a CPU: gloo would copy them, and its calls cost little.
        parts = group_buckets(buckets[::-1], together=all(bucket.flat.is_cuda for bucket in buckets))
        groups = [GatherGroup(part, self._channel) for part in parts]
        own = {id(param): group for group in groups for bucket in group.buckets for param in bucket.params}
        for bucket in buckets:
            self._channel.keep(bucket.flat, bucket.exact)
        self.params += [param for bucket in buckets for param in bucket.params]
        self._buckets += buckets
        self._groups += groups
        self._which = b""
        self.publication.of = {**self.publication.of, **own}
        self.fixed = Table(states=self.params)
        self.is_exact = any(bucket.exact is not None for bucket in self._buckets)
        self.writes = Writes(self.params)
        if self._overlaps:
            guard_model(model, self.publication, lambda param: id(param) in own)
            guard_sharers(self.publication)

    def _note_updated(self, which: bytes) -> None:
        self._which = which
        updated = [bucket for bucket, one in zip(self._buckets, which) if one]
        self._written = None if all(which) else [param for bucket in updated for param in bucket.params]
        self._updated_groups = [group for group in self._groups if group.choose(updated)]

    def gather(self, which: bytes | None = None, captures: bool | None = None) -> None:
        """After a step: let every rank have the parameters that the others have updated."""
        which = b"\1" * len(self._buckets) if which is None else which
        if which != self._which:
            self._note_updated(which)
        tickets = self.publication.tickets
        with self._channel.after_compute() if self._channel.in_order else _NOTHING:
            for peers in dict.fromkeys(group.peers for group in self._updated_groups if group.theirs):
                if peers is not None:
                    peers.meet()
            for group in self._updated_groups:
                group.begin()
                tickets[group] = group.ticket
        self.writes.count(self._written)
        if is_capturing() if captures is None else captures:
            self.publication.wait_in_graph()
        elif self.publication.compiled or not self._overlaps:
            self.publication.wait_all()

    def note_update(self) -> None:
        """What was computed from the old values must not be differentiated, as after any step."""
        self._note_updated(bytes(bucket.trains for bucket in self._buckets))
        self.writes.count(self._written)

    def written(self, versions: int | None = None) -> list[torch.Tensor]:
        """The parameters that other code has written to since the last call; their values are taken over."""
        # Call it without gradients.
        moved: set[int] = set()
        if self.fixed.look(1) != SAME:
            moved = {id(param) for bucket in self._buckets for param in bucket.take_back()}
            self.fixed = Table(states=self.params)
        for bucket in self._buckets:
            # No version counts what is written through `param.data`.
            bucket.follow_writes()
        if self.writes.are_none(versions) and not moved:
            return []
        written = [self.params[place] for place in self.writes.take()]
        self.writes.note()
        return written + [param for param in self.params if id(param) in moved.difference(map(id, written))]

    def describe_gathers(self) -> list[str]:
        """The ways in which updated parameters are sent to the other ranks, a line each."""
        lines: dict[str, None] = {}
        for bucket in self._buckets:
            dtype = str(bucket.dtype).removeprefix("torch.")
            if bucket.peers is not None and bucket.sync_dtype == bucket.dtype:
                lines[f"{dtype}: ranks fetch it from each other's memory by copy engines"] = None
            else:
                reason = bucket.unshared or "it is converted on the way"
                lines[f"{dtype}: the process group's all-gathers send it ({reason})"] = None
        return list(lines)
