"""Forward occupancy: how much of the wall time lies inside timed forwards, in percent (S4).

GPU seconds inside timed segments over wall seconds of a window, times 100, at most 100; NaN while idle. It is the
share of time that timed forwards *cover*, not how busy the multiprocessors are: gaps between kernels of one forward
count as forward, and GPU work that nobody times counts as idle. S4's five points come from moving a sampler into the
graph, and so into a segment; how many of them are accounting shows only beside the step time.

Two readings of one definition: :func:`occupancy` takes any window of recorded segments and attributes them exactly;
:class:`OccupancyMeter` is SGLang's gauge, which counts a segment in the window in which it was collected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from cglab.engine.segments import Segment
from cglab.errors import InputError

WINDOW_BATCHES = 40
"""Batches after which SGLang's gauge opens its next window (``decode_log_interval``)."""

SCRAPE_SECONDS = 0.5
"""How often SGLang's own check reads the gauge."""

FEWEST_SCRAPES = 5
"""Readings that a median needs there."""


def timed_seconds(segments: Iterable[Segment], start: float, end: float) -> float:
    """Device seconds of the segments that lie within ``start`` to ``end``; a segment across an edge counts in part.

    Args:
        segments: in any order.
        start, end: of the window, seconds by the same clock as the segments.
    """
    return math.fsum(max(min(each.end, end) - max(each.start, start), 0.0) for each in segments)


def occupancy(segments: Iterable[Segment], start: float, end: float) -> float:
    """Forward occupancy of one window.

    Args:
        segments: in any order.
        start, end: of the window, seconds by the same clock as the segments.

    Returns:
        Percent, 0 to 100; NaN if no timed forward ran in the window.

    Raises:
        InputError: for a window without length.
    """
    if not start < end:
        raise InputError(f"a window from {start} to {end} has no length; give an end after its start")
    seconds = timed_seconds(segments, start, end)
    return _percent(seconds, end - start) if seconds > 0 else math.nan


def occupancy_by_kind(segments: Sequence[Segment], start: float, end: float) -> dict[str, float]:
    """Forward occupancy of one window by kind of forward; arguments and errors as in :func:`occupancy`."""
    kinds = sorted({each.kind for each in segments})
    return {kind: occupancy([each for each in segments if each.kind == kind], start, end) for kind in kinds}


def _percent(seconds: float, wall: float) -> float:
    return min(100.0 * seconds / wall, 100.0)


@dataclass(frozen=True, slots=True)
class Scrapes:
    """Readings of the gauge at a fixed interval.

    Attributes:
        every: seconds between readings.
        values: percent; readings while idle (NaN) are left out, as SGLang's check does (P83).
    """

    every: float
    values: tuple[float, ...]

    @property
    def median(self) -> float | None:
        """Median of the readings, percent; None with fewer than ``FEWEST_SCRAPES``."""
        return median(self.values) if len(self.values) >= FEWEST_SCRAPES else None


class OccupancyMeter:
    """SGLang's gauge ``fwd_occupancy``, read at a fixed interval as its own check does.

    A window opens with a batch and lasts ``batches`` of them. After each later batch the gauge is the seconds
    collected since the window opened over the wall seconds since then. The batch that opens a window leaves the
    gauge as it was; going idle sets it to NaN, and the next batch opens a window.

    Args:
        batches: of one window.
        every: seconds between readings.

    Attributes:
        value: the gauge, percent, or NaN.

    Raises:
        InputError: for a window of fewer than two batches, which never gives a value, or an interval of nothing.
    """

    def __init__(self, *, batches: int = WINDOW_BATCHES, every: float = SCRAPE_SECONDS) -> None:
        if batches < 2 or not every > 0:
            raise InputError(f"batches={batches}, every={every}: need at least 2 batches and seconds above 0")
        self.batches, self.every, self.value = batches, every, math.nan
        self._count, self._seconds, self._opened = 0, 0.0, 0.0
        self._readings: list[float] = []
        self._next_reading: float | None = None

    def batch_done(self, segments: Iterable[Segment], now: float) -> None:
        """Takes in one batch.

        Args:
            segments: what has ended since the last call, from ``ForwardSegments.drain()``.
            now: seconds by the engine's clock.
        """
        self._read_until(now)
        self._seconds += math.fsum(each.seconds for each in segments)
        if self._count % self.batches == 0:
            self._opened, self._seconds = now, 0.0
        elif now > self._opened:
            self.value = _percent(self._seconds, now - self._opened)
        self._count += 1

    def idle(self, now: float) -> None:
        """Nothing is left to run: the gauge is NaN until the second batch after this."""
        self._read_until(now)
        self.value, self._count = math.nan, 0

    def scrapes(self) -> Scrapes:
        """The readings so far, the first of them one interval after the first batch."""
        return Scrapes(self.every, tuple(self._readings))

    def _read_until(self, now: float) -> None:
        """Readings that fell due before ``now``, at which the gauge stood as it still does."""
        if self._next_reading is None:
            self._next_reading = now + self.every
        due = max(math.floor((now - self._next_reading) / self.every) + 1, 0)
        self._next_reading += due * self.every
        if not math.isnan(self.value):
            self._readings.extend([self.value] * due)
