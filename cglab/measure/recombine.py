"""The time of a step that was not recorded, recombined from recorded parts of others: a prediction, no measurement.

A decode step is as long as the longer of two parts that run side by side, and what is left between them:

    step = max(device, host) + gap

* device: the kernels. A toggle does not change them, so any arm's recording of that size tells them, and recorded sizes
  around it tell those of another: along the batch between near neighbours, along the context with the KV bytes read.
* host: what it takes to launch them. A whole graph takes next to nothing; with breaks it is the recorded replay;
  eager it is the number of launches times the cost of one.
* gap: what a step of that arm took beyond the longer part elsewhere: the graph's own launch, its end on the host.

The cost of an eager launch is the host's mood: from recording to recording of one and the same step it differs by more
than any prediction is allowed to be wrong. So a step that the host decides has a range and no number, and the checks
count it as not predicted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from cglab.errors import InputError
from cglab.measure.record import Record

WIDEST = 4
"""Recorded batches that are further apart than this factor tell nothing about one between them: kernels change."""

Size = tuple[int, int]
"""Batch, and context in tokens."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One recorded decode step.

    Attributes:
        arm: ``eager``, ``full`` or ``breakable``.
        batch, context: requests, and tokens of each.
        step_ms: unprofiled time of the step.
        busy_ms: time in which any of its kernels ran.
        launches: calls of the host that launch something.
    """

    arm: str
    batch: int
    context: int
    step_ms: float
    busy_ms: float
    launches: float

    @property
    def size(self) -> Size:
        """Batch and context."""
        return self.batch, self.context


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a step is predicted to take.

    Attributes:
        step_ms: the prediction; None where there is none.
        low_ms, high_ms: the range of a step that the host decides; both ``step_ms`` otherwise.
        device_ms, host_ms, gap_ms: its parts; None where nothing tells them.
        reason: where the device's part is from, or why there is no prediction.
    """

    step_ms: float | None
    low_ms: float | None = None
    high_ms: float | None = None
    device_ms: float | None = None
    host_ms: float | None = None
    gap_ms: float | None = None
    reason: str = ""


def step_points(records: Iterable[Record], model: str, arms: Sequence[str]) -> tuple[StepPoint, ...]:
    """The recorded decode steps of a model that have what a prediction is made of.

    Args:
        records: of GPUs; others are left out.
        model: its name.
        arms: that count.
    """
    found = []
    for each in records:
        step, busy, launches = (each.metrics.get(name) for name in ("step_ms", "busy_ms", "launches"))
        if not (each.shows_graph_times and each.model == model and each.arm in arms):
            continue
        if isinstance(step, float) and isinstance(busy, float) and isinstance(launches, float):
            batch, context = each.workload.get("batch"), each.workload.get("context")
            if isinstance(batch, int) and isinstance(context, int) and step > 0 and batch > 0:  # both divide
                found.append(StepPoint(each.arm, batch, context, step, busy, launches))
    return tuple(found)


def broken_host_ms(records: Iterable[Record], model: str) -> float | None:
    """What the host takes for the replay of a decode step with breaks, in the median of its recordings.

    Args:
        records: of the replay bench.
        model: its name.
    """
    found = [
        total / 1e3
        for each in records
        if (each.model, each.arm, each.workload.get("phase")) == (model, "breakable", "decode")
        and each.shows_graph_times
        and isinstance(total := each.metrics.get("total_us"), float)
    ]
    return median(found) if found else None


@dataclass(frozen=True)
class Recombination:
    """Predicts steps of one model from recorded ones.

    Attributes:
        points: recorded steps; several of one size and arm count as their median.
        broken_host_ms: what the host takes for a replay with breaks; None where that was not recorded.
    """

    points: tuple[StepPoint, ...]
    broken_host_ms: float | None = None

    def without(self, held: Callable[[StepPoint], bool]) -> Recombination:
        """The same that never saw some of the points."""
        return Recombination(tuple(each for each in self.points if not held(each)), self.broken_host_ms)

    @cached_property
    def recorded(self) -> dict[tuple[str, Size], float]:
        """Milliseconds of a step by arm and size."""
        return {
            (arm, size): median(each.step_ms for each in self.points if (each.arm, each.size) == (arm, size))
            for arm, size in dict.fromkeys((each.arm, each.size) for each in self.points)
        }

    @cached_property
    def _device(self) -> dict[Size, float]:
        sizes = dict.fromkeys(each.size for each in self.points)
        return {size: median(each.busy_ms for each in self.points if each.size == size) for size in sizes}

    def predict(self, arm: str, batch: int, context: int) -> Predicted:
        """A step of an arm.

        Args:
            arm: ``eager``, ``full`` or ``breakable``.
            batch: requests.
            context: tokens of each.

        Raises:
            InputError: for another arm.
        """
        if arm not in ("eager", "full", "breakable"):
            raise InputError(f"no parts of {arm!r} are recorded; predict eager, full or breakable")
        device, source = self._kernels(batch, context)
        if device is None:
            return Predicted(None, reason=source)
        if arm == "breakable" and self.broken_host_ms is None:
            return Predicted(
                None, device_ms=device, reason="what the host takes for a replay with breaks is not recorded"
            )
        host, gap = self._host(arm, batch), self._gap(arm)
        if host is None or gap is None:
            return Predicted(
                None, device_ms=device, host_ms=host, reason=f"no other step of {arm} is recorded"
            )
        if arm == "eager" and host > device:
            low, high = self._host_range(batch)
            told = f"the host decides, and its launches took {low / host:.2f} to {high / host:.2f} of their median"
            return Predicted(None, max(low, device), high, device, host, gap, told)
        step = max(device, host) + gap
        return Predicted(step, step, step, device, host, gap, source)

    def _kernels(self, batch: int, context: int) -> tuple[float | None, str]:
        """Kernel time of a size and where it is from; None and why not."""
        known = self._device
        if (batch, context) in known:
            return known[batch, context], "kernels of this size, recorded in another arm"
        by_batch = {size[0]: time for size, time in known.items() if size[1] == context}
        if (found := between(by_batch, batch, WIDEST)) is not None:
            return found, f"between recorded batches at context {context}"
        by_context = {size[1]: time for size, time in known.items() if size[0] == batch}
        if (found := between(by_context, context)) is not None:
            return found, f"between recorded contexts at batch {batch}"
        contexts = [size[1] for size in known]
        base = max(dict.fromkeys(contexts), key=contexts.count, default=0)
        start = between({size[0]: time for size, time in known.items() if size[1] == base}, batch, WIDEST)
        for other in sorted(
            {size[0] for size in known}, key=lambda each: max(each, batch) / min(each, batch)
        ):
            series = {size[1]: time for size, time in known.items() if size[0] == other}
            here, there = between(series, base), between(series, context)
            if start is not None and here is not None and there is not None:
                told = f"kernels at context {base}, and the growth of batch {other} by its KV bytes"
                return start + (there - here) * batch / other, told
        return None, f"nothing is recorded around batch {batch} at context {context}"

    def _launches(self, batch: int) -> float | None:
        """Launches of an eager step at the nearest recorded batch."""
        eager = [each for each in self.points if each.arm == "eager"]
        near = min(eager, key=lambda each: abs(each.batch - batch), default=None)
        return None if near is None else near.launches

    @cached_property
    def _launch_ms(self) -> tuple[float, float, float] | None:
        """Least, median and most of what an eager launch takes where the host decides."""
        costs = [
            each.step_ms / each.launches
            for each in self.points
            if each.arm == "eager" and each.launches and each.step_ms > 1.5 * each.busy_ms
        ]
        return (min(costs), median(costs), max(costs)) if costs else None

    def _host(self, arm: str, batch: int) -> float | None:
        if arm == "full":
            return 0.0
        if arm == "breakable":
            return self.broken_host_ms
        launches, costs = self._launches(batch), self._launch_ms
        return None if launches is None or costs is None else launches * costs[1]

    def _host_range(self, batch: int) -> tuple[float, float]:
        launches, costs = self._launches(batch) or 0.0, self._launch_ms or (0.0, 0.0, 0.0)
        return launches * costs[0], launches * costs[2]

    def _gap(self, arm: str) -> float | None:
        """Median of what recorded steps took beyond the longer of their parts; of ``full`` for an eager step."""
        wanted = "full" if arm == "eager" else arm
        host = self._host(wanted, 1) or 0.0
        gaps = [each.step_ms - max(each.busy_ms, host) for each in self.points if each.arm == wanted]
        return max(median(gaps), 0.0) if gaps else None


def between(known: dict[int, float], at: int, widest: float | None = None) -> float | None:
    """A value between its neighbours, along a straight line; None beyond them, or where they are too far apart.

    Args:
        known: values by place.
        at: the place.
        widest: largest ratio of the neighbours' places; None for any.
    """
    if at in known:
        return known[at]
    places = sorted(known)
    index = bisect_left(places, at)
    if index in (0, len(places)):
        return None
    low, high = places[index - 1], places[index]
    if widest is not None and high > widest * low:
        return None
    return known[low] + (known[high] - known[low]) * (at - low) / (high - low)
