"""Gradients that are no longer where they are looked for: a clip of nothing is refused, not done in silence."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from .compat import watch_clips
from .errors import GradientError


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
