"""Sets of moments, as sorted intervals that do not touch: union, difference, cut, length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Interval = tuple[float, float]
Intervals = list[Interval]


def union(*many: Iterable[Interval]) -> Intervals:
    """All moments of any of these, in order.

    Example:
        >>> union([(4.0, 5.0), (0.0, 2.0)], [(1.0, 3.0), (5.0, 6.0), (9.0, 9.0)])
        [(0.0, 3.0), (4.0, 6.0)]
    """
    merged: Intervals = []
    for start, stop in sorted(each for some in many for each in some):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def minus(base: Intervals, taken: Intervals) -> Intervals:
    """The moments of one set that are not in another; both as `union` gives them.

    Example:
        >>> minus([(0.0, 10.0)], [(2.0, 3.0), (9.0, 12.0)])
        [(0.0, 2.0), (3.0, 9.0)]
    """
    left: Intervals = []
    place = 0
    for start, stop in base:
        while place < len(taken) and taken[place][1] <= start:
            place += 1
        at = place
        while start < stop and at < len(taken) and taken[at][0] < stop:
            if taken[at][0] > start:
                left.append((start, taken[at][0]))
            start = max(start, taken[at][1])
            at += 1
        if start < stop:
            left.append((start, stop))
    return left


def overlap(one: Intervals, other: Intervals) -> Intervals:
    """The moments of both sets.

    Example:
        >>> overlap([(0.0, 4.0), (6.0, 9.0)], [(3.0, 7.0)])
        [(3.0, 4.0), (6.0, 7.0)]
    """
    return minus(one, minus(one, other))


def cut(intervals: Intervals, start: float, stop: float) -> Intervals:
    """The part between two moments.

    Example:
        >>> cut([(0.0, 4.0), (6.0, 9.0)], 3.0, 7.0)
        [(3.0, 4.0), (6.0, 7.0)]
    """
    return overlap(intervals, [(start, stop)])


def length(intervals: Intervals) -> float:
    """How long the set is.

    Example:
        >>> length([(0.0, 4.0), (6.0, 9.0)])
        7.0
    """
    return sum(stop - start for start, stop in intervals)


def covers(intervals: Intervals, moment: float) -> bool:
    """Whether a moment is in the set; ends belong to it.

    Example:
        >>> [covers([(0.0, 4.0), (6.0, 9.0)], moment) for moment in (4.0, 5.0, 6.0)]
        [True, False, True]
    """
    place = bisect_right(intervals, (moment, float("inf"))) - 1
    return place >= 0 and moment <= intervals[place][1]
