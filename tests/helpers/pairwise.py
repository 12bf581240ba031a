"""Samples of combinations in which every pair of values occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["pairs_of", "pairwise"]

Choice = tuple[Any, ...]


def pairs_of(choice: Choice) -> set[tuple[tuple[int, Any], ...]]:
    """All pairs of places and values in a combination."""
    return set(itertools.combinations(enumerate(choice), 2))


def pairwise(*axes: Iterable[Any], allowed: Callable[[Choice], bool] | None = None) -> list[Choice]:
    """Combinations in which every pair of values occurs that can: each adds as many new pairs as one can.

    Args:
        axes: the values of each place.
        allowed: whether a combination is one; all are if it is not given.

    >>> sorted(pairwise("ab", "xy", "12"))
    [('a', 'x', '2'), ('a', 'y', '1'), ('b', 'x', '1'), ('b', 'y', '2')]
    """
    everything = [choice for choice in itertools.product(*axes) if allowed is None or allowed(choice)]
    random.Random(0).shuffle(everything)
    pairs = {choice: pairs_of(choice) for choice in everything}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(everything, key=lambda choice: len(pairs[choice] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen
