"""What the buckets of a runner cost: its ledger and measured step times, as the planner takes them.

Between measured sizes costs run along straight lines. Nothing is extrapolated: asking beyond is an error.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cglab.errors import InputError
from cglab.graphs.ledger import CaptureCost
from cglab.graphs.planner import BucketCosts


@dataclass(frozen=True, slots=True)
class Measured:
    """A cost measured at some sizes, and along straight lines between them.

    Attributes:
        what: name, for messages.
        points: cost by size; at least one.
    """

    what: str
    points: Mapping[int, float]

    def __call__(self, size: int) -> float:
        """The cost of a size.

        Raises:
            InputError: beyond the measured sizes.
        """
        sizes = sorted(self.points)
        if not self.covers(size):
            raise InputError(
                f"{self.what} was measured at sizes {sizes[0]} to {sizes[-1]}, not at {size}; measure it there"
            )
        above = sizes[bisect_left(sizes, size)]
        if above == size:
            return self.points[size]
        below = sizes[bisect_left(sizes, size) - 1]
        share = (size - below) / (above - below)
        return self.points[below] * (1 - share) + self.points[above] * share

    def covers(self, size: int) -> bool:
        """Whether the size lies within the measured ones."""
        return min(self.points) <= size <= max(self.points)


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What the buckets of one runner cost, as measured; made by :func:`measured_costs`.

    Attributes:
        step_ms: of a captured step by bucket.
        eager_ms: of an eager step by live size; None if no step may run eager.
        memory_bytes: what a bucket adds after all larger ones, but for what the pool takes for the largest.
        pool_bytes: what the pool takes for the largest bucket; smaller ones fit into it.
        capture_seconds: warm-up and capture by bucket.
    """

    step_ms: Measured
    eager_ms: Measured | None
    memory_bytes: Measured
    pool_bytes: int
    capture_seconds: Measured

    @property
    def maximum(self) -> int:
        """The largest bucket that was captured; larger steps run eager."""
        return max(self.memory_bytes.points)

    def measured(self, size: int) -> bool:
        """Whether a bucket of this size was captured and timed, so that nothing of it is interpolated."""
        return size in self.step_ms.points and size in self.memory_bytes.points

    def covers(self, size: int) -> bool:
        """Whether a bucket of this size lies within what was measured."""
        return self.step_ms.covers(size) and self.memory_bytes.covers(size)

    def at(self, sizes: Iterable[int]) -> BucketCosts:
        """Costs of buckets of these sizes, which become the planner's candidates.

        Raises:
            InputError: for a size beyond the measured ones.
        """
        candidates = sorted(set(sizes))
        return BucketCosts(
            {size: self.step_ms(size) for size in candidates},
            self.eager_ms or (lambda _: math.inf),
            {size: self._bytes(size) for size in candidates},
            {size: self.capture_seconds(size) for size in candidates},
        )

    def _bytes(self, size: int) -> int:
        return math.ceil(self.memory_bytes(size)) + (self.pool_bytes if size == self.maximum else 0)


def measured_costs(
    ledger: Sequence[CaptureCost], step_ms: Mapping[int, float], eager_ms: Mapping[int, float] | None = None
) -> MeasuredCosts:
    """Costs of a runner's buckets.

    A shared pool grows for the largest bucket, which is captured first, and hardly after it. So the growth that the
    largest bucket paid is its own, and no part of it is interpolated to the sizes below.

    Args:
        ledger: of the runner (``runner.captured.ledger``), all its buckets captured in one go, in one pool.
        step_ms: measured milliseconds of a captured step by bucket; the largest bucket must be among them.
        eager_ms: measured milliseconds of an eager step by live size; None forbids eager steps.

    Raises:
        InputError: if nothing was captured or timed, two lines are of one size, or the largest bucket has no time.
    """
    sizes = [line.key.size for line in ledger]
    if not sizes or len(set(sizes)) != len(sizes):
        raise InputError(
            f"a ledger with one line a size is needed, this one has {sorted(sizes)}; "
            "capture the runner's buckets first, one variant at a time"
        )
    largest = max(ledger, key=lambda line: line.key.size)
    if largest.key.size not in step_ms or eager_ms == {}:
        raise InputError(
            f"step_ms has {sorted(step_ms)} and eager_ms {sorted(eager_ms or {})}; "
            f"time the largest bucket, {largest.key.size}, too, and give None where no step may run eager"
        )
    # What the driver gives back meanwhile, of graphs closed before, can make a growth negative; a bucket frees nothing.
    added = {
        line.key.size: max(line.device_bytes, 0) + (line is not largest) * line.pool_bytes for line in ledger
    }
    seconds = {line.key.size: line.warmup_seconds + line.capture_seconds for line in ledger}
    return MeasuredCosts(
        Measured("step_ms", dict(step_ms)),
        None if eager_ms is None else Measured("eager_ms", dict(eager_ms)),
        Measured("memory_bytes", added),
        largest.pool_bytes,
        Measured("capture_seconds", seconds),
    )
