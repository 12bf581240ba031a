"""Gradients on their way from backward to the rank that needs them: into buckets, and summed up over the ranks."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence, Set
from typing import Any

import torch

from ...compat import copy_all, is_capturing, zero_all
from ...placement import Ranks, message_length
from ...runtime.capturing import require
from ...tensor_watch import survey
from ...timeline.accumulation import GradientRounds, gradientless
from ...timeline.side_stream import SideStream
from ...timeline.takers import TakesGradients
from .buckets import Bucket, Options, allocate, view_of
from .ranks import HyperparameterDigest


class GradientBucket:
    """The gradients of one bucket."""

    def __init__(self, bucket: Bucket, memory: torch.Tensor | None) -> None:
        self.bucket = bucket
        self._memory = memory
        self.keeps_memory = memory is not None  # whether its memory is always there
        self.flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        # Of fixed size, and so are their values: what is allocated after a backward has the allocator tidy up what that
        # has freed. Of bytes a copy would be made.
        self.filled = bytearray(len(bucket.params))  # a one where this rank's gradient is in the bucket, else a zero
        self._none, self._all = bytearray(len(self.filled)), bytearray(b"\1" * len(self.filled))
        self.section: torch.Tensor | None = None  # this rank's section of the summed gradients, once they are there
        self.was_summed = False  # whether there was a section since the last step, dropped or not
        self.carried: torch.Tensor | None = None  # sums of earlier rounds since the last step, for the next
        self.work: Any = None
        self.comes_averaged = False  # whether what comes from the other ranks is divided by their number already
        self.own_section = None if memory is None else bucket.section_of(memory)  # where sums go
        self.is_agreed = bucket.trains  # whether it trains on all ranks, as they have told each other
        self.stands_aside = False  # whether this rank has sent zeros: it has frozen what others may not have
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
            self.filled[:] = self._none

    def collect(self, *, ends: bool = False) -> None:
        """Bring gradients into the bucket; backward adds further ones to them there."""
        # Call it in `torch.no_grad`, as `complete`.
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

    def complete(self) -> torch.Tensor:
        """The bucket with the gradient of every parameter in it, zero for those that have none."""
        if 1 in self.filled or not self._collect_all(True):
            self._collect_some(True)
        if 0 in self.filled:
            views = self._memory_views()
            zero_all([view for view, is_there in zip(views, self.filled) if not is_there])
        assert self.flat is not None
        return self.flat

    def let_go(self) -> None:
        """Give back memory that is only taken for a round."""
        if self._memory is None:
            self.flat, self.views = None, []

    def forget(self) -> None:
        """Drop all gradients."""
        self.section = self.carried = None
        self.was_summed = self.stands_aside = self.keeps = False
        self.filled[:] = self._none
        if not self.keeps_memory:
            self.let_go()


_NONE: Set[int] = frozenset()


class GradientSync(TakesGradients):
    """Sums gradients over the ranks, bucket by bucket in one order on every rank, while backward still runs."""

    # A round brings every bucket once. Backward outside `no_sync` is one round, which it ends itself; `finish` begins
    # one if there was none since the last step, or if gradients were accumulated since. So ranks agree on the number of
    # rounds without asking each other, whichever parameters each of them uses. Which buckets train they tell each other
    # at the step: until then a rank that has frozen one sends zeros, and one that has thawed one keeps its gradients.

    def __init__(
        self,
        buckets: Sequence[Bucket],
        places: Sequence[Sequence[int]],
        ranks: Ranks,
        options: Options,
        channel: SideStream,
        digest: HyperparameterDigest,
        model: torch.nn.Module | None = None,
    ) -> None:
        self.digest = digest
        self.ranks = ranks
        self.options = options
        self.channel = channel
        self._in_order = channel.in_order
        self.rounds = GradientRounds(self, channel, eager=options.overlap_grad_sync, accumulates=True)
        """Its own are begun by `finish`, too."""
        self.sums: list[GradientBucket] = []
        self._places: list[list[int]] = []
        self.params: list[torch.Tensor] = []  # all parameters by place
        self._used_here = bytearray()  # a one where this rank has had a gradient since the last step, else a zero
        self._next = 0
        self._rounds = 0
        self._is_awaited = False  # whether communication has begun and was not waited for
        self._keeps = False  # whether a bucket keeps gradients
        self.summed_in_graph = False  # whether the last round is a part of a CUDA graph that is being captured
        self._place_of: dict[int, int] = {}
        self.take_in(buckets, places)
        self.announce(model)

    def holds(self, param: Any) -> bool:
        """Whether it sums up a parameter's gradients."""
        return id(param) in self._place_of

    choice = "shard"
    taken_by = (
        "shard() has reduced it over the ranks during backward: set max_grad_norm on the optimizer, which clips inside "
        "the step, or call clip_grad_norm_() of the optimizer"
    )

    @property
    def has_taken_some(self) -> bool:
        """Whether there are gradients in buckets, for the coming step."""
        return 1 in self._used_here

    def has_taken(self, param: Any) -> bool:
        """Whether a parameter's gradient is in a bucket alone, for the coming step."""
        place = self._place_of.get(id(param))
        return place is not None and param.grad is None and self._used_here[place] == 1

    def take_in(self, buckets: Sequence[Bucket], places: Sequence[Sequence[int]]) -> None:
        """Sum up the gradients of further buckets too; there must be none of others now."""
        kept = [bucket for bucket in buckets if bucket.trains and self.options.grad_buffer == "contiguous"]
        sizes, dtypes = [bucket.layout.numel for bucket in kept], [bucket.grad_dtype for bucket in kept]
        memory = dict(zip(kept, allocate(sizes, dtypes, buckets[0].flat.device)))
        self.channel.keep(*memory.values())
        added = [GradientBucket(bucket, memory.get(bucket)) for bucket in buckets]
        for sums in added:
            like = torch.empty(0, dtype=sums.bucket.grad_dtype, device=sums.bucket.flat.device)
            sums.comes_averaged = self.options.average and self.ranks.can_average(like)
        self.sums += added
        self._places += [list(listed) for listed in places]
        by_place = {
            place: param for bucket, listed in zip(buckets, places) for place, param in zip(listed, bucket.params)
        }
        self.params += [by_place[place] for place in sorted(by_place)]
        self._place_of.update((id(param), place) for place, param in by_place.items())
        # Made once: the first allocation of a kilobyte after a backward has the allocator tidy up what that has freed.
        self._all_have = (True,) * len(self.params)
        self._none_used, self._all_used = bytearray(len(self.params)), bytearray(b"\1" * len(self.params))
        self._used_here = bytearray(self._none_used)
        size = message_length(HyperparameterDigest.PARTS + len(self.params))
        self.used = torch.zeros(size, dtype=torch.float32, device=buckets[0].flat.device)
        """What `digest` compares; then for each parameter how many ranks had a gradient of it since the last step."""
        self._used_known = bytes(self._none_used)
        self._used_sent = self.used.clone()
        self._used_is_due = False  # whether there was a round since other ranks were last told
        self.digest.reset()
        self.is_alone = False
        self.digest.trains = self.trains = survey(self.params).trains  # as ranks have told each other
        for sums in self.sums:
            sums.is_agreed = sums.bucket.trains
        self.rounds.count(sums.bucket.params for sums in self.sums)

    @property
    def is_idle(self) -> bool:
        """Whether there are no gradients but those set by hand: after a step, or when they were dropped."""
        return not self.rounds.is_open and 1 not in self._used_here

    def is_awaited_again(self, bucket: int, param: torch.Tensor) -> bool:
        """Not in the same round: `complete` begins another one if it must."""
        return False

    def complete(self, bucket: int) -> None:
        """Reduce a bucket of which this rank has all gradients, if it is the next one, and others that wait for it."""
        sums = self.sums[bucket]
        again = sums.section is not None
        if again:
            # It is sent: checkpoints that are recomputed apart share parameters.
            self.rounds.begin_another(bucket)
        reduces = self.rounds.ends_with_pass
        if not (reduces and self._next == bucket):
            sums.collect()
        elif not again:
            self._reduce_next()
        while reduces and self._next < len(self.sums) and not self.rounds.awaited[self._next].left():
            self._reduce_next()

    def end_pass(self) -> None:
        """Take gradients that the next pass would add to in the parameters' own type."""
        for sums in self.sums:
            if not sums.accumulates_in_place:
                sums.collect()

    def begin_round(self) -> Set[int]:
        """Have every bucket take gradients; sums of earlier rounds are added to theirs."""
        if self._is_awaited or self._in_order:
            self._await_all()
        for sums in self.sums:
            sums.open()
        self._next = 0
        return _NONE

    def _reduce_next(self) -> None:
        sums = self.sums[self._next]
        self._next += 1
        trains = 1 in self.rounds.trains[self._next - 1]
        if not sums.is_agreed:
            if trains:
                sums.collect()
                sums.keeps = self._keeps = True
            return
        if trains:
            flat, section = sums.complete(), sums.own_section
        else:
            bucket, section = sums.bucket, None
            flat = torch.zeros(bucket.layout.numel, dtype=bucket.grad_dtype, device=bucket.flat.device)
        sums.was_summed, sums.stands_aside = True, not trains
        self._is_awaited = True
        if section is None:
            # The memory of the bucket is given back.
            section = flat.new_empty(sums.bucket.layout.section)
        sums.section = section
        given_back = () if sums.keeps_memory and trains else (flat, section)
        with self.channel.after_compute(*given_back, sums.carried):
            sums.work = self.ranks.reduce_scatter(section, flat, mean=sums.comes_averaged)
            if self._in_order:
                self._finish(sums)
        if not sums.keeps_memory and trains:
            sums.let_go()

    def _finish(self, sums: GradientBucket) -> None:
        """What remains once the sums over the ranks that split the state, which are on their way, are there."""
        sums.work.wait()
        sums.work = None
        section = sums.section
        assert section is not None
        if self.ranks.copies > 1:
            self.ranks.add_copies(section, mean=sums.comes_averaged)
        if self.options.average and not sums.comes_averaged and self.ranks.count > 1:
            section.div_(self.ranks.count)
        if sums.carried is not None:
            section.add_(sums.carried)
            sums.carried = None

    def end_round(self) -> None:
        """Reduce the buckets that are left."""
        while self._next < len(self.sums):
            self._reduce_next()
        if not any(0 in sums.filled for sums in self.sums):
            self._used_here[:] = self._all_used
        else:
            for sums, places in zip(self.sums, self._places):
                for place, is_there in zip(places, sums.filled):
                    self._used_here[place] |= is_there
        self._used_is_due = self.ranks.count > 1
        self.rounds.end()
        self._rounds += 1
        self.summed_in_graph = is_capturing()

    def _send_used(self, captures: bool) -> None:
        """Tell the other ranks what this one has used, once for each step, and with what it will step."""
        # After the sums, which a rank without a backward joins at its step.
        # Not in backward, where nothing runs in order: another optimizer's may come first on another rank.
        self._used_is_due = False
        digest = HyperparameterDigest.PARTS
        with self.channel.after_compute(self.used, self._used_sent):
            if self._used_here != self._used_known:
                self._used_known = bytes(self._used_here)
                source = torch.tensor(list(self._used_known), dtype=torch.float32, device="cpu")
                if self.used.is_cuda:
                    source = source.pin_memory()
                self._used_sent[digest : digest + len(source)].copy_(source, non_blocking=True)
            if not captures:
                self.digest.write(self._used_sent[:digest])
            self.used.copy_(self._used_sent)
            ranks = self.ranks.in_steps
            # Ranks that step another optimizer may have begun sums that this rank never joins: compared before these
            # are waited for.
            ranks.begin_to_add(self.used).wait()
            if ranks.copies > 1:
                ranks.add_copies(self.used)
            if not captures:
                self.digest.receive(self.used[:digest])

    def _await_all(self) -> None:
        # In this order on every rank: copies exchange sections here.
        for sums in self.sums:
            if sums.work is not None:
                self._finish(sums)
        if self._in_order:
            self.channel.join()
        self._is_awaited = False

    def finish(self, captures: bool) -> tuple[int, bytes, tuple[bool, ...]]:
        """Have the summed gradients of every bucket; those of one that does not train are None. Without gradients.

        Gives the sum of the parameters' versions, which of them train, and of which any rank had a gradient.
        """
        versions, has_gradients, trains = self.rounds.survey(self.params)
        begins = not self.rounds.is_open and (not self._rounds or (has_gradients and self._was_given()))
        if begins:
            self.begin_round()
        if begins or self.rounds.is_open:
            self.rounds.note_trains()
            self.end_round()
        if self._used_is_due or self.ranks.count == 1:
            self.digest.trains = self._with_kept(trains) if self._keeps else trains
        if self._used_is_due:
            self._send_used(captures)
        if not captures and self.ranks.count > 1:
            try:
                self.digest.check()
            except ValueError:
                self._used_is_due = True  # the next `finish` asks again, on all ranks
                raise
        if self._is_awaited or self._in_order:
            self._await_all()
        return versions, trains, self._all_have if 0 not in self._used_here else self._had_gradients()

    def _with_kept(self, trains: bytes) -> bytes:
        """Which parameters train, and those that did when gradients were kept."""
        kept = {place for sums, places in zip(self.sums, self._places) if sums.keeps for place in places}
        trained = zip(itertools.chain(*self._places), self.rounds.trained)
        kept.intersection_update(place for place, one in trained if one)
        return bytes(one | (place in kept) for place, one in enumerate(trains))

    def follow_trains(self) -> None:
        """After `finish`, on ranks that agree on what trains: sums up what was kept of what was thawed."""
        trained, self.rounds.trains = self.rounds.trains, [b"\1"] * len(self.sums)
        for number, (sums, places) in enumerate(zip(self.sums, self._places)):
            if sums.stands_aside:
                sums.section = None
            begins, sums.keeps = not sums.is_agreed, False
            sums.is_agreed = any(self.digest.trains[place] for place in places)
            if begins and sums.is_agreed:
                self._next = number
                self._reduce_next()
        self.rounds.trains, self._keeps = trained, False
        self.trains = self.digest.trains
        if self._is_awaited or self._in_order:
            self._await_all()

    def _was_given(self) -> bool:
        """Whether gradients were set by hand since the last round."""
        given = (sums.bucket.params for sums in self.sums if sums.bucket.trains and not sums.keeps)
        return any(param.grad is not None for params in given for param in params)

    def _had_gradients(self) -> tuple[bool, ...]:
        """For each parameter whether any rank had a gradient of it."""
        # The host looks at the device only if this rank had none for a parameter that trains.
        had = list(map(bool, self._used_here))
        # What is frozen by now may have had a gradient on another rank.
        trained = {place for place, one in zip(itertools.chain(*self._places), self.rounds.trained) if one}
        unsure = [
            place
            for place, has_one in enumerate(had)
            if not has_one and (place in trained or self.params[place].requires_grad)
        ]
        if unsure and self.ranks.count > 1:
            require(not is_capturing(), "a parameter has no gradient here, and only the device knows of other ranks")
            counts = self.used[HyperparameterDigest.PARTS :].tolist()
            for place in unsure:
                had[place] = counts[place] > 0
        return tuple(had)

    @gradientless
    def reset(self) -> None:
        """Drop the gradients of every parameter, those on their way too."""
        if self.rounds.ends_with_pass:
            # A backward pass was broken off; other ranks may be further in this round.
            self.end_round()
        self._await_all()
        rounds, summed = self._rounds, [(sums.was_summed, sums.keeps) for sums in self.sums]
        self.forget()
        # A rank that drops its gradients alone must not begin a round that the others have behind them, and takes part
        # where they gather.
        self._rounds = rounds
        for sums, (was_summed, keeps) in zip(self.sums, summed):
            sums.was_summed, sums.keeps = was_summed, keeps
            self._keeps |= keeps
            for param in sums.bucket.params:
                param.grad = None

    def forget(self) -> None:
        """After a step: the gradients are used up."""
        for sums in self.sums:
            sums.forget()
        self._used_here[:] = self._none_used
        self._rounds = self._next = 0
        self._keeps = False
        if self.rounds.is_open:
            self.rounds.end()
        self.rounds.trained = b""
        self.summed_in_graph = False
        if not self.rounds.is_native:
            self.rounds.count_faster()
