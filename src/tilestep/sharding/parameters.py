"""Updated parameters on their way from the rank that has updated them to all others, while the next forward runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..compat import is_compiled
from ..engine.capturing import is_capturing
from ..guards import guard_model
from ..tensor_watch import TensorWatch
from .buckets import Bucket, Options
from .streams import Channel

__all__ = ["ParameterSync"]


class _Gather:
    """A bucket that is being gathered."""

    def __init__(self, bucket: Bucket, channel: Channel) -> None:
        self.bucket = bucket
        self.channel = channel
        self.work: Any = None
        self.travels: torch.Tensor | None = None
        self.event: torch.cuda.Event | None = None
        self.waited: set[int] = set()

    def launch(self) -> None:
        bucket = self.bucket
        self.travels = None
        if bucket.sync_dtype == bucket.dtype:
            whole, own = bucket.flat, bucket.updated
        elif not bucket.sync_dtype.is_floating_point:
            # The same bytes, seen as whole numbers.
            whole, own = bucket.flat.view(bucket.sync_dtype), bucket.updated.view(bucket.sync_dtype)
        else:
            whole = torch.empty_like(bucket.flat, dtype=bucket.sync_dtype)
            own = bucket.section_of(whole)
            own.copy_(bucket.updated)
            self.travels = whole
        with self.channel.after_compute(whole):
            self.work = bucket.ranks.all_gather(whole, own)
            if self.channel.in_order:
                self._arrive()
        self.event = self.channel.mark()
        self.waited.clear()

    def _arrive(self) -> None:
        self.work.wait()
        self.work = None
        if self.travels is not None:
            self.bucket.flat.copy_(self.travels)
            self.travels = None

    def wait(self) -> bool:
        """Let the current stream, or the host, wait for the bucket; whether nobody else has to any more."""
        if self.event is None:
            if self.work is not None:
                self._arrive()
            return True
        stream = torch.cuda.current_stream(self.bucket.flat.device)
        if stream.cuda_stream not in self.waited:
            stream.wait_event(self.event)
            self.waited.add(stream.cuda_stream)
        return self.event.query()

    def finish_in_graph(self) -> None:
        """Have nobody wait for it outside the graph that it is in."""
        if self.work is not None:
            self._arrive()
        self.event = None


class ParameterSync:
    """Gathers buckets after a step; whoever looks a parameter up in its module waits for its bucket alone.

    Args:
        model: whose parameters they are.
        buckets: in the order in which backward completes them; the next forward needs the last first.
        options: what `shard` was told.
        channel: where communication runs.
    """

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket], options: Options, channel: Channel) -> None:
        self._channel = channel
        self._overlaps = options.overlap_param_sync
        self.params: list[torch.Tensor] = []
        self._buckets: list[Bucket] = []
        self._gathers: list[_Gather] = []
        self._pending: dict[int, _Gather] = {}
        self._of: dict[int, _Gather] = {}
        self._handles: list[Any] = []
        self.compiled = any(map(is_compiled, model.modules()))
        """Whether compiled code uses the model: it takes parameters without looking them up."""
        self.take_in(model, buckets)

    def take_in(self, model: nn.Module, buckets: Sequence[Bucket]) -> None:
        """Gather further buckets too.

        Args:
            model: whose parameters they have.
            buckets: in the order in which backward completes them.
        """
        gathers = [_Gather(bucket, self._channel) for bucket in reversed(buckets)]
        own = {id(param): gather for gather in gathers for param in gather.bucket.params}
        self.params += [param for bucket in buckets for param in bucket.params]
        self._buckets += buckets
        self._gathers += gathers
        self._of.update(own)
        self._watch = TensorWatch(self.params)
        self._versions = self._version()
        if self._overlaps:
            self._handles += guard_model(model, self, lambda param: id(param) in own)

    @property
    def is_pending(self) -> bool:
        """Whether a bucket may still be on its way."""
        return bool(self._pending)

    def wait(self, param: Any) -> None:
        """Let whoever comes next use a parameter: wait for its bucket if that is still on its way.

        Args:
            param: a parameter; one that is in no bucket, and None, are always there.
        """
        gather = self._of.get(id(param))
        if gather is not None and id(gather) in self._pending and gather.wait():
            self._pending.pop(id(gather), None)

    def wait_all(self) -> None:
        """Wait for every bucket that is still on its way."""
        for key, gather in list(self._pending.items()):
            if gather.wait():
                self._pending.pop(key, None)

    def wait_on_host(self) -> None:
        """Let the host wait too: what begins now need not know that buckets were on their way."""
        for gather in self._pending.values():
            gather.wait()
            if gather.event is not None:
                gather.event.synchronize()
        self._pending.clear()

    def gather(self) -> None:
        """After a step: let every rank have the parameters that the others have updated."""
        for gather in self._gathers:
            if gather.bucket.trains:
                gather.launch()
                self._pending[id(gather)] = gather
        self.note_update()
        if is_capturing():
            self._join_graph()
        elif self.compiled or not self._overlaps:
            self.wait_all()

    def note_update(self) -> None:
        """What was computed from the old values must not be differentiated, as after any step."""
        torch.autograd.graph.increment_version(
            [param for bucket in self._buckets if bucket.trains for param in bucket.params]
        )
        self._versions = self._version()

    def _join_graph(self) -> None:
        """In a CUDA graph what follows waits for all buckets: whoever uses them later knows nothing of the graph."""
        for gather in self._gathers:
            gather.finish_in_graph()
        self._channel.await_communication()
        self._pending.clear()

    def take_back(self) -> None:
        """Let parameters that somebody has moved be views of their buckets again."""
        if not self._watch.same_addresses(self.params):
            for bucket in self._buckets:
                bucket.take_back()
            self._versions = -1

    @torch.no_grad()
    def were_written(self) -> bool:
        """Whether somebody else has written to parameters since the last step; their values are taken over."""
        self.take_back()
        if self._version() == self._versions:
            return False
        for bucket in self._buckets:
            if bucket.exact is not None:
                here = bucket.section_of(bucket.flat)
                sent = bucket.exact.to(bucket.sync_dtype).to(bucket.dtype)
                bucket.exact.copy_(torch.where(sent == here, bucket.exact, here))
        return True

    def _version(self) -> int:
        # Versions only grow: no version has changed if their sum has not.
        return sum([param._version for param in self.params])

    def close(self) -> None:
        """Stop guarding the model's parameters."""
        self.wait_all()
        for handle in self._handles:
            handle.remove()
