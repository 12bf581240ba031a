"""The gradients of one bucket: brought together, completed with zeros, and this rank's section of their sums."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ..accumulating import AwaitedGradients
from ..compat import copy_all, zero_all
from ..tensor_watch import which_train
from .buckets import Bucket, view_of

__all__ = ["Sums", "contiguous_memory"]


class Sums:
    """The gradients of one bucket.

    Args:
        bucket: whose gradients they are.
        memory: flat memory for all of them that is always there, or None to take some for each round.
        awaited: which of them have to come before the bucket is reduced.
    """

    def __init__(self, bucket: Bucket, memory: torch.Tensor | None, awaited: AwaitedGradients) -> None:
        self.bucket = bucket
        self.awaited = awaited
        self._memory = memory
        self.keeps_memory = memory is not None
        """Whether its memory is always there."""
        self.flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        # Of fixed size, and so are their values: what is allocated after a backward has the allocator tidy up what that
        # has freed. Of bytes a copy would be made.
        self.filled = bytearray(len(bucket.params))
        """A one for each parameter whose gradient of this rank is in the bucket, else a zero."""
        self._none, self._all = bytearray(len(self.filled)), bytearray(b"\1" * len(self.filled))
        self.which_train = b""
        """For each parameter a one if it did train when that was last noted, else a zero."""
        self.section: torch.Tensor | None = None
        """This rank's section of the summed gradients, once they are there."""
        self.was_summed = False
        """Whether there was such a section since the last step, which somebody may have dropped."""
        self.carried: torch.Tensor | None = None
        """That of earlier rounds since the last step, to be added to the next one."""
        self.work: Any = None
        self.comes_averaged = False
        """Whether what comes from the other ranks is divided by their number already."""
        self.own_section = None if memory is None else bucket.section_of(memory)
        """Where this rank's section of the sums goes, if the bucket's memory is always there: into it."""
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
        """Begin a round: gradients that are summed up already are kept beside the new ones."""
        if self.section is not None:
            # The section lies where new gradients are going to be written, unless the memory was given back.
            self.carried = self.section.clone() if self._memory is not None else self.section
            self.section = None
        self.filled[:] = self._none

    def note_trains(self) -> None:
        """Note which parameters train, of which gradients are awaited."""
        self.which_train = which_train(self.bucket.params)

    def collect(self, *, ends: bool = False) -> None:
        """Bring gradients into the bucket; backward adds further ones to them there.

        Call it in `torch.no_grad`, as `complete`.

        Args:
            ends: whether there are going to be none, so that parameters keep no gradient.
        """
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
                    # There was none, or somebody has taken it away.
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

    def new_section(self) -> torch.Tensor:
        """Where this rank's section of the sums goes, if the memory of the bucket is given back."""
        assert self.flat is not None
        return self.flat.new_empty(self.bucket.layout.section)

    def let_go(self) -> None:
        """Give back memory that is only taken for a round."""
        if self._memory is None:
            self.flat, self.views = None, []

    def forget(self) -> None:
        """Drop all gradients."""
        self.section = self.carried = None
        self.was_summed = False
        self.filled[:] = self._none
        if not self.keeps_memory:
            self.let_go()


def contiguous_memory(buckets: Sequence[Bucket]) -> list[Any]:
    """Zeroed memory for the gradients of every bucket that trains: one allocation for all of a dtype."""
    found: list[Any] = [None] * len(buckets)
    for dtype in dict.fromkeys(bucket.grad_dtype for bucket in buckets):
        own = [index for index, bucket in enumerate(buckets) if bucket.grad_dtype == dtype and bucket.trains]
        sizes = [buckets[index].layout.numel for index in own]
        if not own:
            continue
        whole = torch.zeros(sum(sizes), dtype=dtype, device=buckets[own[0]].flat.device)
        for index, part in zip(own, whole.split(sizes)):
            found[index] = part
    return found
