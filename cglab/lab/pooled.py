"""The same measurement in several processes, judged as one: a process is an instance of S3's rule.

Turns within a process share its allocations, its clocks and the kernels that its libraries chose, so they say how
steady a process is, and not whether the next one would find the same. A difference that counts holds between processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final

from cglab.errors import InputError
from cglab.measure.ab import ArmResult, judge
from cglab.measure.parity import Verdict
from cglab.measure.record import Metric, Record, make_record
from cglab.measure.statistics import FEWEST_INSTANCES

SAMPLES: Final = "token_ms"
"""Of the records: every sample of an arm, and its median."""


def require_processes(count: int) -> int:
    """``count``, if so many processes can be judged: one by its turns, or as many as S3's rule needs.

    Raises:
        InputError: for another number.
    """
    if count != 1 and count < FEWEST_INSTANCES:
        raise InputError(
            f"processes={count}: a difference between processes needs {FEWEST_INSTANCES} or more of them; give so "
            "many, or 1 to judge by turns within it"
        )
    return count


def pooled(processes: Sequence[Sequence[Record]], endings: Sequence[str], ours: str) -> Iterator[Record]:
    """One record for each arm of each workload, from the records of several processes.

    Args:
        processes: the records of each.
        endings: how each process ended, which is what is told of an arm that it did not reach.
        ours: the arm that others are compared with.

    Yields:
        In the order of the process that came furthest: medians over processes, every sample, and the verdict of S3's
        rule with a process as an instance. An arm that a process lacks is ``undecided``, with the reason.
    """
    furthest = max(processes, key=len)
    for key in dict.fromkeys(map(_place, furthest)):
        arms = [record.arm for record in furthest if _place(record) == key]
        found = {arm: [_of(records, key, arm) for records in processes] for arm in arms}
        errors = {arm: why for arm in arms if (why := _error(found[arm], endings))}
        samples = {
            arm: [_seconds(each) for each in found[arm]] for arm in sorted(arms, key=lambda a: a != ours)
        }
        results = {result.name: result for result in judge(samples, errors)}
        for arm in arms:
            yield _record(found[arm], results[arm], results.get(ours), errors.get(arm))


def _place(record: Record) -> str:
    return json.dumps([record.model, record.workload], sort_keys=True)


def _of(records: Sequence[Record], key: str, arm: str) -> Record | None:
    return next((each for each in records if each.arm == arm and _place(each) == key), None)


def _error(found: Sequence[Record | None], endings: Sequence[str]) -> str | None:
    """What the first process says of an arm that failed in it, and in how many it did."""
    told = [
        str(each.metrics["error"]) if each is not None else ending
        for each, ending in zip(found, endings, strict=True)
        if each is None or "error" in each.metrics
    ]
    return f"{told[0]} (in {len(told)} of {len(found)} processes)" if told else None


def _seconds(record: Record | None) -> list[float]:
    return [] if record is None else [ms / 1e3 for ms in record.samples.get(SAMPLES, ())]


def _record(
    found: Sequence[Record | None], result: ArmResult, base: ArmResult | None, error: str | None
) -> Record:
    there = [record for record in found if record is not None]
    metrics = _middle([record.metrics for record in there]) | {"processes": len(there)}
    if result.median is not None and result.interval is not None:
        each = [median(taken) for taken in result.instances]
        metrics |= {
            SAMPLES: result.median * 1e3, "token_low_ms": result.interval.low * 1e3,
            "token_high_ms": result.interval.high * 1e3, "between_processes": max(each) / min(each) - 1,
        }  # fmt: skip
        if isinstance(floor := metrics.get("floor_ms"), float):
            metrics["over_floor"] = result.median * 1e3 / floor
        if base is not None and base.median is not None and base.name != result.name:
            metrics |= {
                "ratio_to_ours": result.ratio,
                "verdict": result.verdict,
                "ours_ms": base.median * 1e3,
            }
    if error is not None:
        metrics["error"] = error
    parities = [record.parity for record in there if record.parity is not None]
    first = there[0]
    return make_record(
        bench=first.bench, arm=first.arm, device=first.device.kind, run=first.run, metrics=metrics,
        samples=_samples(result), software=first.versions, model=first.model, weights=first.weights,
        dtype=first.dtype, workload=first.workload, notes=first.notes,
        parity=max(parities, key=lambda each: list(Verdict).index(each["verdict"]), default=None),
    )  # fmt: skip


def _samples(result: ArmResult) -> dict[str, list[float]]:
    """Every sample, and the median of each process."""
    if not result.instances:
        return {}
    return {
        SAMPLES: [seconds * 1e3 for taken in result.instances for seconds in taken],
        "process_ms": [median(taken) * 1e3 for taken in result.instances],
    }


def _middle(each: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Medians of the figures that are numbers; of the rest the first that is told."""
    names = dict.fromkeys(name for metrics in each for name in metrics if name != "error")
    found: dict[str, Metric] = {}
    for name in names:
        values: list[Any] = [metrics[name] for metrics in each if metrics.get(name) is not None]
        numbers = [
            value for value in values if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        found[name] = median(numbers) if numbers else (values[0] if values else None)
    return found
