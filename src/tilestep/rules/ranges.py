"""The values that hyperparameters may take."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """The values a hyperparameter may take; a tuple hyperparameter is checked entry by entry.

    `or_none` is for a number that a rule can do without: None turns off what it is for.
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    or_none: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'greater than' if self.open_low else 'at least'} {self.low:g}"
        return f"in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}{')' if self.open_high else ']'}"


def at_least(low: float, *, or_none: bool = False) -> Interval:
    """The interval of numbers that are `low` or more; with `or_none` the rule also takes None in place of one.

    Example:
        >>> 0.1 in at_least(0), -0.1 in at_least(0), float("nan") in at_least(0)
        (True, False, False)
    """
    return Interval(low=low, or_none=or_none)


def between(
    low: float, high: float, *, open_low: bool = False, open_high: bool = True, or_none: bool = False
) -> Interval:
    """The interval from `low` to `high`, by default half open; with `or_none` the rule also takes None.

    Example:
        >>> 0.0 in between(0, 1), 1.0 in between(0, 1)
        (True, False)
    """
    return Interval(low=low, high=high, open_low=open_low, open_high=open_high, or_none=or_none)
