"""What ``lab.compare`` and ``lab.profile`` return: times with parity, coverage and memory beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cglab.graphs.coverage import Coverage
from cglab.lab.views import draw
from cglab.measure.ab import ABResult
from cglab.measure.parity import Parity
from cglab.measure.perfetto import perfetto
from cglab.measure.prediction import outcome, predict_gain
from cglab.measure.trace import Trace

if TYPE_CHECKING:
    import pandas

TAPE_NOTE = "CPU tape: the times show that it works; they are no graph speed-ups."


def title_of(technique: str, model: str, workload: Mapping[str, Any]) -> str:
    """A heading: what was run, of which model (a folder's name is enough), at which size."""
    sizes = ("batch", "context", "tokens", "cached", "requests")
    told = ", ".join(f"{name} {workload[name]}" for name in sizes if name in workload)
    return f"One {technique} step of {Path(model).name}, {told}"


@dataclass(frozen=True)
class Comparison:
    """Arms of one technique, measured in turns on the same work.

    Attributes:
        technique: the toggle.
        model: name or folder.
        workload: batch, context and bucket of the step.
        recorder: ``cuda`` or ``tape``.
        times: seconds of a step, by arm.
        parity: captured against padded eager, by captured arm: bitwise, or what differs.
        coverage: captured and eager steps, by arm.
        memory: rows of the bucket ledger, by arm.
    """

    technique: str
    model: str
    workload: dict[str, Any]
    recorder: str
    times: ABResult
    parity: dict[str, Parity]
    coverage: dict[str, Coverage]
    memory: dict[str, list[dict[str, Any]]]

    @property
    def title(self) -> str:
        """What was compared, in one line."""
        return title_of(self.technique, self.model, self.workload)

    @property
    def note(self) -> str:
        """What a reader must know before comparing times; empty on a GPU."""
        return TAPE_NOTE if self.recorder == "tape" else ""

    def as_frame(self) -> pandas.DataFrame:
        """One row an arm: times, parity, coverage, capture cost."""
        frame = self.times.as_frame().set_index("arm")
        frame["parity"] = [
            str(self.parity[a].verdict) if a in self.parity else "reference" for a in frame.index
        ]
        frame["captured"] = [f"{self.coverage[a].captured}/{self.coverage[a].steps}" for a in frame.index]
        frame["reasons"] = [", ".join(self.coverage[a].reasons).lower() for a in frame.index]
        frame["capture_ms"] = [
            sum(r["warmup_ms"] + r["capture_ms"] for r in self.memory[a]) for a in frame.index
        ]
        frame["pool_mb"] = [sum(r["pool_bytes"] for r in self.memory[a]) / 1e6 for a in frame.index]
        return frame.reset_index()

    def plot(self) -> Any:
        """Median step time of each arm with its interval, a plotly figure."""
        return draw("comparison", self)

    def coverage_frame(self) -> pandas.DataFrame:
        """One row an arm: steps, captured, eager, and eager steps by reason."""
        import pandas

        reasons = dict.fromkeys(reason for c in self.coverage.values() for reason in c.reasons)
        return pandas.DataFrame(
            {
                "arm": arm, "steps": c.steps, "captured": c.captured, "eager": c.eager,
                **{reason.lower(): c.reasons.get(reason, 0) for reason in reasons},
            }
            for arm, c in self.coverage.items()
        )  # fmt: skip

    def plot_coverage(self) -> Any:
        """Captured and eager steps of each arm, with reasons, a plotly figure."""
        return draw("coverage", self.coverage)

    def bucket_frame(self) -> pandas.DataFrame:
        """One row a bucket and arm: milliseconds and bytes that it costs."""
        import pandas

        return pandas.DataFrame([{"arm": arm, **row} for arm, rows in self.memory.items() for row in rows])

    def plot_buckets(self) -> Any:
        """Time and memory that each bucket costs, a plotly figure."""
        return draw("bucket_cost", self.memory)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            "technique": self.technique, "model": self.model, "workload": self.workload,
            "recorder": self.recorder, "note": self.note,
            "times": self.times.as_dict(), "parity": {a: p.as_dict() for a, p in self.parity.items()},
            "coverage": {a: c.as_dict() for a, c in self.coverage.items()}, "memory": self.memory,
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"{self.technique}, {self.workload}, recorder {self.recorder}", str(self.times)]
        lines += [f"{arm}: parity {parity}; {self.coverage[arm]}" for arm, parity in self.parity.items()]
        return "\n".join([*lines, self.note]).rstrip()


@dataclass(frozen=True)
class Profile:
    """Traces of one step, by arm, profiled apart from any timing.

    Attributes:
        technique: the toggle.
        model: name or folder.
        workload: batch, context and bucket.
        traces: by arm.
        recorded: device and day of a profile that was loaded; None for one made here.
    """

    technique: str
    model: str
    workload: dict[str, Any]
    traces: dict[str, Trace]
    recorded: str | None = None

    @property
    def title(self) -> str:
        """What was profiled, in one line."""
        return title_of(self.technique, self.model, self.workload) + (
            f" ({self.recorded})" if self.recorded else ""
        )

    def as_frame(self) -> pandas.DataFrame:
        """One row an arm: launches, kernels, busy time, gaps."""
        import pandas

        return pandas.DataFrame([{"arm": arm, **trace.as_dict()} for arm, trace in self.traces.items()])

    def bars(self) -> pandas.DataFrame:
        """One row an event of the last step of each arm: what the timeline draws."""
        import pandas

        rows = [
            {"arm": arm, **row} for arm, trace in self.traces.items() for row in trace.rows(trace.steps - 1)
        ]
        return pandas.DataFrame(rows)

    def timeline(self, window_us: tuple[float, float] | None = None) -> Any:
        """The arms above each other on one time axis, a plotly figure.

        Args:
            window_us: the part of the step to show, in microseconds from its start.
        """
        return draw("timeline", self, window_us=window_us)

    @property
    def length_us(self) -> float:
        """Microseconds from the start of the longest arm's last step to its end."""
        rows = [row for trace in self.traces.values() for row in trace.rows(trace.steps - 1)]
        return max((float(row["start_us"] + row["duration_us"]) for row in rows), default=0.0)

    def perfetto(self) -> bytes:
        """The content of a ``.json.gz`` file that Perfetto opens: the last step of each arm."""
        return perfetto(self.traces)

    def explain(self, comparison: Comparison) -> str:
        """What the eager trace predicts that a graph wins, and what each captured arm gained.

        Args:
            comparison: times of the same step, unprofiled, with the same first arm.
        """
        base, *others = self.traces
        if not self.traces[base].reliable:
            return f"no prediction: the trace has {self.traces[base].unreliable}; profile the step on a CUDA device"
        walls = {arm: (comparison.times[arm].median or 0.0) * 1e6 for arm in self.traces}
        prediction = predict_gain(self.traces[base], wall_us=walls[base])
        gains = [f"{arm}: {outcome(prediction, walls[arm], self.traces[arm])}" for arm in others]
        return "\n".join([str(prediction), *gains])
