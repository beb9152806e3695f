"""Forward occupancy of a server under load: its gauge, read again and again while it is driven.

The gauge tells the share of wall time that lay inside timed forwards since it was last told, and nothing when idle. S4
reads it so; what a device does outside of timed segments shows as idle.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from cglab.errors import CglabError
from cglab.measure.occupancy import Scrapes
from cglab.serving.endpoint import Endpoint

INTERVAL: Final = 0.5
TIMER: Final = "SGLANG_ENABLE_METRICS_DEVICE_TIMER"
"""Variable without which a server times no forward."""
# One line of a page that is too long to be parsed twice a second; the first rank speaks.
_GAUGE: Final = re.compile(r"^sglang:fwd_occupancy\{[^}]*\} (\S+)$", re.MULTILINE)


class Watch:
    """What was read so far.

    Args:
        interval: seconds between two reads.
    """

    def __init__(self, interval: float = INTERVAL) -> None:
        self.interval = interval
        self._values: list[float] = []
        self._lock = threading.Lock()

    def add(self, page: str) -> None:
        """Takes the gauge from ``/metrics``; not a number, as when idle, is passed over (P83)."""
        found = _GAUGE.search(page)
        if found is not None and not math.isnan(value := float(found[1])):
            with self._lock:
                self._values.append(value)

    def take(self) -> Scrapes:
        """What was read since the last call, percent."""
        with self._lock:
            taken, self._values = tuple(self._values), []
        return Scrapes(self.interval, taken)


@contextmanager
def watch_occupancy(server: Endpoint, interval: float = INTERVAL) -> Iterator[Watch]:
    """Reads the gauge in a thread of its own until the block ends, or the server does.

    Args:
        server: started with :data:`TIMER` set to 1.
        interval: seconds between two reads.
    """
    watch, ended = Watch(interval), threading.Event()

    def read() -> None:
        while not ended.wait(interval):
            try:
                watch.add(server.get("/metrics").text)
            except CglabError:
                return  # whoever drives the server tells what happened to it

    thread = threading.Thread(target=read, daemon=True, name="occupancy")
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()
