"""What ``lab.compare`` and ``lab.profile`` return: times with parity, coverage and memory beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cglab.graphs.coverage import Coverage
from cglab.lab.views import draw
from cglab.measure.ab import ABResult
from cglab.measure.parity import Parity
from cglab.measure.trace import Trace

if TYPE_CHECKING:
    import pandas

TAPE_NOTE = "Recorded on the CPU tape: times show that it works, not what a CUDA graph gains."


@dataclass(frozen=True)
class Comparison:
    """Arms of one technique, measured in turns on the same work.

    Attributes:
        technique: the toggle.
        workload: batch, context and bucket of the step.
        recorder: ``cuda`` or ``tape``.
        times: seconds of a step, by arm.
        parity: captured against padded eager, by captured arm: bitwise, or what differs.
        coverage: captured and eager steps, by arm.
        memory: rows of the bucket ledger, by arm.
    """

    technique: str
    workload: dict[str, Any]
    recorder: str
    times: ABResult
    parity: dict[str, Parity]
    coverage: dict[str, Coverage]
    memory: dict[str, list[dict[str, Any]]]

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

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            "technique": self.technique, "workload": self.workload, "recorder": self.recorder, "note": self.note,
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
        workload: batch, context and bucket.
        traces: by arm.
    """

    technique: str
    workload: dict[str, Any]
    traces: dict[str, Trace]

    def as_frame(self) -> pandas.DataFrame:
        """One row an arm: launches, kernels, busy time, gaps."""
        import pandas

        return pandas.DataFrame([{"arm": arm, **trace.as_dict()} for arm, trace in self.traces.items()])

    def timeline(self) -> Any:
        """The arms above each other on one time axis, a plotly figure."""
        return draw("timeline", self)
