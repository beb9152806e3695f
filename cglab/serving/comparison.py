"""What a comparison of servers found: by point and measure, with the rule's error rate, beside published figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Final

from cglab.measure.ab import ABResult, judge
from cglab.measure.statistics import FEWEST_INSTANCES, THRESHOLD, false_positive_rate
from cglab.serving.benchmark import PointResult
from cglab.serving.parity import ServerParity
from cglab.serving.scrape import Scrape, graph_share
from cglab.serving.workload import Workload, require_equal_payloads

if TYPE_CHECKING:
    import pandas

MEASURES: Final[Mapping[str, str]] = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
"""The times that are judged, by the name of their samples; less is better."""


@dataclass(frozen=True)
class Turn:
    """One instance of one arm: a server from its start to its end.

    Attributes:
        arm: its name.
        instance: which of the arm's, from 0.
        points: results by workload, as far as it came.
        before: facts when it was healthy; None if it never was.
        after: facts after the last point; None if it did not come so far.
        started_s: seconds until it was healthy.
        occupancy: forward occupancy by point, percent; None where the forwards are not timed.
        error: what ended it early; empty if nothing did.
        overruled: flags of toggles that the server took back, with what it made of them.
    """

    arm: str
    instance: int
    points: tuple[PointResult, ...] = ()
    before: Scrape | None = None
    after: Scrape | None = None
    started_s: float | None = None
    occupancy: dict[str, float | None] = field(default_factory=dict)
    error: str = ""
    overruled: Mapping[str, str] = field(default_factory=dict)

    @property
    def passes(self) -> dict[str, int] | None:
        """Forward passes by mode, while it was driven; None where that is not known."""
        return None if self.before is None or self.after is None else self.after.passes_since(self.before)

    @property
    def in_flight(self) -> int | None:
        """Requests that the server still had at the end."""
        return None if self.after is None else self.after.in_flight


@dataclass(frozen=True)
class ServerComparison:
    """All turns of a comparison.

    Attributes:
        arms: their names, the base first.
        workloads: the points.
        turns: in the order in which they were taken.
        parity: of each other arm against the base, by its name.
        published: by point, then by measure: the source's own base, other value and change in percent.
    """

    arms: tuple[str, ...]
    workloads: tuple[Workload, ...]
    turns: tuple[Turn, ...]
    parity: Mapping[str, ServerParity] = field(default_factory=dict)
    published: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    @property
    def order(self) -> str:
        """The turns that were taken, as letters: ``ABBAAB``."""
        return "".join(chr(ord("A") + self.arms.index(turn.arm)) for turn in self.turns)

    @property
    def instances(self) -> int:
        """Instances of the arm that has fewest, those that failed left out."""
        return min(len(self.of(arm)) for arm in self.arms)

    @property
    def false_positive_rate(self) -> float:
        """How often S3's rule flags equal arms at so many instances."""
        return false_positive_rate(max(self.instances, 1))

    @property
    def failed(self) -> dict[str, str]:
        """Errors by arm."""
        return {turn.arm: turn.error for turn in self.turns if turn.error}

    def of(self, arm: str) -> list[Turn]:
        """The whole turns of an arm."""
        return [turn for turn in self.turns if turn.arm == arm and not turn.error]

    @property
    def overruled(self) -> dict[str, dict[str, str]]:
        """By arm, flags of its toggles that its servers took back: such an arm is not what its name says."""
        return {turn.arm: dict(turn.overruled) for turn in self.turns if turn.overruled}

    @property
    def incomplete(self) -> dict[str, dict[str, str]]:
        """By point, then by arm: requests that did not come to their end, where there are any.

        What the others took is no measure of the arm, which did less than it was asked: such a point has no verdict.
        """
        found: dict[str, dict[str, str]] = {}
        for arm, point in ((turn.arm, point) for turn in self.turns for point in turn.points):
            if point.latency.completed < point.workload.load.count:
                told = f"{point.latency.completed} of {point.workload.load.count} requests completed"
                found.setdefault(point.workload.name, {}).setdefault(arm, told)
        return found

    def result(self, workload: str, measure: str) -> ABResult:
        """One measure at one point, by S3's rule; undecided where a request of the point failed.

        Args:
            workload: name of a point.
            measure: one of :data:`MEASURES`.

        Raises:
            InputError: if the arms were sent different requests.
        """
        found: dict[str, list[PointResult]] = {
            arm: [
                point
                for turn in self.turns
                if turn.arm == arm
                for point in turn.points
                if point.workload.name == workload
            ]
            for arm in self.arms
        }
        payloads = {
            f"{arm}-{number}": each.payload
            for arm, all_of in found.items()
            for number, each in enumerate(all_of, 1)
        }
        if payloads:  # none, where no server came so far
            require_equal_payloads(payloads)
        samples = {
            arm: [[value / 1e3 for value in each.samples()[measure]] for each in results]
            for arm, results in found.items()
        }
        order = tuple((turn.instance, turn.arm) for turn in self.turns)
        rate = self.false_positive_rate
        errors = {**self.incomplete.get(workload, {}), **self.failed}
        return ABResult(judge(samples, errors), order, THRESHOLD, self.instances, rate)

    def rows(self) -> list[dict[str, Any]]:
        """One row a point, measure and arm; the source's own figures beside the ratio.

        Times in milliseconds; rates in tok/s for a user and for a GPU, medians over instances; ``graph_share`` over
        all passes of the phase; errors and requests in flight are sums.
        """
        rows = []
        for workload in self.workloads:
            for measure, title in MEASURES.items():
                for arm in self.result(workload.name, measure).arms:
                    theirs = self.published.get(workload.name, {}).get(measure, {})
                    base = arm.name == self.arms[0]
                    rows.append(
                        {
                            "point": workload.name, "measure": title, "arm": arm.name,
                            "ms": None if arm.median is None else arm.median * 1e3,
                            "change_percent": None if arm.ratio is None else (arm.ratio - 1) * 100,
                            "verdict": arm.verdict,
                            "published_ms": theirs.get("base" if base else "other"),
                            "published_percent": None if base else theirs.get("change"),
                            **self._rates(arm.name, workload.name),
                        }
                    )  # fmt: skip
        return rows

    def as_frame(self) -> pandas.DataFrame:
        """:meth:`rows` as a frame."""
        import pandas

        return pandas.DataFrame(self.rows(), dtype=object)

    def shares(self) -> dict[str, dict[str, float | None]]:
        """Share of passes that replayed a graph, by arm, then by phase; the mean over instances."""
        return {
            arm: {
                phase: _mean([graph_share(turn.passes, phase) for turn in self.of(arm)])
                for phase in ("prefill", "decode")
            }
            for arm in self.arms
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for ``--json``."""
        return {
            "arms": list(self.arms), "order": self.order, "instances": self.instances,
            "false_positive_rate": self.false_positive_rate if self.instances >= FEWEST_INSTANCES else None,
            "threshold": THRESHOLD, "failed": self.failed,
            "incomplete": self.incomplete, "overruled": self.overruled, "rows": self.rows(),
            "graph_share": self.shares(), "parity": {arm: each.as_dict() for arm, each in self.parity.items()},
            "captures": {arm: self._captures(arm) for arm in self.arms},
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"order {self.order}; {len(self.workloads)} points"]
        lines += ["\n  ".join(f"{arm} failed: {error}".splitlines()) for arm, error in self.failed.items()]
        lines += [
            f"{arm} is not what its toggles say: SGLang made {flag} {made} by itself; its log tells why"
            for arm, flags in self.overruled.items()
            for flag, made in flags.items()
        ]
        lines += [
            f"{arm} at {point}: {told} in an instance, so nothing is concluded there"
            for point, by_arm in self.incomplete.items()
            for arm, told in by_arm.items()
        ]
        lines += [f"parity of {arm} with {self.arms[0]}: {each}" for arm, each in self.parity.items()]
        for arm, by_phase in self.shares().items():
            told = ", ".join(f"{phase} {share:.0%}" for phase, share in by_phase.items() if share is not None)
            lines.append(f"{arm}: passes that replayed a graph: {told or 'not known'}")
        lines.append(_rule(self.instances))
        return "\n".join(lines)

    def _rates(self, arm: str, workload: str) -> dict[str, Any]:
        found = [
            (turn, point)
            for turn in self.turns
            if turn.arm == arm
            for point in turn.points
            if point.workload.name == workload
        ]
        each = [point.latency for _, point in found]
        return {
            "user_tok_s_p50": _median([one.user_tok_s.p50 for one in each]),
            "user_tok_s_p90": _median([one.user_tok_s.p90 for one in each]),
            "tok_s_per_gpu": _median([one.total_tok_s_per_device for one in each]),
            "accept_length": _median([point.accept_length for _, point in found]),
            "occupancy_percent": _median([turn.occupancy.get(workload) for turn, _ in found]),
            "errors": sum(one.errors for one in each),
            "in_flight": _sum([turn.in_flight for turn, _ in found]),
        }

    def _captures(self, arm: str) -> dict[str, float | None]:
        first = next(
            (turn.before for turn in self.turns if turn.arm == arm and turn.before is not None), None
        )
        return {} if first is None else first.metrics()


def _rule(instances: int) -> str:
    if instances < FEWEST_INSTANCES:
        return f"{instances} instances of each arm: no verdict, which takes {FEWEST_INSTANCES}; the rule is S3's."
    return (
        f"A difference counts from {THRESHOLD:.0%} where instances do not overlap; with {instances} instances that "
        f"errs in {false_positive_rate(instances):.1%} of equal pairs."
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
