"""Gradients that something has taken away before the step: clips of them are refused, and other optimizers' steps."""

from __future__ import annotations

import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..combinations import follow_wrappers, refuse
from ..compat import watch_clips
from ..errors import GradientError


class TakesGradients(ABC):
    """What takes gradients away before the step; clips of them are refused, torch's and a framework's too."""

    taken_by: str  # what has taken a gradient, and how to clip then: the end of a sentence
    choice: str  # what it is in the table of combinations, which says what may wrap the model
    refused_as: type[ValueError] = ValueError
    takes = True  # whether it takes them in backward
    updates = False  # whether it updates in backward too
    is_alone = False  # whether it is known that no other one takes the same gradients

    def announce(self, model: torch.nn.Module | None = None) -> None:
        """Be asked at every clip and told of every wrapper of the model from now on, as long as it lives."""
        follow_wrappers(self, model)
        for taker in list(_takers):
            taker.is_alone = False
        _takers.add(self)
        watch_clips(refuse_taken)

    @abstractmethod
    def holds(self, param: Any) -> bool: ...  # whether it takes a parameter's gradients

    @property
    @abstractmethod
    def has_taken_some(self) -> bool: ...  # whether there are any such gradients now

    @abstractmethod
    def has_taken(self, param: Any) -> bool: ...  # of this parameter, for the coming step

    def wrapped(self, wrapper: torch.nn.Module, kind: str) -> None:
        """Raise, in the constructor of a wrapper that would reduce the gradients as well, or too late."""
        refuse(self.choice, [kind], "the model's new wrapper", self.refused_as)


_takers: weakref.WeakSet[TakesGradients] = weakref.WeakSet()


def refuse_taken(params: Iterable[Any]) -> None:
    """Raise if the gradient of a parameter is to be clipped and was taken."""
    takers = [taker for taker in _takers if taker.has_taken_some]
    if not takers:
        return
    for place, param in enumerate(params):
        for taker in takers:
            if taker.has_taken(param):
                raise GradientError(
                    f"the gradient of parameter {place} cannot be clipped now: {taker.taken_by}; nothing was changed"
                )


def refuse_taken_by_another(params: Iterable[Any], own: TakesGradients | None = None) -> None:
    """Raise in a step if another living optimizer has taken the gradients of these parameters, which have none."""
    if not any(taker.has_taken_some for taker in _takers if taker is not own):
        return
    listed = list(params)

    def has_taken(taker: TakesGradients) -> bool:
        return taker.has_taken_some and any(map(taker.has_taken, listed))

    if _another(own, has_taken):
        raise GradientError(
            "parameters have no gradient: another optimizer of these parameters, which is sharded, overlapped or "
            "offloaded, has taken them in backward; delete it (and its scheduler) before another one steps, or use it"
        )


def refuse_another_taker(params: Iterable[Any], own: TakesGradients) -> None:
    """Raise if another living optimizer takes these gradients in backward too, and one of both updates there."""
    listed = list(params)

    def takes_too(taker: TakesGradients) -> bool:
        return taker.takes and (taker.updates or own.updates) and any(map(taker.holds, listed))

    if _another(own, takes_too):
        raise GradientError(
            "two optimizers of these parameters take their gradients in backward, and one updates there: delete one of "
            "them (and its scheduler) before the other one trains"
        )
    own.is_alone = True


def _another(own: TakesGradients | None, is_meant: Callable[[TakesGradients], bool]) -> bool:
    def there_is_one() -> bool:
        return any(is_meant(taker) for taker in list(_takers) if taker is not own)

    if not there_is_one():
        return False
    # One that nothing else holds any more has no say in later steps.
    gc.collect()
    return there_is_one()
