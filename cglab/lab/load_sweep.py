"""Several loads by the arms of one toggle, in turns: time to first token against size and concurrency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cglab.engine.load import Load
from cglab.errors import InputError
from cglab.lab.comparison import TAPE_NOTE
from cglab.lab.facade import Lab
from cglab.lab.load_run import LoadRun
from cglab.lab.techniques import check_arms
from cglab.lab.views import draw
from cglab.measure.ab import schedule
from cglab.measure.parity import Parity, worst
from cglab.measure.statistics import Difference, Instances, bootstrap_interval, difference, pooled_median

if TYPE_CHECKING:
    import pandas

INSTANCES = 3


@dataclass(frozen=True)
class LoadPoint:
    """One load by every arm.

    Attributes:
        load: what was asked.
        runs: instances by arm, the first arm the reference.
    """

    load: Load
    runs: dict[str, tuple[LoadRun, ...]]

    @property
    def reference(self) -> str:
        """The first arm."""
        return next(iter(self.runs))

    def ttft(self, arm: str) -> Instances:
        """Seconds to the first token of each request that got one, by instance."""
        return [
            [each.ttft for each in run.result.requests if each.ttft is not None] for run in self.runs[arm]
        ]

    def difference(self, arm: str) -> Difference:
        """Time to first token of an arm against the first arm's."""
        return difference(self.ttft(self.reference), self.ttft(arm))

    def parity(self, arm: str) -> Parity:
        """Tokens of an arm against the first arm's, request by request, the worst of all instances.

        Raises:
            InputError: if the two were sent different requests.
        """
        return worst(run.parity(self.runs[self.reference][0]) for run in self.runs[arm])


@dataclass(frozen=True)
class LoadSweep:
    """Loads by the arms of one toggle, measured in turns.

    Attributes:
        technique: the toggle.
        model: name or folder.
        points: one a load.
    """

    technique: str
    model: str
    points: tuple[LoadPoint, ...]

    @property
    def title(self) -> str:
        """What was measured, in one line."""
        return f"Median time to first token of {Path(self.model).name}, {self.technique} by arm"

    @property
    def note(self) -> str:
        """What a reader must know before comparing times."""
        first = self.points[0]
        runs = first.runs[first.reference]
        told = f"Queueing included; 95 % intervals over {len(runs)} turns of each arm"
        return f"{told}. {TAPE_NOTE}" if runs[0].device == "cpu" else told

    def eager_steps(self, arm: str) -> Counter[str]:
        """Steps of the toggle's phase that an arm ran eager, over all loads and turns, by reason."""
        runs = (run for point in self.points for run in point.runs[arm])
        return sum((run.coverage[self.technique].misses for run in runs), start=Counter())

    def as_frame(self) -> pandas.DataFrame:
        """One row a load and arm: its size, medians of TTFT and queueing, verdict, tokens' parity, captured steps."""
        import pandas

        return pandas.DataFrame(
            _row(self.technique, point, arm) for point in self.points for arm in point.runs
        )

    def plot(self) -> Any:
        """Time to first token by size of the prompts, concurrency and arm, a plotly figure."""
        return draw("ttft", self)


def _row(technique: str, point: LoadPoint, arm: str) -> dict[str, Any]:
    load, runs = point.load, point.runs[arm]
    times, first = point.ttft(arm), arm == point.reference
    ends = bootstrap_interval(times)
    queueing = [run.latency.queueing_ms.p50 for run in runs]
    counts = [run.coverage[technique] for run in runs]
    found = None if first else point.difference(arm)
    return {
        "prompt_tokens": _words(load.prompt_tokens), "cached": load.shared_prefix, "concurrency": load.concurrency,
        "arm": arm, "ttft_ms": pooled_median(times) * 1e3, "low_ms": ends.low * 1e3, "high_ms": ends.high * 1e3,
        "queueing_ms": pooled_median([[each for each in queueing if each is not None]]),
        "ratio": None if found is None else found.ratio, "verdict": None if found is None else found.verdict,
        "tokens": "reference" if first else str(point.parity(arm).verdict),
        "captured": f"{sum(each.captured for each in counts)}/{sum(each.steps for each in counts)}",
    }  # fmt: skip


def _words(length: int | tuple[int, int]) -> str:
    return str(length) if isinstance(length, int) else f"{length[0]} to {length[1]}"


def load_sweep(
    lab: Lab,
    loads: Sequence[Load],
    arms: Sequence[str] = ("eager", "breakable"),
    *,
    technique: str = "prefill",
    instances: int = INSTANCES,
) -> LoadSweep:
    """Runs each load on each arm of a toggle, in turns; every request to the byte the same for all arms.

    A run that had to capture a bucket on its first use waited for it, so it is taken once more.

    Args:
        lab: an open lab; its toggle is afterwards as it was.
        loads: what to ask, each request for at least one token.
        arms: values of the toggle; the first is the reference.
        technique: the toggle.
        instances: turns of each arm.

    Raises:
        InputError: for no load, or one whose requests may end without a token.
        ToggleError: for an unknown toggle or value.
    """
    checked, before = check_arms(technique, arms), getattr(lab.captures, technique)
    if not loads or any(_fewest(load) < 1 for load in loads):
        raise InputError(
            f"{len(loads)} loads, all of whose requests want a token: give at least one, new_tokens from 1"
        )
    points = []
    try:
        for load in loads:
            runs: dict[str, list[LoadRun]] = {arm: [] for arm in checked}
            for _, arm in schedule(tuple(checked), 0, instances):
                setattr(lab.captures, technique, arm)
                run = lab.load(load)
                runs[arm].append(lab.load(load) if run.captured_buckets else run)
            points.append(LoadPoint(load, {arm: tuple(each) for arm, each in runs.items()}))
    finally:
        setattr(lab.captures, technique, before)
    return LoadSweep(technique, lab.name, tuple(points))


def _fewest(load: Load) -> int:
    return load.new_tokens if isinstance(load.new_tokens, int) else load.new_tokens[0]
