"""Updated parameters on their way from the rank that has updated them to all others, while the next forward runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ...compat import is_capturing, version_of
from ...placement import ARRIVED, PeerMemory
from ...tensor_watch import SAME, Watch, sum_of_versions
from ...timeline.guards import Publication, guard_model, guard_sharers
from ...timeline.side_stream import SideStream, Ticket
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
        self._updates: dict[int, int] = {}
        """How often each bucket was updated, by id: as often `note_update` has counted a version of its parameters."""
        self._buckets: list[Bucket] = []
        self._groups: list[GatherGroup] = []
        self._which = b""  # for each bucket a one if it was updated the last time, else a zero
        self._updated: list[Bucket] = []
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
        self.publication.of.update(own)
        self.fixed = Watch(self.params, fixed=True)
        self.is_exact = any(bucket.exact is not None for bucket in self._buckets)
        self._updates.update((id(bucket), 0) for bucket in buckets)
        self._note_writes()
        if self._overlaps:
            guard_model(model, self.publication, lambda param: id(param) in own)
            guard_sharers(self.publication)

    def _note_updated(self, which: bytes) -> None:
        self._which = which
        self._updated = [bucket for bucket, one in zip(self._buckets, which) if one]
        self._updated_groups = [group for group in self._groups if group.choose(self._updated)]

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
        self._count_update()
        if is_capturing() if captures is None else captures:
            self.publication.wait_in_graph()
        elif self.publication.compiled or not self._overlaps:
            self.publication.wait_all()

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
