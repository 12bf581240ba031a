"""`Timeline`: counts the gradients of buckets between two steps, and calls a `Row` when a bucket is complete."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from .. import native
from ..compat import (
    after_backward,
    backward_pass,
    count_gradient_hooks,
    is_in_another_backward,
    is_last_gradient_hook,
    opaque,
    watch_clips,
)
from ..devices.garbage import reachable
from ..errors import GradientError
from ..native.table import survey
from ..placement.combinations import follow_wrappers, refuse
from .side_stream import SideStream

NONE: Set[int] = frozenset()
_NO_PASS = -1  # outside of a pass, C++ calls the Python function for every gradient

WAITING, TAKEN, UPDATED = 0, 1, 2
"""The stages of a parameter's gradient since the last step."""


class GradientHooks:
    """Calls a function for each accumulated gradient, after all other hooks of the parameter."""

    # The function must not reference the parameter: the garbage collector does not traverse a tensor's hooks, so the
    # cycle, and the model, would never be freed. From the next backward on, the function also runs after hooks that are
    # registered later.

    def __init__(self, announce: Callable[[torch.Tensor], None]) -> None:
        self._announce = announce
        self.made: dict[int, tuple[torch.Tensor, Any, Any]] = {}
        """By `id` of a parameter: the parameter, the wrapper of its hook, and the handle."""
        self._count = 0
        self._params: list[torch.Tensor] = []

    def add(self, param: torch.Tensor, through: Any) -> None:
        """Register the hook of a parameter; `through` wraps the function."""
        trains = param.requires_grad
        param.requires_grad_(True)
        handle = param.register_post_accumulate_grad_hook(through(self._announce))
        param.requires_grad_(trains)
        self.made[id(param)] = param, through, handle
        self._params.append(param)
        self._count += count_gradient_hooks([param])

    def remove(self, params: Iterable[int] | None = None) -> None:
        """Remove the hooks of some parameters, by `id`, or all hooks."""
        for key in list(self.made) if params is None else params:
            if key in self.made:
                self.made.pop(key)[-1].remove()
        self._recount()

    def move_last(self) -> Set[int]:
        """Move hooks behind later hooks of other code; returns the `id`s of the parameters of moved hooks."""
        # Called inside a hook: autograd still calls the running parameter's hooks in the old order.
        if count_gradient_hooks(self._params) == self._count:
            return NONE
        moved = {key for key, (param, _, handle) in self.made.items() if not is_last_gradient_hook(param, handle)}
        for param, through, handle in [self.made[key] for key in moved]:
            handle.remove()
            self.add(param, through)
        self._recount()
        return moved

    def _recount(self) -> None:
        self._params = [param for param, *_ in self.made.values()]
        self._count = count_gradient_hooks(self._params)


class Awaited:
    """The gradients that a bucket waits for, counted in C++, or in Python until the C++ module is built."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        first: int,
        writers: dict[int, torch.cuda.Stream],
        module: Any = None,
        counted: Any = None,
    ) -> None:
        self.params, self.first = list(params), first  # `first`: the index of the first parameter in all buckets
        self.writers = writers  # the streams that have written gradients, by number
        self.trains = b""  # 1 for each parameter that trains, else 0
        self.places = bytearray(len(self.params))  # 1 for each awaited gradient, else 0
        self._module, self._counted = module, counted
        self.note_stream: Callable[[torch.Tensor], object] = (
            _nothing if module is None else partial(module.note, counted)
        )
        """Tells C++ that the current stream is in `writers`: until the next pass it counts this stream's gradients."""

    def hook(self, place: int, function: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """A hook for the parameter at `place`: in C++ it clears the place, and calls the function only if it must."""
        return function if self._module is None else self._module.new_hook(self._counted, self.places, place, function)


def _nothing(_: object) -> None:
    """Without C++, Python checks the stream of every gradient."""


class Row:
    """The callbacks of a `Timeline`, by which `shard`, `overlap` and `offload` reduce, update or copy buckets."""

    choice: str  # the key in the table of refused combinations, for wrappers of the model
    taken_by: str  # the end of an error message: what took a gradient, and how to clip instead
    refused_as: type[ValueError] = ValueError
    takes = True  # whether it takes gradients from parameters in backward
    updates = False  # whether it updates in backward too
    accumulates = True  # whether a round may have several backwards, whose gradients are summed
    eager = False  # whether a backward outside of `no_sync` ends its round

    def begin(self) -> Set[int]:
        """Begin a round, at its first gradient; returns `id`s of parameters whose hooks do not announce it any more."""
        return NONE

    def ready(self, bucket: int) -> None:
        """Backward has completed the last gradient of a bucket."""
        raise NotImplementedError

    def again(self, bucket: int, param: torch.Tensor) -> bool:
        """After another gradient of a complete bucket: whether the bucket waits for all its gradients again."""
        return True

    def collect(self) -> None:
        """A backward has ended and leaves the round open, for a row that accumulates."""

    def end(self) -> None:
        """End the round, after its last backward or an interrupted backward."""

    def wrapped(self, wrapper: torch.nn.Module) -> None:
        """An allowed wrapper was made around the model or a part of it."""


class Timeline:
    """The gradients of buckets from one step to the next: waiting, ready, then taken or updated by the row."""

    # A round lasts from the first gradient after a step or after the last round, to the row's `end()`. The row owns the
    # timeline, which holds it weakly. For a row that accumulates all buckets share the C++ counter and `writers`: a
    # stream is known for all buckets once it has written a gradient.

    def __init__(self, row: Row, lane: SideStream) -> None:
        self.row: Callable[[], Any] = weakref.ref(row)
        self._lane = lane
        self.hooks = GradientHooks(partial(arrived, weakref.ref(self)))
        self.elsewhere: set[int] = set()  # `id`s of parameters whose gradients no hook announces
        self.buckets: list[Awaited] = []
        self.params: list[torch.Tensor] = []  # the parameters of all buckets
        self.taken = self._none = bytearray()  # the stage of each parameter's gradient
        self.trained = b""  # 1 for each parameter that has trained since the last step, if rounds accumulate
        self.syncing = True  # whether the next backward is the last before a step, outside of `no_sync`
        self.is_open = False
        self.when: Literal["ready", "step"] = "step"  # when the row processes this round's buckets
        self.is_alone = False  # whether no other optimizer takes the same gradients, as far as was checked
        self.survey: Callable[[list[torch.Tensor]], tuple[int, bool, bytes]] = survey  # `native.table.survey`
        self._place_of: dict[int, tuple[int, int, int]] = {}  # by `id`: bucket, index in it, index in `params`
        self._module: Any = None
        self._counted: list[Any] = []  # the C++ counters of a pass
        self._pass: int | None = None  # the backward pass whose gradients are counted
        self._passes: set[int | None] = set()  # all passes of the same backward
        self.running: set[int | None] = set()  # backward passes that have not ended, or were interrupted

    def announce(self, model: torch.nn.Module | None = None) -> None:
        """Check clips of gradients, and new wrappers of the model, from now on."""
        follow_wrappers(self, model)
        for timeline in list(_timelines):
            timeline.is_alone = False
        _timelines.add(self)
        watch_clips(refuse_taken)

    # Taken gradients.

    def holds(self, param: Any) -> bool:
        """Whether a parameter's gradients are counted."""
        return id(param) in self._place_of

    def take(self, param: torch.Tensor, stage: int = TAKEN) -> None:
        """Note that a parameter's gradient was taken."""
        self.taken[self._place_of[id(param)][2]] = stage

    def stage_of(self, param: Any) -> int:
        """The stage of a parameter's gradient."""
        place = self._place_of.get(id(param))
        return WAITING if place is None else self.taken[place[2]]

    def has_taken(self, param: Any) -> bool:
        """Whether the next step reads a parameter's gradient from the row, and not from `grad`."""
        row = self.row()
        return self.stage_of(param) != WAITING and row is not None and (row.updates or param.grad is None)

    def wrapped(self, wrapper: torch.nn.Module, kind: str) -> None:
        """Raise in the constructor of a wrapper that would reduce the gradients again, or too late."""
        row = self.row()
        if row is not None:
            refuse(row.choice, [kind], "the model's new wrapper", row.refused_as)
            row.wrapped(wrapper)

    # Arrived gradients.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which backward only accumulates."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def exclude(self, params: Set[int]) -> None:
        """Remove the hooks of some parameters, by `id`: other code calls `arrived` for them."""
        self.elsewhere |= params
        self.hooks.remove(params)

    def count(self, buckets: Iterable[Sequence[torch.Tensor]]) -> None:
        """Count the gradients of these buckets from now on, instead of earlier buckets."""
        self.hooks.remove()
        listed, stages = list(buckets), {key: self.taken[place] for key, (*_, place) in self._place_of.items()}
        self.params = list(itertools.chain(*listed))
        self.taken = bytearray(stages.get(id(param), WAITING) for param in self.params)
        # Made once: the first allocation of a kilobyte after a backward makes the allocator consolidate freed memory.
        self._none = bytearray(len(self.taken))
        self._module = module = native.module(len(self.params))
        self.survey = survey if module is None else module.survey
        self.buckets, self._counted, self._place_of, self.trained = [], [], {}, b""
        together = self.row().accumulates
        for params in listed:
            if module is not None and not (together and self._counted):
                self._counted.append(module.new_pass(self._lane.in_order))
            writers = self._lane.writers if together else {}
            awaited = Awaited(params, len(self._place_of), writers, module, *self._counted[-1:])
            for place, param in enumerate(params):
                self._place_of[id(param)] = len(self.buckets), place, len(self._place_of)
                may_train = (param.is_floating_point() or param.is_complex()) and not param.is_inference()
                if may_train and param.is_leaf and id(param) not in self.elsewhere:
                    self.hooks.add(param, partial(awaited.hook, place))
            self.buckets.append(awaited)

    def note_pass(self, current: int | None) -> Set[int]:
        """At the first gradient of a pass: begin or continue a round; returns `id`s of parameters of moved hooks."""
        # Passes of reentrant checkpoints belong to the backward that contains them.
        moved, row = NONE, self.row()
        if not (self.is_open and current in self._passes):
            within = is_in_another_backward()
            if begins := not (within and self.is_open and self._passes):
                moved = self.hooks.move_last()
                if row.eager and self.when == "ready":
                    # An error interrupted the last pass, after more or fewer buckets on every rank.
                    row.end()
                was_open = self.is_open
                if not was_open:
                    moved |= row.begin()
                    self.is_open = True
                if row.accumulates or not was_open:
                    self.note_trains(waits=True)
                self._passes = set()
            self._passes.add(current)
            ends = current is not None and after_backward(partial(self._end_of_pass, current, within))
            if ends:
                self.running.add(current)
            if begins and row.eager:
                self.when = "ready" if ends and not within and self.syncing else "step"
        self._pass = current
        for counted in self._counted:
            self._module.note(counted, _NO_PASS if current is None else current)
        return moved

    def note_trains(self, *, waits: bool = False) -> None:
        """Note which parameters train; with `waits`, wait for their gradients."""
        trains = self.survey(self.params)[2]
        if trains != self.trained and self.row().accumulates:
            self.trained = bytes(map(operator.or_, self.trained, trains)) if self.trained else trains
        for awaited in self.buckets:
            awaited.trains = trains[awaited.first : awaited.first + len(awaited.params)]
            if waits:
                awaited.places[:] = awaited.trains

    @opaque
    def _end_of_pass(self, number: int, within: bool) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._end_of_pass(number, within)
            return
        self.running.discard(number)
        row = self.row()
        if row is None:
            return
        if row.eager and self.when == "ready" and not within:
            row.end()
        elif self.is_open and row.accumulates:
            row.collect()

    def restart_round(self, bucket: int) -> None:
        """End the round during a backward, and begin another round with a gradient of this bucket."""
        row, current, passes = self.row(), self._pass, self._passes
        row.end()
        row.begin()
        self.is_open, self.when, self._passes = True, "ready", {*passes, current}
        self.note_pass(current)
        self.note_trains(waits=True)
        self._lane.note_current(self.buckets[bucket].writers)

    def end(self) -> None:
        """End the round: the next gradient begins another round."""
        self.is_open, self.when = False, "step"
        self._pass, self._passes = None, set()
        self.running.clear()
        for counted in self._counted:
            self._module.note(counted, _NO_PASS)
        for awaited in self.buckets:
            awaited.writers.clear()

    def forget(self) -> None:
        """After a step: clear all stages, and count in C++ once the module is built."""
        if self.is_open or self.running:
            self.end()
        self.taken[:] = self._none
        self.trained = b""
        if self._module is None and native.module(len(self.params)) is not None:
            self.count([awaited.params for awaited in self.buckets])


@opaque
def arrived(living: Callable[[], Timeline | None], param: torch.Tensor, *, is_noted: bool = False) -> None:
    """Count a gradient, if the timeline still exists; `is_noted` if `note_pass` has run for its pass."""
    # Called for every parameter in every backward, unless C++ counts it. `opaque`, since compiled code that runs a
    # backward would compile hooks too.
    if torch.is_grad_enabled():
        with torch.no_grad():
            arrived(living, param, is_noted=is_noted)
        return
    timeline = living()
    row = None if timeline is None else timeline.row()
    if timeline is None or row is None or not (timeline.syncing or row.accumulates):
        # The timeline was freed during this backward, or a row without accumulation ignores gradients in `no_sync`.
        return
    current = timeline._pass if is_noted else backward_pass()
    moved = NONE
    if not timeline.is_open or current != timeline._pass:
        moved = timeline.note_pass(current)
    counted = timeline._place_of.get(id(param))
    if counted is None:
        # The parameter was removed from the groups after the round began.
        return
    bucket, place, _ = counted
    awaited = timeline.buckets[bucket]
    if timeline._lane.stream is not None:
        timeline._lane.note_current(awaited.writers)
        awaited.note_stream(param)
    # A later hook of this backward may still change the gradient: then later code takes it.
    if id(param) in moved:
        return
    places = awaited.places
    if 1 not in places and row.again(bucket, param):
        places[:] = survey(awaited.params).trains
    places[place] = 0
    if 1 not in places:
        row.ready(bucket)


_timelines: weakref.WeakSet[Timeline] = weakref.WeakSet()


def refuse_taken(params: Iterable[Any]) -> None:
    """Raise if one of the gradients to be clipped was taken."""
    takers = [timeline for timeline in _timelines if any(timeline.taken)]
    for place, param in enumerate(params) if takers else ():
        for timeline in takers:
            if timeline.has_taken(param):
                raise GradientError(
                    f"the gradient of parameter {place} cannot be clipped now: {timeline.row().taken_by}; nothing was "
                    "changed"
                )


def refuse_taken_by_another(params: Iterable[Any], own: Timeline | None = None) -> None:
    """Raise in a step if another live optimizer has taken the gradients of these parameters without gradients."""
    if not any(any(timeline.taken) for timeline in _timelines if timeline is not own):
        return
    listed = list(params)
    if _another(own, lambda timeline: any(timeline.taken) and any(map(timeline.has_taken, listed))):
        raise GradientError(
            "parameters have no gradient: another sharded, overlapped or offloaded optimizer of these parameters "
            "consumed them in backward; delete it (and its scheduler) before this optimizer steps, or use it"
        )


def refuse_another_taker(own: Timeline) -> None:
    """Raise if another live optimizer takes these gradients in backward too, and one of the two updates there."""

    def consumes_too(timeline: Timeline) -> bool:
        row = timeline.row()
        both = row is not None and row.takes and (row.updates or own.row().updates)
        return both and any(map(timeline.holds, own.params))

    if _another(own, consumes_too):
        raise GradientError(
            "two optimizers consume the gradients of these parameters in backward: delete one optimizer (and its "
            "scheduler) before the other trains"
        )
    own.is_alone = True


def _another(own: Timeline | None, is_meant: Callable[[Timeline], bool]) -> bool:
    # Unreachable timelines that are not collected yet do not count.
    return reachable(lambda: any(is_meant(other) for other in list(_timelines) if other is not own))


Given = ParamSpec("Given")
Result = TypeVar("Result")


def gradientless(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The decorator `torch.no_grad()`, without its cost if gradients are disabled already."""

    @functools.wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return called
