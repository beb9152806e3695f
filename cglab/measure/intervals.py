"""Half-open time intervals on a line, in any unit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import inf

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order; intervals that touch become one, empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length(disjoint: Iterable[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def within(point: float, ordered: Sequence[Interval]) -> bool:
    """Whether ``point`` lies in any of the disjoint intervals, which are in order; both ends are included."""
    index = bisect_right(ordered, (point, inf)) - 1
    return index >= 0 and point <= ordered[index][1]
