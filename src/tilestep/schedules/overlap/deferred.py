"""Updates that a step has decided: looking a parameter up waits for the update of its group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ...combinations import FSDP2, kind_of
from ...compat import before_gathering, opaque
from ...timeline.guards import guard_forwards, guard_model, guard_sharers, unguard_forwards
from ...timeline.side_stream import SideStream
from .groups import Group, Grouping


class _Update:
    """One group's update."""

    def __init__(self, group: Group, work: Callable[[], None], progress: list[int]) -> None:
        self.group, self._progress = group, progress
        self._work: Callable[[], None] | None = work
        self._event: torch.cuda.Event | None = None
        self._waited: set[int] = set()

    def launch(self, lane: SideStream) -> None:
        """Run it, or on a GPU have it run in the lane; only the first call does anything."""
        if self._work is not None:
            self._progress.clear()
            work, self._work = self._work, None
            try:
                _run(work)
            except BaseException as error:
                if not isinstance(error, Exception) and not self._progress:
                    self._work = work  # Ctrl-C before its first pass: the next look-up runs it
                raise
            self._event = lane.mark()

    def wait(self, streams: Sequence[torch.cuda.Stream]) -> bool:
        """Let streams wait for it; whether no other stream has to any more."""
        if self._event is None:
            return True
        for stream in streams:
            if stream.cuda_stream not in self._waited:
                stream.wait_event(self._event)
                self._waited.add(stream.cuda_stream)
        return self._event.query()


@opaque
def _run(work: Callable[[], None]) -> None:
    """Run an update on a CPU, in a forward that may be inference, or that torch.compile is tracing."""
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        work()


class DeferredUpdates:
    """The updates of the last step."""

    # On a GPU they are launched on the lane, in the order in which forward needs them; code that needs one waits for
    # its event. On a CPU nothing runs concurrently: an update runs when its parameters are looked up.

    def __init__(self, model: nn.Module, grouping: Grouping, lane: SideStream) -> None:
        self._grouping = grouping
        self._lane = lane
        self.updates: dict[int, _Update] = {}  # updates that may still have to be run or waited for, by group
        self._made: dict[int, torch.cuda.Event] = {}
        """Events of updates that backward has made, which its step waits for."""
        self._needed: list[int] = []  # groups in the order in which they were asked for since the last step
        self.compiled = False
        """Whether compiled code uses parameters outside of a compiled module: it takes them without looking them up."""
        guard_model(model, self, lambda param: True)
        guard_sharers(self)
        guard_forwards(self)
        # All of them: parameters of others may be added to the optimizer later.
        for module in [module for module in model.modules() if kind_of(module) == FSDP2]:
            if not before_gathering(module, partial(self._gather, module)):
                module.register_forward_pre_hook(lambda *_: self.complete(), prepend=True)

    @property
    def is_pending(self) -> bool:
        """Whether an update may still have to be waited for."""
        return bool(self.updates or self._made)

    def knows(self, param: Any) -> bool:
        """Whether something is a parameter that gets updates."""
        return id(param) in self._grouping.of

    def note(self, group: Group, event: torch.cuda.Event | None) -> None:
        """Note an update that backward has made; looking its parameters up before the step waits for it."""
        if event is not None:
            self._made[group.index] = event

    def joined(self) -> None:
        """Note that the current stream has waited for all updates that backward has made."""
        self._made.clear()

    def follow_views(self, wrapper: nn.Module) -> None:
        """Have updates run that read a DistributedDataParallel's buckets before its backward writes to these again."""
        # Also of what its forward has not used: its backward begins by zeros in the place of such gradients.
        living = weakref.ref(self)

        @opaque
        def complete(wrapper: Any, *_: Any) -> None:
            deferred = living()
            if deferred is not None and deferred.updates and wrapper.gradient_as_bucket_view:
                deferred.complete()

        wrapper.register_forward_hook(complete)

    def order(self, groups: Sequence[Group]) -> list[Group]:
        """Groups in the order in which the last forward needed them; at first from the last to the first."""
        places = {index: place for place, index in enumerate(self._needed)}
        unknown = len(places)
        return sorted(reversed(groups), key=lambda group: places.get(group.index, unknown))

    def put(
        self, works: Sequence[tuple[Group, Callable[[], None]]], *, progress: list[int], at_once: bool = False
    ) -> None:
        """Begin the updates of a step; those of the step before are complete. `progress` is their plan's."""
        self.updates = {group.index: _Update(group, work, progress) for group, work in works}
        self._needed = []
        if self._lane.stream is not None or at_once:
            for update in self.updates.values():
                update.launch(self._lane)

    def settle(self) -> None:
        """Wait for the updates that no later look-up waits for."""
        if self.compiled:
            self.complete()
            # Whatever compiled code does comes after that on this stream.
            self.updates.clear()
            return
        for update in list(self.updates.values()):
            if not update.group.is_guarded:
                self._wait(update.group)

    def wait(self, param: Any) -> None:
        """Let the current stream wait for the update of a parameter; others are there already."""
        group = self._grouping.of.get(id(param))
        if group is None:
            return
        if group.index in self.updates:
            self._wait(group)
        event, current = self._made.get(group.index), self._lane.current()
        if event is not None and current is not None:
            current.wait_event(event)

    def complete(self) -> None:
        """Wait for all of them."""
        for update in list(self.updates.values()):
            self._wait(update.group)

    def end(self) -> None:
        """After the optimizer: let what comes next on the streams that it was used from see all updates."""
        # Not with the model, which with FSDP2 dies when garbage is collected: what is compiled until then would be
        # compiled once more. On a CPU updates that nothing has needed yet still run at their look-ups.
        if self._lane.join_all() or not self.is_pending:
            unguard_forwards(self)

    def _gather(self, module: nn.Module, streams: Sequence[torch.cuda.Stream]) -> None:
        for group in self._grouping.of_module.get(module, ()):
            if group.index in self.updates:
                self._wait(group, streams)

    def _wait(self, group: Group, streams: Sequence[torch.cuda.Stream] | None = None) -> None:
        update = self.updates[group.index]
        if group.index not in self._needed:
            self._needed.append(group.index)
        update.launch(self._lane)
        current = self._lane.current()
        if streams is None:
            streams = [] if current is None else [current]
        if update.wait(streams):
            self.updates.pop(group.index, None)
