"""Timed forward segments: when each forward of the model ran on the device, and for how long.

An engine puts ``with segments.timed("decode")`` around each forward. On a GPU that records two CUDA events on the
current stream and waits for nothing; on a CPU it reads the wall clock. Forward occupancy (S4) is made of these
segments, so work that nobody times shows as idle there: fold it into a forward, or time it too.

SGLang's device timer has the same rules (P83): segments never nest, and one is read only once its end has passed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cglab.errors import InputError
from cglab.graphs.clocks import DeviceClock, Region


@dataclass(frozen=True, slots=True)
class Segment:
    """One forward that has ended.

    Attributes:
        kind: what ran: ``decode``, ``prefill``, or another phase's name.
        start: when the device began, seconds by the engine's clock.
        seconds: device time, from the first to the last piece of its work.
    """

    kind: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        """When the device was through, seconds by the engine's clock."""
        return self.start + self.seconds


class ForwardSegments:
    """The forwards of one engine, in order.

    Args:
        clock: of the device, as ``clock_for(device)`` gives it.
        now: the engine's clock, seconds; segments are placed on it.
        capacity: most segments kept; the oldest are dropped, and counted, when nobody drains them.

    Attributes:
        dropped: segments lost that way so far.
        watch: called with the kind and region of every forward once it was launched; it may be running still.

    Raises:
        InputError: for a clock that waits for a GPU at both ends, or a capacity below 1.
    """

    def __init__(
        self, clock: DeviceClock, *, now: Callable[[], float] = time.perf_counter, capacity: int = 4096
    ) -> None:
        if clock.name == "wall" and clock.device.type != "cpu":
            raise InputError(
                f"a wall clock waits for {clock.device} around every forward; give clock_for(device) instead"
            )
        if capacity < 1:
            raise InputError(f"a capacity of {capacity} keeps no segment; give at least 1")
        self.clock, self.capacity, self.dropped = clock, capacity, 0
        self.watch: Callable[[str, Region], None] | None = None
        self._running: deque[tuple[str, Region]] = deque()
        self._ended: deque[Segment] = deque()
        self._open = False
        clock.synchronize()  # once: the device is idle, so its clock and the host's meet here
        self._latest_start = now()
        with clock.region() as self._latest:
            pass

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Times the body, one forward; what raises is no segment.

        Args:
            kind: name of the phase.

        Raises:
            InputError: inside another segment, whose time would count twice (P83).
        """
        if self._open:
            raise InputError(f"a {kind!r} segment was opened inside another one; end that one first")
        self._open = True
        try:
            with self.clock.region() as region:
                yield
        finally:
            self._open = False
        self._running.append((kind, region))
        if self.watch is not None:
            self.watch(kind, region)
        self._collect()

    def drain(self) -> list[Segment]:
        """The segments that have ended on the device, in order, once each; later ones stay for the next call."""
        self._collect()
        drained = list(self._ended)
        self._ended.clear()
        return drained

    def _collect(self) -> None:
        while self._running and self._running[0][1].done:
            kind, region = self._running.popleft()
            # From start to start: events tell milliseconds in single precision, too coarse from a far origin.
            self._latest_start += region.since(self._latest)
            self._latest = region
            self._ended.append(Segment(kind, self._latest_start, region.seconds))
        while len(self._ended) + len(self._running) > self.capacity:
            (self._ended or self._running).popleft()
            self.dropped += 1
