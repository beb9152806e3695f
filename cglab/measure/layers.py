"""Which layer a kernel belongs to, read off the order of kernels: layers repeat, whatever the kernels are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST = 0.5
"""Share of the kernels that the repeats must make up; otherwise nothing that repeats is a layer."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The longest stretch of a step in which one sequence of kernels repeats.

    Attributes:
        start: index of its first kernel.
        period: kernels of one layer.
        count: layers.
    """

    start: int
    period: int
    count: int

    def of(self, index: int) -> int | None:
        """The layer of a kernel, from 1; None before and after the layers."""
        at = index - self.start
        return at // self.period + 1 if 0 <= at < self.period * self.count else None


def find_layers(names: Sequence[str]) -> Layers | None:
    """The repeats that cover most kernels, the shortest of those that cover equally many.

    Args:
        names: of the kernels of one stream, in order.

    Returns:
        None where nothing repeats over ``LEAST`` of them.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    kinds, best = np.array([numbers[name] for name in names]), None
    for period in range(1, len(names) // 2 + 1):
        start, run = _longest(kinds[period:] == kinds[:-period])
        count = run // period + 1
        if count > 1 and (best is None or count * period > best.count * best.period):
            best = Layers(start, period, count)
    return best if best is not None and best.count * best.period >= LEAST * len(names) else None


def _longest(same: np.ndarray) -> tuple[int, int]:
    """Start and length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    if not len(lengths):
        return 0, 0
    at = int(np.argmax(lengths))
    return int(starts[at]), int(lengths[at])
