"""Where a sparse prefill that records its selection too (T9b) wins, from recorded costs, as pure functions.

Recorded, scores and top-k are computed over a fixed extent of keys; as a break they cost the host a launch of their own
in each layer. Which is less depends on the tokens of a step and on the room for cached ones, and on the machine: so the
rule is made of what was measured there, by S3's rule of when a difference counts. A size is trusted as far as none
below it lost, and room that was not measured is left to the break.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from cglab.graphs.coverage import Miss, Reason
from cglab.lab.ttft_grid import Point
from cglab.measure.record import Record
from cglab.measure.statistics import Instances, Verdict, difference


@dataclass(frozen=True, slots=True)
class StepCost:
    """One point of the grid in both arms.

    Attributes:
        tokens: fresh tokens of a step, of all requests together.
        cached: cached ones before them, likewise: what a recording of the selection has room for.
        selecting: TTFT in milliseconds by instance where the selection is a break (T9).
        whole: likewise where it is recorded (T9b).
    """

    tokens: int
    cached: int
    selecting: Instances
    whole: Instances

    @property
    def verdict(self) -> Verdict:
        """Of T9b against T9."""
        return difference(self.selecting, self.whole).verdict


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """For which steps the selection is recorded.

    Attributes:
        limits: by room for cached tokens, ascending, the most tokens of such a step; 0 for none.
    """

    limits: tuple[tuple[int, int], ...]

    def why_break(self, tokens: int, cached: int) -> Miss | None:
        """Why the selection of a step stays a break; None where it is recorded.

        Args:
            tokens: fresh tokens of the step.
            cached: cached ones, of all its requests.
        """
        room, limit = next((each for each in self.limits if each[0] >= cached), (None, 0))
        if tokens <= limit:
            return None
        known = (
            "no room for that many was measured"
            if room is None
            else f"with room for {room} it won up to {limit}"
        )
        return Miss(Reason.LIVE_EXTENT, f"{tokens} tokens after {cached} cached: {known}")

    def __str__(self) -> str:
        told = [f"up to {limit} tokens with room for {room} cached" for room, limit in self.limits if limit]
        return "the selection is recorded " + (", ".join(told) or "nowhere")


def selection_rule(costs: Sequence[StepCost]) -> SelectionRule:
    """The rule of what was measured: the most tokens where T9b was faster, as long as it was slower at no fewer."""
    limits: dict[int, int] = {}
    for room, same_room in groupby(
        sorted(costs, key=lambda cost: (cost.cached, cost.tokens)), lambda cost: cost.cached
    ):
        limits[room] = 0
        for tokens, steps in groupby(same_room, lambda cost: cost.tokens):
            verdicts = {cost.verdict for cost in steps}
            if "slower" in verdicts:
                break
            if "faster" in verdicts:
                limits[room] = tokens
    return SelectionRule(tuple(limits.items()))


def step_costs(selecting: Mapping[Point, Record], whole: Mapping[Point, Record]) -> list[StepCost]:
    """What the DSA bench recorded at the points that both arms have.

    Args:
        selecting: records of the arm whose only break is the selection.
        whole: of the arm without breaks.
    """
    found = []
    for point in sorted(selecting.keys() & whole.keys(), key=str):
        step = selecting[point].workload["step"]
        costs = (_by_instance(records[point]) for records in (selecting, whole))
        found.append(StepCost(step["tokens"], step["cached"] * step["requests"], *costs))
    return found


def _by_instance(record: Record) -> list[list[float]]:
    """TTFT of a record, whose instances stand one after the other, each with as many requests."""
    times, count = list(record.samples["ttft_ms"]), int(float(record.metrics["instances"] or 0))
    each = len(times) // count
    return [times[first : first + each] for first in range(0, each * count, each)]
