"""Gradients between backward passes: accumulation, gradients that were taken away, methods that need none."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from . import native
from .compat import count_gradient_hooks, is_last_gradient_hook, watch_clips
from .errors import GradientError
from .tensor_watch import survey


class Accumulating:
    """Something that goes on with gradients in backward, except inside of `no_sync`.

    Example:
        >>> looks_at_gradients = Accumulating()
        >>> with looks_at_gradients.no_sync():
        ...     looks_at_gradients.syncing
        False
        >>> looks_at_gradients.syncing
        True
    """

    syncing = True
    """Whether the next backward is the last one before a step."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which backward only accumulates."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before


def announce_gradients(param: torch.Tensor, announce: Any, *told: Any, through: Any = None) -> Any:
    """Have a method called when backward has accumulated a parameter's gradient, as long as its object lives.

    Tensors keep their hooks where Python's garbage collector does not look: who holds the parameter, and is held by its
    hook, would never be let go, and neither would the model.
    """
    living, function = weakref.ref(announce.__self__), announce.__func__

    def hook(arrived: torch.Tensor) -> None:
        # Called for every parameter in every backward; `weakref.WeakMethod` is written in Python.
        known = living()
        if known is not None:
            function(known, *told, arrived)

    trains = param.requires_grad
    param.requires_grad_(True)
    handle = param.register_post_accumulate_grad_hook(hook if through is None else through(hook))
    param.requires_grad_(trains)
    return handle


_NONE: Set[int] = frozenset()


class GradientHooks:
    """Calls of a method when backward has accumulated gradients, after all other hooks of their parameters.

    A hook that is registered later changes gradients before they are used too, from the next backward on.
    """

    def __init__(self) -> None:
        self.made: dict[int, tuple[torch.Tensor, Any, Any, Any, Any]] = {}
        """For each parameter, by `id`: itself, the method (not kept alive), what it is told, and the handle."""
        self._count = 0
        self._params: list[torch.Tensor] = []

    def add(self, param: torch.Tensor, announce: Any, *told: Any, through: Any = None) -> None:
        """Have a method called; arguments as for `announce_gradients`."""
        handle = announce_gradients(param, announce, *told, through=through)
        self.made[id(param)] = param, weakref.WeakMethod(announce), told, through, handle
        self._params.append(param)
        self._count += count_gradient_hooks([param])

    def remove(self, params: Iterable[int] | None = None) -> None:
        """End the calls for some parameters, by `id`, or for all."""
        for key in list(self.made) if params is None else params:
            if key in self.made:
                self.made.pop(key)[-1].remove()
        self._recount()

    def move_last(self) -> Set[int]:
        """Have hooks called after those that were registered since; those that were moved, by their parameters' `id`.

        Inside of a hook: what is called for its own parameter now stays as it was.
        """
        if count_gradient_hooks(self._params) == self._count:
            return _NONE
        moved = {key for key, (param, *_, handle) in self.made.items() if not is_last_gradient_hook(param, handle)}
        for key in moved:
            param, announce, told, through, handle = self.made.pop(key)
            handle.remove()
            self.add(param, announce(), *told, through=through)
        self._recount()
        return moved

    def _recount(self) -> None:
        self._params = [param for param, *_ in self.made.values()]
        self._count = count_gradient_hooks(self._params)


def _nothing(_: object) -> None:
    """What is done where gradients are counted in Python."""


class GradReadiness:
    """Which gradients backward passes have brought: counted in C++ where that is built, else in Python."""

    def __init__(self, tensors: int, *, by_stream: bool) -> None:
        self._module = native.module(tensors)
        self.is_native = self._module is not None
        """Whether they are counted in C++."""
        self._pass = None
        self.follow: Callable[[int], object] = _nothing
        """Counts the gradients of another backward pass from now on: of that with this number, see
        `compat.backward_pass`; with -1 of none, and each gradient is a function call."""
        self.know_stream: Callable[[torch.Tensor], object] = _nothing
        """Until the next `follow`, the current stream of a tensor's device is one that is known to write gradients."""
        self.survey: Callable[[list[torch.Tensor]], tuple[int, bool, bytes]] = survey
        """`tensor_watch.survey`."""
        if self._module is not None:
            self._pass = self._module.new_pass(by_stream)
            self.follow = partial(self._module.follow, self._pass)
            self.know_stream = partial(self._module.know_stream, self._pass)
            self.survey = self._module.survey

    def awaited(self) -> AwaitedGradients:
        """For one bucket what it waits for; nothing so far."""
        return AwaitedGradients() if self._module is None else _CountedNatively(self._module, self._pass)


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


class _CountedNatively(AwaitedGradients):
    """As `AwaitedGradients`, each method a function of the C++ module."""

    def __init__(self, module: Any, pass_: Any) -> None:
        own = module.new_awaited(pass_)
        functions = {"begin": module.await_places, "come": module.come, "left": module.left, "hook": module.new_hook}
        vars(self).update({name: partial(function, own) for name, function in functions.items()})


class TakesGradients(Protocol):
    """Something that takes gradients away before the step."""

    @property
    def has_taken_some(self) -> bool:
        """Whether there are any such gradients now."""

    def has_taken(self, param: Any) -> bool:
        """Whether there is a gradient for the coming step that is no longer in the parameter's `grad`."""

    @property
    def taken_by(self) -> str:
        """Who has taken it, and how to clip then: the end of a sentence."""


_takers: weakref.WeakSet[Any] = weakref.WeakSet()


def announce_taker(taker: TakesGradients) -> None:
    """Have clips of what something takes refused, torch's and a framework's too, as long as it lives."""
    _takers.add(taker)
    watch_clips(refuse_taken)


def refuse_taken(params: Iterable[Any]) -> None:
    """Raise if the gradient of a parameter is to be clipped and was taken."""
    takers = [taker for taker in _takers if taker.has_taken_some]
    if not takers:
        return
    for place, param in enumerate(params):
        for taker in takers:
            if taker.has_taken(param):
                raise GradientError(
                    f"gradients cannot be clipped now, that of parameter {place} for one: {taker.taken_by}; nothing "
                    "was changed"
                )


Given = ParamSpec("Given")
Result = TypeVar("Result")


def gradientless(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """As the decorator `torch.no_grad()`, which makes, enters and leaves a block even inside of another one.

    Example:
        >>> import torch
        >>> gradientless(torch.is_grad_enabled)()
        False
        >>> torch.is_grad_enabled()
        True
    """

    @functools.wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return called
