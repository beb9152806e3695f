"""Reads torch.profiler's Chrome traces with CUDA graphs in mind.

A graph launch is one host call whose kernels have no CPU operation of their own: all of them carry its
correlation id. Tools that look for one CPU op a kernel report idle time that is not there, or drop the
kernels (B83). Here device work is what the device recorded, busy is the union of its intervals over all
streams, and a launch without device records makes the trace unreliable: it then has no busy and no idle
figure at all.

Idle time is split by HTA's definitions, on the gap before each piece of work:

* *host wait*: the work was launched after the device had run dry;
* *kernel wait*: launched in time, and the gap is under 30 ns, the cost of two kernels back to back;
* *other*: launched in time, a longer gap (dependencies between streams or graph nodes), or launch unknown.

Time in a window before its first and after its last device work is host wait.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cglab.errors import InputError, no_such
from cglab.measure.intervals import Interval, length, union, within

BACK_TO_BACK_US = 0.03
"""HTA's default for the gap between consecutive kernels, in microseconds."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Anything with a place in time, in microseconds from the start of the trace."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Span(Timed):
    """A host operation, or a user's annotation."""

    thread: str


@dataclass(frozen=True, slots=True)
class HostCall(Timed):
    """A runtime or driver call that gives work to the device."""

    thread: str
    correlation: int | None

    @property
    def graph(self) -> bool:
        """Whether it launches a whole graph."""
        return "GraphLaunch" in self.name


@dataclass(frozen=True, slots=True)
class DeviceEvent(Timed):
    """A kernel, copy or fill on the device.

    Attributes:
        kind: ``kernel``, ``memcpy`` or ``memset``.
        launched: start of the host call that launched it, or None where the trace does not tell.
    """

    kind: str
    stream: int
    correlation: int | None
    launched: float | None


@dataclass(frozen=True, slots=True)
class Idle:
    """Device idle time by cause, in microseconds."""

    host_wait: float
    kernel_wait: float
    other: float

    @property
    def total(self) -> float:
        """All causes together."""
        return self.host_wait + self.kernel_wait + self.other


@dataclass(frozen=True)
class Trace:
    """Device work, launches and host spans of one device, over the whole trace or over its windows.

    Attributes:
        device_events: by start.
        calls: host calls that launched work, by start. Calls that a stream capture recorded are no launches.
        spans: user annotations.
        operations: outermost host operations.
        windows: annotations of the chosen name; empty for the whole trace.
    """

    device_events: tuple[DeviceEvent, ...]
    calls: tuple[HostCall, ...]
    spans: tuple[Span, ...] = ()
    operations: tuple[Span, ...] = ()
    windows: tuple[Interval, ...] = ()

    def __repr__(self) -> str:
        trust = "reliable" if self.reliable else f"unreliable: {self.unreliable}"
        counts = f"{len(self.device_events)} device events, {len(self.calls)} launches, {self.steps} steps"
        return f"Trace({counts}; {trust})"

    def window(self, name: str) -> Trace:
        """The part of the trace that the annotations called ``name`` issued, each one a step.

        Device work belongs to the annotation in which its host call started, however late it ran; work whose
        launch is unknown belongs to the annotation in which it started.

        Raises:
            InputError: if there is no such annotation.
        """
        found = tuple((span.start, span.end) for span in self.spans if span.name == name)
        if not found:
            raise InputError(
                no_such("annotation of the trace", name, sorted({span.name for span in self.spans}))
            )
        return self._restricted(found)

    def _restricted(self, windows: tuple[Interval, ...]) -> Trace:
        inside = union(windows)
        return replace(
            self,
            device_events=tuple(
                e for e in self.device_events if within(e.start if e.launched is None else e.launched, inside)
            ),
            calls=tuple(call for call in self.calls if within(call.start, inside)),
            operations=tuple(span for span in self.operations if within(span.start, inside)),
            windows=tuple(sorted(windows)),
        )

    @cached_property
    def unreliable(self) -> str | None:
        """Why device figures cannot be told from this trace; None where they can (B83)."""
        if not self.device_events:
            return f"no device records ({len(self.calls)} launches)"
        seen = {event.correlation for event in self.device_events} - {None}
        missing = Counter(call.name for call in self.calls if call.correlation not in seen)
        if missing:
            what = ", ".join(f"{count} {name}" for name, count in sorted(missing.items()))
            return f"{missing.total()} of {len(self.calls)} launches have no device records: {what}"
        return None

    @property
    def reliable(self) -> bool:
        """Whether every launch has its device records."""
        return self.unreliable is None

    @property
    def steps(self) -> int:
        """Windows, or 1 for a whole trace."""
        return max(len(self.windows), 1)

    @property
    def launches(self) -> int:
        """Host calls that gave work to the device."""
        return len(self.calls)

    @property
    def graph_launches(self) -> int:
        """Of these, launches of a whole graph."""
        return sum(call.graph for call in self.calls)

    @property
    def kernels(self) -> Counter[str]:
        """Kernels, copies and fills that ran on the device, by name."""
        return Counter(event.name for event in self.device_events)

    @cached_property
    def extents(self) -> list[Interval]:
        """Where time is counted: each window and the device work that outlasts it, or the whole trace."""
        if not self.windows:
            everything: list[Timed] = [*self.device_events, *self.calls, *self.operations]
            return [(min(e.start for e in everything), max(e.end for e in everything))] if everything else []
        work = [
            (e.start if e.launched is None else min(e.launched, e.start), e.end) for e in self.device_events
        ]
        return union((*self.windows, *work))

    @property
    def wall_us(self) -> float:
        """Length of the extents. Profiling slows the host down, so an unprofiled step may take less."""
        return length(self.extents)

    def streams(self) -> list[int]:
        """Streams that ran work."""
        return sorted({event.stream for event in self.device_events})

    def busy_us(self, stream: int | None = None) -> float | None:
        """Time with device work: the union of its intervals, on all streams or one. None if unreliable."""
        if self.unreliable is not None:
            return None
        return length(union((e.start, e.end) for e in self.device_events if stream in (None, e.stream)))

    def gaps(self, stream: int | None = None) -> list[tuple[Interval, str]] | None:
        """Idle stretches of the extents and their cause, on all streams or one. None if unreliable."""
        if self.unreliable is not None:
            return None
        events = [event for event in self.device_events if stream in (None, event.stream)]
        starts = [event.start for event in events]
        found = []
        for low, high in self.extents:
            idle_from = low
            for event in events[bisect_left(starts, low) : bisect_right(starts, high)]:
                if event.start > idle_from:
                    cause = "host_wait" if idle_from == low else _cause(event, idle_from)
                    found.append(((idle_from, event.start), cause))
                idle_from = max(idle_from, event.end)
            if high > idle_from:
                found.append(((idle_from, high), "host_wait"))
        return found

    def idle(self, stream: int | None = None) -> Idle | None:
        """Idle time by cause; its total is wall minus busy. None if unreliable."""
        gaps = self.gaps(stream)
        if gaps is None:
            return None
        causes = ("host_wait", "kernel_wait", "other")
        return Idle(*(sum(end - start for (start, end), why in gaps if why == cause) for cause in causes))

    def mean_gap_us(self) -> float | None:
        """Mean idle time between the pieces of device work of a step, its lead and tail left out.

        None if unreliable, or with fewer than two pieces a step.
        """
        gaps, nodes = self.gaps(), len(self.device_events) - len(self.extents)
        if gaps is None or nodes < 1:
            return None
        edges = {edge for extent in self.extents for edge in extent}
        return sum(end - start for (start, end), _ in gaps if start not in edges and end not in edges) / nodes

    def rows(self, step: int | None = None) -> list[dict[str, Any]]:
        """Bars of a timeline: ``lane``, ``name``, ``kind``, ``start_us`` from the beginning, ``duration_us``.

        Args:
            step: only the work of this window, from 0; all of it otherwise. Thousands of bars make a plot
                slow.

        Raises:
            InputError: if there is no such window.
        """
        if step is not None:
            if not 0 <= step < len(self.windows):
                raise InputError(f"no step {step} in the trace; it has {len(self.windows)} windows")
            return self._restricted((self.windows[step],)).rows()
        origin = self.extents[0][0] if self.extents else 0.0
        bars: list[tuple[str, str, Timed]] = [
            *((f"operations {span.thread}", "operation", span) for span in self.operations),
            *((f"launches {call.thread}", "launch", call) for call in self.calls),
            *((f"stream {event.stream}", event.kind, event) for event in self.device_events),
        ]
        return [
            {
                "lane": lane,
                "name": bar.name,
                "kind": kind,
                "start_us": bar.start - origin,
                "duration_us": bar.end - bar.start,
            }
            for lane, kind, bar in bars
        ]

    def as_dict(self) -> dict[str, Any]:
        """Figures per step for a record; device figures are None, with the reason, if unreliable."""
        busy, idle, steps = self.busy_us(), self.idle(), self.steps
        return {
            "steps": steps,
            "reliable": self.reliable,
            "unreliable": self.unreliable,
            "wall_us": self.wall_us / steps,
            "launches": self.launches / steps,
            "graph_launches": self.graph_launches / steps,
            "kernels": len(self.device_events) / steps if self.reliable else None,
            "busy_us": None if busy is None else busy / steps,
            "idle_us": None if idle is None else idle.total / steps,
            "host_wait_us": None if idle is None else idle.host_wait / steps,
            "kernel_wait_us": None if idle is None else idle.kernel_wait / steps,
            "other_us": None if idle is None else idle.other / steps,
            "mean_gap_us": self.mean_gap_us(),
        }


def _cause(event: DeviceEvent, idle_from: float) -> str:
    if event.launched is None:
        return "other"
    if event.launched > idle_from:
        return "host_wait"
    return "kernel_wait" if event.start - idle_from < BACK_TO_BACK_US else "other"
