"""Comparisons of servers that were recorded before, judged again from their samples: for a machine without SGLang."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cglab.errors import InputError
from cglab.measure.ab import judge
from cglab.measure.record import Record
from cglab.measure.records import load
from cglab.measure.statistics import FEWEST_INSTANCES, false_positive_rate
from cglab.measure.tree import tree_hash
from cglab.serving.compare import BENCH, FAILED
from cglab.serving.comparison import MEASURES
from cglab.settings import read_settings

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class RecordedServers:
    """Recorded turns: of each device, SGLang, model and set of arms and points the newest run.

    Attributes:
        runs: records of each run, in the order in which they were made.
        failures: of each device, SGLang, model and arm whose server failed the newest record of it, unless the arm ran
            since.
    """

    runs: tuple[tuple[Record, ...], ...]
    failures: tuple[Record, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.runs)

    def rows(self) -> list[dict[str, Any]]:
        """One row a run, point, measure and arm, with the verdict by S3's rule and its rate of error in percent."""
        return [row for run in self.runs for row in _rows(run)]

    def as_frame(self) -> pandas.DataFrame:
        """:meth:`rows` as a frame."""
        import pandas

        return pandas.DataFrame(self.rows(), dtype=object)

    def __str__(self) -> str:
        if not self.runs:
            return "no comparison of servers is recorded yet; `cglab serve-compare RECIPE --save` records one"
        failed = [
            f"{each.arm}, {each.model} on {each.device.name}, SGLang {each.versions.get('sglang')}: {each.notes}"
            for each in self.failures
        ]
        return "\n".join([*(_told(run) for run in self.runs), *failed])


def recorded_servers(folder: str | Path | None = None) -> RecordedServers:
    """What is recorded; None takes ``results`` in the data folder, and one that does not exist holds nothing."""
    where = read_settings().data / "results" if folder is None else Path(folder)
    return newest(load(where).records if where.exists() else ())


def newest(records: Iterable[Record]) -> RecordedServers:
    """The newest run of each device, SGLang, model and set of arms and points.

    Args:
        records: of any bench, by time.
    """
    by_run: dict[str, list[Record]] = defaultdict(list)
    failures: dict[tuple[object, ...], Record] = {}
    for record in records:
        place = record.device.name, record.versions.get("sglang"), record.model, record.arm
        if record.bench == BENCH:
            by_run[record.run].append(record)
            failures.pop(place, None)
        elif record.bench == FAILED:
            failures[place] = record
    runs = {_kind(run): tuple(run) for run in by_run.values()}
    return RecordedServers(tuple(runs.values()), tuple(failures.values()))


def _kind(run: Sequence[Record]) -> tuple[object, ...]:
    first, arms = run[0], frozenset(each.arm for each in run)
    points = frozenset(each.workload["name"] for each in run)
    return first.device.name, first.versions.get("sglang"), first.model, arms, points


def require_one_comparison(records: Sequence[Record]) -> None:
    """Nothing, if records that share a run's name are of one comparison.

    Raises:
        InputError: if models, machines, versions, or what was sent at a point differ; the difference is told.
    """
    seen: dict[tuple[str, str], Any] = {}
    for each in records:
        told = {
            "model": each.model, "weights": each.weights, "dtype": each.dtype, "recipe": each.notes,
            "device": each.device.name, "SGLang": each.versions.get("sglang"), "base": each.workload.get("base"),
            f"requests at {each.workload['name']}": each.workload.get("payload"),
            f"toggles of {each.arm}": each.workload.get("toggles"),
            f"arguments of {each.arm}": each.workload.get("arguments"),
            f"environment of {each.arm}": each.workload.get("environment"),
        }  # fmt: skip
        for name, value in told.items():
            first = value if value is None else seen.setdefault((each.run, name), value)
            if first != value:
                raise InputError(
                    f"run {each.run} is of two comparisons: {name} was {first!r} and {value!r}; "
                    "give each a run of its own"
                )


def _points(run: Iterable[Record]) -> Mapping[str, Mapping[str, list[Record]]]:
    """Records by point, then by arm, the base first whoever had the first turn, and also where it has none."""
    found: dict[str, dict[str, list[Record]]] = {}
    for record in sorted(run, key=lambda each: each.arm != each.workload.get("base", each.arm)):
        arms = found.setdefault(record.workload["name"], {record.workload.get("base", record.arm): []})
        arms.setdefault(record.arm, []).append(record)
    return found


def _failed(arms: Mapping[str, list[Record]]) -> dict[str, str]:
    """Arms of which requests failed, which have no verdict."""
    counts = {
        arm: sum(int(each.metrics.get("errors") or 0) for each in records) for arm, records in arms.items()
    }
    return {arm: f"{count} requests failed" for arm, count in counts.items() if count}


def _rows(run: tuple[Record, ...]) -> list[dict[str, Any]]:
    require_one_comparison(run)
    rows = []
    for name, arms in _points(run).items():
        instances = min(len(records) for records in arms.values())
        rate = (
            100 * false_positive_rate(instances) if instances >= FEWEST_INSTANCES else None
        )  # no verdict errs
        for measure, title in MEASURES.items():
            samples = {
                arm: [[value / 1e3 for value in record.samples[measure]] for record in records]
                for arm, records in arms.items()
            }
            rows += [
                {
                    "device": run[0].device.name, "sglang": run[0].versions.get("sglang"), "model": run[0].model,
                    "point": name, "measure": title, "arm": arm.name,
                    "ms": None if arm.median is None else arm.median * 1e3,
                    "change_percent": None if arm.ratio is None else (arm.ratio - 1) * 100,
                    "verdict": arm.verdict, "instances": instances,
                    "error_rate_percent": rate,
                }
                for arm in judge(samples, _failed(arms))
            ]  # fmt: skip
    return rows


def _told(run: tuple[Record, ...]) -> str:
    first = run[0]
    arms = ", ".join(dict.fromkeys(record.arm for record in run))
    code = (
        "the code as it is now"
        if all(each.tree == tree_hash() for each in run)
        else "an older state of the code"
    )
    graphs = (
        ""
        if first.shows_graph_times
        else "; a server on a CPU has no graphs, so its times are none of theirs"
    )
    return (
        f"{arms}: SGLang {first.versions.get('sglang')} with {first.model} on {first.device.name}, recorded on "
        f"{first.created[:10]} with {code}{graphs}"
    )
