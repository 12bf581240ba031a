"""Gradients between backward passes: accumulation, gradients that were taken away, methods that need none."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch

from .. import native
from ..compat import (
    after_backward,
    backward_pass,
    count_gradient_hooks,
    is_in_another_backward,
    is_last_gradient_hook,
    opaque,
)
from ..tensor_watch import survey
from .side_stream import SideStream

_NONE: Set[int] = frozenset()


class GradientHooks:
    """Calls of a method when backward has accumulated gradients, after all other hooks of their parameters."""

    # The method's object is not kept alive: tensors keep their hooks where Python's garbage collector does not look, so
    # one that holds the parameter, and is held by its hook, would never be let go, and neither would the model.
    # A hook that is registered later changes gradients before they are used too, from the next backward on.

    def __init__(self, announce: Any) -> None:
        self._living, self._function = weakref.ref(announce.__self__), announce.__func__
        self.made: dict[int, tuple[torch.Tensor, Any, Any]] = {}
        """For each parameter, by `id`: itself, what is put around its hook, and the handle."""
        self._count = 0
        self._params: list[torch.Tensor] = []

    def add(self, param: torch.Tensor, through: Any = None) -> None:
        """Have the method called with a parameter; `through` makes what torch calls of what calls the method."""
        hook = partial(_announce, self._living, self._function)
        trains = param.requires_grad
        param.requires_grad_(True)
        handle = param.register_post_accumulate_grad_hook(hook if through is None else through(hook))
        param.requires_grad_(trains)
        self.made[id(param)] = param, through, handle
        self._params.append(param)
        self._count += count_gradient_hooks([param])

    def follow(self, params: Sequence[torch.Tensor]) -> None:
        """Have the method called for these parameters and for no others."""
        self.remove(set(self.made).difference(map(id, params)))
        for param in params:
            if id(param) not in self.made:
                self.add(param)

    def remove(self, params: Iterable[int] | None = None) -> None:
        """End the calls for some parameters, by `id`, or for all."""
        for key in list(self.made) if params is None else params:
            if key in self.made:
                self.made.pop(key)[-1].remove()
        self._recount()

    def is_last(self, param: torch.Tensor) -> bool:
        """Whether a parameter's hook is called after all others; one that is not is the last from the next time on."""
        _, through, handle = self.made[id(param)]
        if is_last_gradient_hook(param, handle):
            return True
        handle.remove()
        self.add(param, through)
        self._recount()
        return False

    def move_last(self) -> Set[int]:
        """Have hooks called after those that were registered since; those that were moved, by parameters' `id`."""
        # Inside of a hook: what is called for its own parameter now stays as it was.
        if count_gradient_hooks(self._params) == self._count:
            return _NONE
        return {key for key, (param, *_) in list(self.made.items()) if not self.is_last(param)}

    def _recount(self) -> None:
        self._params = [param for param, *_ in self.made.values()]
        self._count = count_gradient_hooks(self._params)


@opaque
def _announce(living: Callable[[], Any], function: Callable[[Any, torch.Tensor], None], arrived: torch.Tensor) -> None:
    """Call a method of an object that lives."""
    # In a backward that compiled code runs hooks would be compiled too. `weakref.WeakMethod` is written in Python.
    owner = living()
    if owner is not None:
        function(owner, arrived)


def _nothing(_: object) -> None:
    """What is done where gradients are counted in Python."""


class GradReadiness:
    """Which gradients backward passes have brought: counted in C++ where that is built, else in Python."""

    def __init__(self, tensors: int, *, by_stream: bool) -> None:
        self._module = native.module(tensors)
        self.is_native = self._module is not None  # whether they are counted in C++
        self._pass = None
        self.follow: Callable[[int], object] = _nothing
        """Counts the gradients of another backward pass from now on: of that with this number, see
        `compat.backward_pass`; with -1 of none, and each gradient is a function call."""
        self.know_stream: Callable[[torch.Tensor], object] = _nothing
        """Until the next `follow`, the current stream of a tensor's device is one that is known to write gradients."""
        self.survey: Callable[[list[torch.Tensor]], tuple[int, bool, bytes]] = survey  # `tensor_watch.survey`
        if self._module is not None:
            self._pass = self._module.new_pass(by_stream)
            self.follow = partial(self._module.follow, self._pass)
            self.know_stream = partial(self._module.know_stream, self._pass)
            self.survey = self._module.survey

    def awaited(self) -> AwaitedGradients:
        """For one bucket what it waits for; nothing so far."""
        awaited, module = AwaitedGradients(), self._module
        if module is not None:
            own = module.new_awaited(self._pass)
            functions = {
                "begin": module.await_places,
                "come": module.come,
                "left": module.left,
                "hook": module.new_hook,
            }
            vars(awaited).update({name: partial(function, own) for name, function in functions.items()})
        return awaited


class AwaitedGradients:
    """What one bucket waits for; made by `GradReadiness.awaited`."""

    def __init__(self) -> None:
        self._places: set[int] = set()

    def begin(self, trains: bytes) -> object:
        """Wait for the gradients of a backward pass."""
        self._places = {place for place, one in enumerate(trains) if one}
        return None

    def come(self, place: int) -> int:
        """Note that a gradient has come; how many are awaited now."""
        self._places.discard(place)
        return len(self._places)

    def left(self) -> int:
        """How many gradients are awaited."""
        return len(self._places)

    def hook(self, place: int, function: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """What is to be called when a gradient has come: counts it where that is all there is to do."""
        return function


class GradientRounds:
    """Which gradients backward has brought: whether a bucket is full, and whether the round of all buckets is over."""

    # The owner, which is not kept alive, has these methods. `begin_round` comes before the first gradient of a round is
    # counted and gives parameters that something else announces from now on, by `id`; `is_awaited_again`, when a
    # gradient comes of a bucket that was complete, says whether that waits for all of them once more; `complete` gets a
    # bucket whose last awaited gradient has come. If rounds accumulate, `end_pass` is called after a backward that
    # leaves the round open, and `end_round` is to end it, with `end`, after its last backward or one that was broken
    # off.
    # `stream` is where the owner works: if it is one, streams that write gradients are noted. `announce` is the owner's
    # method that gradients go through first, if not `arrived` itself. If rounds are `eager` a backward outside of
    # `no_sync` ends its own. If they `accumulate`, every backward brings all gradients once more, to be added up; else
    # a round has one of each.

    def __init__(
        self, owner: Any, stream: SideStream, announce: Any = None, *, eager: bool = False, accumulates: bool = False
    ) -> None:
        self._owner: Callable[[], Any] = weakref.ref(owner)
        self._stream, self._eager, self._accumulates = stream, eager, accumulates
        self.hooks = GradientHooks(announce or self.arrived)
        self.elsewhere: set[int] = set()  # parameters whose gradients no hook announces, by `id`
        self._buckets: list[list[torch.Tensor]] = []
        self._params: list[torch.Tensor] = []
        self._place_of: dict[int, tuple[int, int]] = {}  # for each parameter, by `id`, its bucket and its place there
        self._readiness: list[GradReadiness] = []
        self.awaited: list[AwaitedGradients] = []  # for each bucket what it waits for
        self.writers: list[dict[int, torch.cuda.Stream]] = []  # for each bucket the streams that have written gradients
        self.trains: list[bytes] = []  # for each bucket a one for each parameter that trains, else a zero
        self._all_trains = b""
        self.trained = b""  # the same of all buckets, of what has trained since the owner has emptied it
        self.is_native = False  # whether gradients are counted in C++
        self.survey: Callable[[list[torch.Tensor]], tuple[int, bool, bytes]] = survey  # `tensor_watch.survey`
        self.syncing = True  # whether the next backward is the last one before a step
        self.is_open = False
        self.ends_with_pass = False  # whether the round ends with the backward that runs
        self._pass: int | None = None  # the backward pass whose gradients are counted
        self._passes: set[int | None] = set()  # all passes of the same backward
        self._running: set[int | None] = set()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which backward only accumulates."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    @property
    def is_broken(self) -> bool:
        """Whether a backward pass has not come to its end."""
        return bool(self._running)

    def holds(self, param: Any) -> bool:
        """Whether a parameter's gradients are counted."""
        return id(param) in self._place_of

    def leave_out(self, params: Set[int]) -> None:
        """Count gradients of some parameters, by `id`, where `arrived` is called for them, and by no hook."""
        self.elsewhere |= params
        self.hooks.remove(params)

    def count(self, buckets: Iterable[Sequence[torch.Tensor]]) -> None:
        """Count the gradients of these buckets from now on, and of no others."""
        self.hooks.remove()
        self._buckets = list(map(list, buckets))
        self._params = list(itertools.chain(*self._buckets))
        size, by_stream = len(self._params), self._stream.in_order
        first = GradReadiness(size, by_stream=by_stream)
        self.is_native, self.survey = first.is_native, first.survey
        # Counted together, a stream is known for all buckets once it has written a gradient of one.
        apart = not self._accumulates
        self._readiness = [first, *(GradReadiness(size, by_stream=by_stream) for _ in self._buckets[1:] if apart)]
        self.writers = [{} if apart else self._stream.writers for _ in self._buckets]
        self.awaited = [self._readiness[place if apart else 0].awaited() for place in range(len(self._buckets))]
        self._place_of, self._all_trains, self.trained = {}, b"", b""
        for number, (params, awaited) in enumerate(zip(self._buckets, self.awaited)):
            for place, param in enumerate(params):
                self._place_of[id(param)] = number, place
                may_train = (param.is_floating_point() or param.is_complex()) and not param.is_inference()
                if may_train and id(param) not in self.elsewhere:
                    self.hooks.add(param, partial(awaited.hook, place))

    def count_faster(self) -> None:
        """Between rounds: count gradients in C++ if that has been built by now."""
        if native.module(len(self._params)) is not None:
            self.count(self._buckets)

    def arrived(self, param: torch.Tensor, *, is_noted: bool = False) -> None:
        """Count a gradient; `is_noted` for one whose pass was noted when it began to travel."""
        # Called for every parameter in every backward, unless C++ has counted it.
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.arrived(param, is_noted=is_noted)
            return
        owner = self._owner()
        if owner is None:
            # It was dropped in this backward, whose end still knows of the round.
            return
        current = self._pass if is_noted else backward_pass()
        moved = _NONE
        if not self.is_open or current != self._pass:
            moved = self.note_pass(current)
        counted = self._place_of.get(id(param))
        if counted is None:
            # The round began with a plan for groups from which the parameter was removed.
            return
        bucket, place = counted
        if self._stream.stream is not None:
            self._stream.note_current(self.writers[bucket])
            self._readiness[bucket if bucket < len(self._readiness) else 0].know_stream(param)
        # A hook of its own that is still to come changes it, or a reduction: then later code takes what they leave.
        if id(param) in moved:
            return
        awaited = self.awaited[bucket]
        if not awaited.left() and owner.is_awaited_again(bucket, param):
            awaited.begin(survey(self._buckets[bucket]).trains)
        if not awaited.come(place):
            owner.complete(bucket)

    def note_pass(self, current: int | None) -> Set[int]:
        """At the first gradient of a pass: begin a round or go on with it; parameters that are announced later now."""
        # Passes that reentrant checkpoints begin belong to the backward that they are begun in.
        moved = _NONE
        if not (self.is_open and current in self._passes):
            within = is_in_another_backward()
            if begins := not (within and self.is_open and self._passes):
                owner, moved = self._owner(), self.hooks.move_last()
                if self.ends_with_pass:
                    # The pass before was broken off by an error, after more or fewer buckets on every rank.
                    owner.end_round()
                was_open = self.is_open
                if not was_open:
                    moved |= owner.begin_round()
                    self.is_open = True
                if self._accumulates or not was_open:
                    self.note_trains(waits=True)
                self._passes = set()
            self._passes.add(current)
            ends = current is not None and after_backward(partial(self._end_of_pass, current, within))
            if ends:
                self._running.add(current)
            if begins:
                self.ends_with_pass = ends and not within and self.syncing and self._eager
        self._pass = current
        for readiness in self._readiness:
            readiness.follow(-1 if current is None else current)
        return moved

    def note_trains(self, *, waits: bool = False) -> None:
        """Note which parameters train, and wait for the gradients of these."""
        trains = self.survey(self._params)[2]
        if trains != self._all_trains:
            self._all_trains = trains
            self.trains = [survey(params).trains for params in self._buckets]
        if self._accumulates and trains != self.trained:
            self.trained = bytes(map(operator.or_, self.trained, trains)) if self.trained else trains
        if waits:
            for awaited, which in zip(self.awaited, self.trains):
                awaited.begin(which)

    @opaque
    def _end_of_pass(self, number: int, within: bool) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._end_of_pass(number, within)
            return
        self._running.discard(number)
        owner = self._owner()
        if owner is None:
            return
        if self.ends_with_pass and not within:
            owner.end_round()
        elif self.is_open and self._accumulates:
            owner.end_pass()

    def begin_another(self, bucket: int) -> None:
        """End the round in the middle of a backward and begin the next, with a gradient of this bucket in it."""
        owner, current, passes = self._owner(), self._pass, self._passes
        owner.end_round()
        owner.begin_round()
        self.note_trains(waits=True)
        self.is_open, self.ends_with_pass, self._passes, self._pass = True, True, passes, current
        for readiness in self._readiness:
            readiness.follow(-1 if current is None else current)
        self._stream.note_current(self.writers[bucket])

    def end(self) -> None:
        """The round is over: the next gradient begins another one."""
        self.is_open = self.ends_with_pass = False
        self._pass, self._passes = None, set()
        self._running.clear()
        for readiness in self._readiness:
            readiness.follow(-1)
        for writers in self.writers:
            writers.clear()


Given = ParamSpec("Given")
Result = TypeVar("Result")


def gradientless(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """As the decorator `torch.no_grad()`, which makes, enters and leaves a block even inside of another one."""

    @functools.wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return called
