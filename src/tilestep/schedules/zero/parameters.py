"""Updated parameters on their way from the rank that has updated them to all others, while the next forward runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ...compat import is_capturing, is_compiled, version_of
from ...placement import ARRIVED, PeerMemory
from ...runtime.segment import Segment, TileRange
from ...tensor_watch import SAME, Watch, sum_of_versions
from ..guards import guard_model, guard_sharers
from ..side_stream import Mark, SideStream
from .buckets import Bucket, Options

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
        self.is_pending = False
        self._channel = channel
        self._work: Any = None
        self._travel: list[tuple[Bucket, torch.Tensor]] = []
        self.mark: Mark | None = None  # after it in the line of communication, where that is a stream

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
        """Begin, in the stream of communication."""
        self.is_pending = True
        if self.theirs and self.peers is not None:
            # One by one: copies of whole ranges between GPUs are the copy engines' work, and not that of a kernel.
            for own, other in self.theirs:
                own.copy_(other)
        else:
            wholes, sections = self._as_they_are or self._all_sent()
            self._work = self.buckets[0].ranks.all_gather(wholes, sections)

    def end(self) -> None:
        """After `begin`, in the same stream: from here on it is there, and what it was read from may be written."""
        peers = self.peers if self.theirs else None
        if peers is not None:
            # No rank writes to a section that another rank has not read.
            peers.meet()
            self._work = ARRIVED
        if self._channel.in_order:
            self._arrive()
            self.mark = self._channel.next_mark(self.mark)

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
        own = bucket.section_of(whole)
        own.copy_(bucket.updated)
        self._travel.append((bucket, whole))
        return whole, own

    def _arrive(self) -> None:
        self._work.wait()
        self._work = None
        for bucket, travelled in self._travel:
            bucket.flat.copy_(travelled)
        self._travel.clear()

    def wait(self) -> None:
        """Let the current stream, or the host, wait for the buckets."""
        if self.mark is not None:
            self._channel.wait_for(self.mark)
            return
        if self._work is not None:
            self._arrive()
        self.is_pending = False

    def wait_on_host(self) -> None:
        """Let the host wait too."""
        self.wait()
        if self.mark is not None:
            self.mark.event.synchronize()
        self.is_pending = False

    def finish_in_graph(self) -> None:
        """Have nothing wait for it outside the graph that it is in."""
        if self._work is not None:
            self._arrive()
        self.mark = None
        self.is_pending = False


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


_MOST_RANGES = 64
"""Launches that an update is cut into at most."""


_Cuts = weakref.WeakKeyDictionary[Segment, list[tuple[GatherGroup, range]]]
"""For each segment runs of its tensors, each with the group that it is in, in the order of the groups."""


class UpdateInParts:
    """Makes an update part by part, in the order in which buckets are gathered; each is gathered once it is updated.

    The parts run one after the other where the whole would: what comes after a step comes after all of them. So it is
    where the next forward waits for everything. Where it waits for the first group alone, gathers cost less beside it
    than beside an update, which waits for memory too.
    """

    def __init__(self, sync: ParameterSync, bucket_of: Callable[[torch.Tensor], Bucket | None]) -> None:
        # Whose method it is has the placement, which has this: a circle would keep state until garbage is collected.
        self._sync, self._bucket_of = sync, weakref.WeakMethod(bucket_of)
        self._segments: list[weakref.ref[Segment]] = []
        self._cuts: _Cuts | None = None
        """For each segment how it is cut, once it was; none where one of them cannot be."""
        self._left: dict[GatherGroup, int] | None = None
        """How many runs each group still waits for, while an update is open."""
        self._waiting: list[GatherGroup] = []

    def take(self, segments: Sequence[Segment]) -> None:
        """Have the tile passes of a new plan's segments come here, if all of them can be cut."""
        able = all(
            segment.can_be_cut and segment.streamer is None and segment.steps_in_one_pass for segment in segments
        )
        self._segments = [weakref.ref(segment) for segment in segments] if able else []
        self._cuts = None
        for segment in segments if able else ():
            segment.run_in_parts = self.run

    def _cut_all(self) -> _Cuts:
        groups, cuts, bucket_of = self._sync.order(), _Cuts(), self._bucket_of()
        for reference in self._segments:
            segment = reference()
            if segment is None or bucket_of is None:
                return _Cuts()
            buckets = [bucket_of(entry.param) for entry in segment.entries]
            placed = [groups[bucket] for bucket in buckets if bucket is not None]
            if len(placed) < len(buckets):
                return _Cuts()
            group_of = dict(placed)
            runs = sorted(_runs([number for number, _ in placed]), key=lambda run: run[0])
            cuts[segment] = [(group_of[number], tensors) for number, tensors in runs]
        return cuts if sum(map(len, cuts.values())) in range(2, _MOST_RANGES + 1) else _Cuts()

    @contextmanager
    def around(self, which: bytes) -> Iterator[None]:
        """A block that updates these buckets: what it has done is gathered while it goes on, if all is waited for."""
        groups: Sequence[GatherGroup] = ()
        if self._segments and self._sync.waits_for_all:
            if self._cuts is None:
                self._cuts = self._cut_all()
            groups = self._sync.begin_parts(which) if self._cuts else ()
        if not groups or self._cuts is None:
            yield
            return
        self._waiting, self._left = list(groups), dict.fromkeys(groups, 0)
        for cut in self._cuts.values():
            for group, _ in cut:
                if group in self._left:
                    self._left[group] += 1
        try:
            yield
        except BaseException:
            self._sync.end_parts()
            raise
        finally:
            self._left = None

    def run(self, segment: Segment, index: int) -> None:
        """Run the tile pass of a segment."""
        cut = None if self._left is None or self._cuts is None else self._cuts.get(segment)
        if self._left is None or cut is None or segment.taps is not None:
            segment.tile_pass(index)
            return
        if not segment.tile_ranges:
            first = [*segment.tiles.first_tile.tolist(), segment.tiles.count]
            segment.set_tile_ranges([TileRange(range(first[run.start], first[run.stop]), run) for _, run in cut])
        for position, (group, _) in enumerate(cut):
            segment.run_tile_range(index, position)
            if group in self._left:
                self._left[group] -= 1
            while self._waiting and not self._left[self._waiting[0]]:
                self._sync.gather_part(self._waiting.pop(0))


def _runs(numbers: Sequence[int]) -> list[tuple[int, range]]:
    """Equal numbers that stand side by side, with their places.

    Example:
        >>> _runs([3, 3, 5, 3])
        [(3, range(0, 2)), (5, range(2, 3)), (3, range(3, 4))]
    """
    runs: list[tuple[int, range]] = []
    for place, number in enumerate(numbers):
        if runs and runs[-1][0] == number:
            runs[-1] = (number, range(runs[-1][1].start, place + 1))
        else:
            runs.append((number, range(place, place + 1)))
    return runs


class ParameterSync:
    """Gathers buckets after a step; looking a parameter up in its module waits for its bucket alone."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket], options: Options, channel: SideStream) -> None:
        self._channel = channel
        self._overlaps = options.overlap_param_sync
        self.params: list[torch.Tensor] = []
        self._updates: dict[int, int] = {}
        """How often each bucket was updated, by id: as often `note_update` has counted a version of its parameters."""
        self._buckets: list[Bucket] = []
        self._groups: list[GatherGroup] = []
        self._of: dict[int, GatherGroup] = {}
        self.is_pending = False  # whether a bucket may still be on its way
        self._which = b""  # for each bucket a one if it was updated the last time, else a zero
        self._updated: list[Bucket] = []
        self._updated_groups: list[GatherGroup] = []
        self._begun: list[GatherGroup] = []
        """The groups of this step whose gathers have begun while it is still updating others."""
        self._unmet: GatherGroup | None = None
        """The group among them that the other ranks may still be reading."""
        self._is_whole = is_compiled(model)
        self.compiled = False
        """Whether compiled code uses parameters outside of a compiled module: it takes them without looking them up."""
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
        self._of.update(own)
        self.fixed = Watch(self.params, fixed=True)
        self.is_exact = any(bucket.exact is not None for bucket in self._buckets)
        self._updates.update((id(bucket), 0) for bucket in buckets)
        self._note_writes()
        if self._overlaps:
            guard_model(model, self, lambda param: id(param) in own)
            guard_sharers(self)

    def knows(self, param: Any) -> bool:
        """Whether something is a parameter of a bucket."""
        return id(param) in self._of

    def wait(self, param: Any) -> None:
        """Wait for the bucket of a parameter if that is still on its way."""
        group = self._of.get(id(param))
        if group is None or not group.is_pending:
            return
        if group.mark is not None:
            self._channel.wait_for(group.mark)
        else:
            group.wait()
            self._count_pending()

    def wait_all(self) -> None:
        """Wait for every bucket that is still on its way."""
        if not self.is_pending:
            return
        pending = [group for group in self._groups if group.is_pending]
        marks = [group.mark for group in pending if group.mark is not None]
        # Not that of the last group: if it trains no more it is of an earlier step.
        last = max(marks, key=lambda mark: mark.place, default=None)
        if last is None:
            for group in pending:
                group.wait()
        else:
            # They arrive in order: with the last one all of them are there.
            self._channel.wait_for(last)
            if last.has_passed:
                for group in pending:
                    group.is_pending = False
        self._count_pending()

    def order(self) -> dict[Bucket, tuple[int, GatherGroup]]:
        """For each bucket its group, and which of all groups that is."""
        return {bucket: (number, group) for number, group in enumerate(self._groups) for bucket in group.buckets}

    def _count_pending(self) -> None:
        self.is_pending = any(group.is_pending for group in self._groups)

    def wait_on_host(self) -> None:
        """Let the host wait too: what begins now need not know that buckets were on their way."""
        for group in self._groups:
            if group.is_pending:
                group.wait_on_host()
        self.is_pending = False

    def _note_updated(self, which: bytes) -> None:
        self._which = which
        self._updated = [bucket for bucket, one in zip(self._buckets, which) if one]
        self._updated_groups = [group for group in self._groups if group.choose(self._updated)]

    def gather(self, which: bytes | None = None, captures: bool | None = None) -> None:
        """After a step: let every rank have the parameters that the others have updated."""
        which = b"\1" * len(self._buckets) if which is None else which
        if which != self._which:
            self._note_updated(which)
        self.is_pending = True
        if self._begun:
            with self._channel.after_compute():
                for group in self._updated_groups[len(self._begun) :]:
                    self._gather_next(group)
                self._end_last()
            self._begun = []
        else:
            with self._channel.after_compute() if self._channel.in_order else _NOTHING:
                for peers in dict.fromkeys(group.peers for group in self._updated_groups if group.theirs):
                    if peers is not None:
                        peers.meet()
                for group in self._updated_groups:
                    group.begin()
                    if self._channel.in_order or group.theirs:
                        group.end()
        self._count_update()
        if is_capturing() if captures is None else captures:
            self._join_graph()
        elif self.compiled or not self._overlaps:
            self.wait_all()

    @property
    def waits_for_all(self) -> bool:
        """Whether nothing that follows a step begins before all of it is there."""
        return self.compiled or self._is_whole or not self._overlaps

    def begin_parts(self, which: bytes) -> Sequence[GatherGroup]:
        """Before an update that may be made part by part: the groups that it brings, in the order to gather them.

        None where some are sent and others fetched, or lie in several memories: ranks must meet in one order, however
        each of them makes the update.
        """
        if which != self._which:
            self._note_updated(which)
        return self._updated_groups if len({group.peers for group in self._updated_groups}) == 1 else ()

    def gather_part(self, group: GatherGroup) -> None:
        """Gather a group whose update has been asked for, in the same order on every rank."""
        self.is_pending = True
        self._begun.append(group)
        with self._channel.after_compute():
            self._gather_next(group)

    def _gather_next(self, group: GatherGroup) -> None:
        # Ranks meet as often as for an update in one piece, which others may make: where all of them have updated a
        # group, all of them have read the one before it.
        peers = group.peers
        if self._unmet is not None:
            self._unmet.end()
        elif peers is not None:
            peers.meet()
        group.begin()
        self._unmet = group
        if peers is None:
            self._end_last()

    def _end_last(self) -> None:
        if self._unmet is not None:
            self._unmet.end()
        self._unmet = None

    def end_parts(self) -> None:
        """After an update that was made part by part, or one that failed: nothing is left to meet for."""
        with self._channel.after_compute():
            self._end_last()
        self._begun = []

    def note_update(self) -> None:
        """What was computed from the old values must not be differentiated, as after any step."""
        self._note_updated(bytes(bucket.trains for bucket in self._buckets))
        self._count_update()

    def _count_update(self) -> None:
        for bucket in self._updated:
            self._updates[id(bucket)] += 1
        if len(self._updated) == len(self._buckets):
            self.fixed.count_writes(self.params)
            self.versions += len(self.params)
        else:
            written = [param for bucket in self._updated for param in bucket.params]
            torch.autograd.graph.increment_version(written)
            self.versions += len(written)

    def _join_graph(self) -> None:
        """In a CUDA graph what follows waits for all buckets: what uses them later knows nothing of the graph."""
        for group in self._groups:
            group.finish_in_graph()
        self._channel.join()
        self.is_pending = False

    def _written_by_others(self) -> list[int]:
        """For each parameter how many of its versions no update has counted, in the order of the buckets."""
        return [version_of(param) - self._updates[id(bucket)] for bucket in self._buckets for param in bucket.params]

    def _note_writes(self) -> None:
        self.versions = sum_of_versions(self.params)
        self._others = self._written_by_others()

    def written(self, versions: int | None = None) -> list[torch.Tensor]:
        """The parameters that other code has written to since the last call; their values are taken over."""
        # Call it without gradients.
        moved: set[int] = set()
        if self.fixed.look() != SAME:
            moved = {id(param) for bucket in self._buckets for param in bucket.take_back()}
            self.fixed = Watch(self.params, fixed=True)
        for bucket in self._buckets:
            # No version counts what is written through `param.data`.
            bucket.follow_writes()
        versions = sum_of_versions(self.params) if versions is None else versions
        if versions == self.versions and not moved:
            return []
        before = self._others
        self._note_writes()
        counts = zip(self.params, before, self._others)
        return [param for param, old, new in counts if old != new or id(param) in moved]

    def describe_gathers(self) -> list[str]:
        """How updated parameters come to the other ranks, a line for each way."""
        lines: dict[str, None] = {}
        for bucket in self._buckets:
            dtype = str(bucket.dtype).removeprefix("torch.")
            if bucket.peers is not None and bucket.sync_dtype == bucket.dtype:
                lines[f"{dtype}: ranks fetch it from each other's memory by copy engines"] = None
            else:
                reason = bucket.unshared or "it is converted on the way"
                lines[f"{dtype}: the process group's all-gathers send it ({reason})"] = None
        return list(lines)
