"""Where a sparse prefill that records its selection too (T9b) wins, from recorded costs, as pure functions.

Recorded, scores and top-k are computed over a fixed extent of keys; as a break they cost the host a launch of their own
in each layer. Which is less depends on the tokens of a step and on the room for cached ones, and on the machine: so the
rule is made of what was measured there, by S3's rule of when a difference counts. A size is trusted as far as none
below it lost, and room that was not measured is left to the break. Arms are compared where one run has both, in
turns; where they gave other bits, recording the selection lost whatever its time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch

from cglab.lab.profiles import results_folder
from cglab.lab.ttft_grid import Point
from cglab.measure.legible import check, legible, unreadable
from cglab.measure.machine import describe_device
from cglab.measure.record import Record
from cglab.measure.records import load
from cglab.measure.statistics import Instances, Verdict, difference
from cglab.runners.dsa_policy import SelectionRule

BENCH: Final = "dsa_prefill"
"""What recorded costs are of."""
SELECTING, WHOLE = "graph", "whole"
"""Its arms whose only break is the selection (T9), and without breaks (T9b)."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """One point of the grid in both arms.

    Attributes:
        tokens: fresh tokens of a step, of all requests together.
        cached: cached ones before them, likewise: what a recording of the selection has room for.
        selecting: TTFT in milliseconds by instance where the selection is a break (T9).
        whole: likewise where it is recorded (T9b).
        corrupted: one of them gave other bits than the arm with all breaks.
    """

    tokens: int
    cached: int
    selecting: Instances
    whole: Instances
    corrupted: bool = False

    @property
    def verdict(self) -> Verdict:
        """Of T9b against T9."""
        return difference(self.selecting, self.whole).verdict


def selection_rule(costs: Sequence[StepCost]) -> SelectionRule:
    """The rule of what was measured: the most tokens where T9b was faster, as long as it was slower at no fewer."""
    limits: dict[int, int] = {}
    for room, same_room in groupby(
        sorted(costs, key=lambda cost: (cost.cached, cost.tokens)), lambda cost: cost.cached
    ):
        limits[room] = 0
        for tokens, same_step in groupby(same_room, lambda cost: cost.tokens):
            steps = list(same_step)
            verdicts = {cost.verdict for cost in steps}
            if "slower" in verdicts or any(cost.corrupted for cost in steps):
                break
            if "faster" in verdicts:
                limits[room] = tokens
    return SelectionRule(tuple(limits.items()))


def step_costs(records: Iterable[Record]) -> list[StepCost]:
    """What the DSA bench recorded at the points where one run has both arms; of several runs the newest.

    Args:
        records: of the bench, in the order in which they were made; those that cannot be read are passed over.
    """
    runs: dict[tuple[Point, str], dict[str, Record]] = {}
    for record in legible((each for each in records if each.arm in (SELECTING, WHOLE)), _check_cost):
        runs.setdefault((point_of(record), record.run), {})[record.arm] = record
    newest = {point: arms for (point, _), arms in runs.items() if len(arms) == 2}
    found = []
    for point in sorted(newest, key=str):
        selecting, whole = newest[point][SELECTING], newest[point][WHOLE]
        step = whole.workload["step"]
        corrupted = any((each.parity or {}).get("verdict") == "corrupted" for each in (selecting, whole))
        times = _by_instance(selecting), _by_instance(whole)
        found.append(StepCost(step["tokens"], step["cached"] * step["requests"], *times, corrupted))
    return found


def _check_cost(record: Record) -> None:
    check(record)
    _by_instance(record)


def _by_instance(record: Record) -> list[list[float]]:
    """TTFT of a record, whose instances stand one after the other, each with as many requests.

    Raises:
        RecordError: if there are fewer samples than instances.
    """
    times, count = list(record.samples["ttft_ms"]), int(float(record.metrics["instances"] or 0))
    each = len(times) // count
    if not each:
        raise unreadable(record, "samples.ttft_ms", times, f"a time or more of each of {count} instances")
    return [times[first : first + each] for first in range(0, each * count, each)]


def recorded_rule(model: str, dtype: torch.dtype, device: torch.device) -> SelectionRule:
    """The rule of what is recorded of a model on this kind of device, by whatever code: a step's costs change slowly.

    Args:
        model: its name.
        dtype: of weights and computation.
        device: what it runs on.

    Raises:
        ResultsError: if a file of results cannot be read.
    """
    folder = results_folder()
    like = (BENCH, model, str(dtype).removeprefix("torch."), describe_device(device).name)
    stored = load(folder).records if folder.exists() else ()
    return selection_rule(
        step_costs(each for each in stored if (each.bench, each.model, each.dtype, each.device.name) == like)
    )


def point_of(record: Record) -> Point:
    """Where in the grid a record of the bench is."""
    fresh, cached, concurrency = (record.workload[size] for size in ("fresh", "cached", "concurrency"))
    return Point(fresh, cached, concurrency)
