"""How the host's part of a step grows with the requests that run and with those that wait. Pure.

A step must touch every request that runs, so its cost is at best ``fixed + each * running``; those that wait need not
be touched at all. Two measures tell whether it is so: calls of Python functions, which are the same on every machine,
and times, in which alone a scan by the interpreter itself would show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import log

import numpy as np

from cglab.errors import InputError

MOST_EXPONENT = 1.25
"""Above it a time counts as more than linear: caches that overflow alone bring it to 1.1."""
MOST_WAITING = 1.25
"""Above it a step counts as slower for those that wait: what noise leaves of a constant."""


@dataclass(frozen=True, slots=True)
class HostGrowth:
    """What a step costs the host by size.

    Attributes:
        fixed_us: without requests, fitted.
        each_us: of each that runs, fitted.
        residual: largest relative difference between a measured time and the line.
        exponent: of the time over the last doubling or so of those that run; 1 is linear.
        waiting_ratio: time with the most that wait over that with none.
        calls_each: Python calls of each that runs.
        calls_linear: whether every request that runs costs the same calls.
        calls_waiting: further calls because of those that wait.
    """

    fixed_us: float
    each_us: float
    residual: float
    exponent: float
    waiting_ratio: float
    calls_each: float
    calls_linear: bool
    calls_waiting: int

    @property
    def least_calls(self) -> bool:
        """No call that a step need not make: linear in those that run, none for those that wait."""
        return self.calls_linear and self.calls_waiting == 0

    @property
    def least_times(self) -> bool:
        """The same by the times."""
        return self.exponent <= MOST_EXPONENT and self.waiting_ratio <= MOST_WAITING


@dataclass(frozen=True, slots=True)
class HostPoint:
    """One measured step: microseconds, and calls of Python functions."""

    us: float
    calls: int


def fit_host_growth(running: Mapping[int, HostPoint], waiting: Mapping[int, HostPoint]) -> HostGrowth:
    """The fit over measured steps.

    Args:
        running: by number of requests that run, with none waiting; three sizes or more.
        waiting: by number that wait, at one number that run; 0 and one more at least.

    Raises:
        InputError: for too few sizes, or a step of no time.
    """
    sizes, queues = sorted(running), sorted(waiting)
    if len(sizes) < 3 or len(queues) < 2 or queues[0] != 0 or any(p.us <= 0 for p in running.values()):
        raise InputError(
            f"running {sizes} and waiting {queues} tell no growth; measure three sizes of the first, none and more "
            "of the second, each with its time"
        )
    times = np.array([running[size].us for size in sizes])
    rows = np.array([(1.0, size) for size in sizes]) / times[:, None]
    fixed, each = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0]
    off = np.abs((fixed + each * np.array(sizes)) / times - 1)
    slopes = {
        (running[large].calls - running[small].calls) / (large - small) for small, large in pairwise(sizes)
    }
    small, large = sizes[-2:]
    first, last = waiting[0], waiting[queues[-1]]
    return HostGrowth(
        fixed_us=float(fixed), each_us=float(each), residual=float(off.max()),
        exponent=log(running[large].us / running[small].us) / log(large / small),
        waiting_ratio=last.us / first.us, calls_each=max(slopes), calls_linear=len(slopes) == 1,
        calls_waiting=max(point.calls for point in waiting.values()) - first.calls,
    )  # fmt: skip
