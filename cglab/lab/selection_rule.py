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
from typing import Final

import torch

from cglab.lab.profiles import results_folder
from cglab.lab.ttft_grid import Point
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
    """

    tokens: int
    cached: int
    selecting: Instances
    whole: Instances

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


def recorded_rule(model: str, dtype: torch.dtype, device: torch.device) -> SelectionRule:
    """The rule of what is recorded of a model on this kind of device, by whatever code: a step's costs change slowly.

    Args:
        model: its name.
        dtype: of weights and computation.
        device: what it runs on.

    Raises:
        ResultsError: if a file of results cannot be read.
    """
    folder, found = results_folder(), dict[str, dict[Point, Record]]()
    like = (BENCH, model, str(dtype).removeprefix("torch."), describe_device(device).name)
    for record in load(folder).records if folder.exists() else ():
        if (record.bench, record.model, record.dtype, record.device.name) == like:
            found.setdefault(record.arm, {})[point_of(record)] = record
    return selection_rule(step_costs(found.get(SELECTING, {}), found.get(WHOLE, {})))


def point_of(record: Record) -> Point:
    """Where in the grid a record of the bench is."""
    fresh, cached, concurrency = (record.workload[size] for size in ("fresh", "cached", "concurrency"))
    return Point(fresh, cached, concurrency)
