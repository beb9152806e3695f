"""What ``lab.load`` returns: a closed-loop load as its users saw it, with coverage and forward occupancy beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cglab.engine.engine import Engine
from cglab.engine.generation import StepRecord
from cglab.engine.load import Load, LoadResult, drive
from cglab.engine.requests import Event
from cglab.engine.segments import Segment
from cglab.errors import InputError
from cglab.graphs.coverage import Coverage
from cglab.lab.comparison import TAPE_NOTE
from cglab.lab.views import draw
from cglab.measure.latency import Latency, latency
from cglab.measure.occupancy import OccupancyMeter, Scrapes, occupancy, occupancy_by_kind
from cglab.measure.parity import Parity, compare_tokens
from cglab.runners.base import Runner, coverages

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class LoadRun:
    """One run of a load.

    Attributes:
        model: name or folder.
        arms: the toggle's value by phase.
        device: type of the device, ``cuda`` or ``cpu``.
        result: what was sent, when each request advanced, and its new tokens.
        latency: percentiles and rates.
        coverage: captured and eager steps by phase, with reasons.
        steps: every step that was computed, a shared prefix's own included.
        segments: its timed forwards, in order.
        occupancy: forward occupancy of the whole run, percent; None without a timed forward.
        occupancy_by_kind: of prefill and decode apart.
        gauge: the same as SGLang's gauge tells it, scraped at its interval.
        captured_buckets: buckets recorded within the run, on their first use: it waited for them.
    """

    model: str
    arms: Mapping[str, str]
    device: str
    result: LoadResult
    latency: Latency
    coverage: Mapping[str, Coverage]
    steps: tuple[StepRecord, ...]
    segments: tuple[Segment, ...]
    occupancy: float | None
    occupancy_by_kind: Mapping[str, float]
    gauge: Scrapes
    captured_buckets: int

    @property
    def note(self) -> str:
        """What a reader must know before comparing times; empty if nothing."""
        waited = (
            f"{self.captured_buckets} buckets were captured on first use within the run, which waited: run it again."
            if self.captured_buckets
            else ""
        )
        return f"{TAPE_NOTE if self.device == 'cpu' else ''} {waited}".strip()

    def parity(self, other: LoadRun) -> Parity:
        """The tokens of this run against those of another arm's, request by request.

        Raises:
            InputError: if they were not asked the same, or no request got a token.
        """
        if self.result.payload != other.result.payload:
            raise InputError(
                "the two runs were sent different requests; compare runs of one and the same load"
            )
        return compare_tokens(self.result.outputs, other.result.outputs)

    def as_frame(self) -> pandas.DataFrame:
        """One row a measure of latency: measure, unit, p50, p90, samples."""
        return self.latency.as_frame()

    def coverage_frame(self) -> pandas.DataFrame:
        """One row a phase: arm, steps, captured, eager, forward occupancy in percent, reasons."""
        import pandas

        return pandas.DataFrame(
            {
                "phase": phase, "arm": self.arms[phase], "steps": each.steps, "captured": each.captured,
                "eager": each.eager, "occupancy": self.occupancy_by_kind.get(phase),
                "reasons": ", ".join(each.reasons).lower(),
            }
            for phase, each in self.coverage.items()
        )  # fmt: skip

    @property
    def title(self) -> str:
        """What was run, in one line."""
        load = self.result.load
        return f"{load.count} requests to {Path(self.model).name}, {load.concurrency} in flight"

    def occupancy_frame(self, windows: int = 40) -> pandas.DataFrame:
        """One row a window of the run: start and end in seconds, forward occupancy by phase and in all, percent.

        Args:
            windows: into how many, all of one length.

        Raises:
            InputError: for no window, or a run in which nothing was sent.
        """
        import pandas

        run = _window(self.result)
        if windows < 1 or run is None:
            raise InputError(
                f"{windows} windows of a run of {self.result.seconds} s; give at least 1 and a load"
            )
        start, length = run[0], (run[1] - run[0]) / windows
        edges = [(start + index * length, start + (index + 1) * length) for index in range(windows)]
        return pandas.DataFrame(
            {
                "start_s": low - start, "end_s": high - start,
                **occupancy_by_kind(self.segments, low, high), "all": occupancy(self.segments, low, high),
            }
            for low, high in edges
        )  # fmt: skip

    def plot_occupancy(self, windows: int = 40) -> Any:
        """Forward occupancy over time, by phase, a plotly figure."""
        return draw("occupancy", self, windows=windows)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            "model": self.model, "arms": dict(self.arms), "device": self.device, "note": self.note,
            "load": self.result.load.as_dict(), "payload": self.result.payload, "latency": self.latency.as_dict(),
            "coverage": {phase: each.as_dict() for phase, each in self.coverage.items()},
            "occupancy": self.occupancy, "occupancy_by_kind": dict(self.occupancy_by_kind),
            "gauge": self.gauge.median, "captured_buckets": self.captured_buckets,
        }  # fmt: skip

    def __str__(self) -> str:
        arms = ", ".join(f"{phase}={arm}" for phase, arm in self.arms.items())
        shown = "none timed" if self.occupancy is None else f"{self.occupancy:.1f} %"
        lines = [f"{Path(self.model).name}, {arms}: {self.latency}", f"forward occupancy {shown}"]
        lines += [f"{phase}: {each}" for phase, each in self.coverage.items()]
        return "\n".join([*lines, self.note]).rstrip()


def run_load(
    engine: Engine,
    load: Load,
    runners: Mapping[str, Runner[Any]],
    *,
    model: str,
    seconds: float | None = None,
    watch: Callable[[], None] | None = None,
) -> LoadRun:
    """Drives a load through an engine and gathers what ``LoadRun`` tells.

    Args:
        engine: with nothing else to do.
        load: what to ask.
        runners: by phase, those that the engine's phases give for this load.
        model: its name.
        seconds: stop after so long.
        watch: called after every step; what it raises ends the run, the engine left idle.

    Raises:
        InputError: as ``engine.load.drive``.
    """
    before = coverages(runners)
    captured = sum(len(runner.captured.ledger) for runner in runners.values())
    meter, segments = OccupancyMeter(), list[Segment]()

    def gather(_: list[Event]) -> None:
        ended = engine.segments.drain()
        segments.extend(ended)
        meter.batch_done(ended, engine.now())
        if watch is not None:
            watch()

    engine.segments.drain()
    with engine.watched() as steps:
        result = drive(engine, load, engine.model.config.vocab_size, seconds=seconds, after_step=gather)
    segments.extend(engine.segments.drain())
    meter.idle(engine.now())
    whole, by_kind = _occupied(segments, result)
    return LoadRun(
        model,
        {phase: runner.backend for phase, runner in runners.items()},
        engine.segments.clock.device.type,
        result,
        latency(result),
        {phase: counts - before[phase] for phase, counts in coverages(runners).items()},
        tuple(steps),
        tuple(segments),
        whole,
        by_kind,
        meter.scrapes(),
        sum(len(runner.captured.ledger) for runner in runners.values()) - captured,
    )


def _window(result: LoadResult) -> tuple[float, float] | None:
    """From the first arrival to the end of the run, by the engine's clock; None if nothing arrived."""
    arrived = [each.arrived_at for each in result.requests if each.arrived_at is not None]
    return (min(arrived), min(arrived) + result.seconds) if arrived and result.seconds > 0 else None


def _occupied(segments: Sequence[Segment], result: LoadResult) -> tuple[float | None, dict[str, float]]:
    """Forward occupancy of the run, whole and by kind; what is idle is left out."""
    window = _window(result)
    if window is None:
        return None, {}
    whole, by_kind = occupancy(segments, *window), occupancy_by_kind(segments, *window)
    shown = {kind: value for kind, value in by_kind.items() if not math.isnan(value)}
    return (None if math.isnan(whole) else whole), shown
