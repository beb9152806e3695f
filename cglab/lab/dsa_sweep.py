"""What the DSA bench tells of an arm over its whole grid, whose points several runs may have measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from cglab.lab.facade import Lab
from cglab.lab.profiles import results_folder
from cglab.lab.sparse_prefill import SparseArm
from cglab.lab.step_metrics import ledger_metrics, model_facts
from cglab.lab.ttft_grid import Point
from cglab.measure.record import Record, make_record
from cglab.measure.records import load
from cglab.runners.base import GraphGroup

BENCH: Final = "dsa_prefill"
NOT_HERE: Final = (
    "No arm records the indexer's preparation and leaves attention a break: S3 has none either. Its draft extend (T10) "
    "is not part of these."
)


def swept(
    lab: Lab, arm: str, records: Sequence[Record], *, points: Sequence[Point], run: str, costs: Mapping[str, float]
) -> Record:  # fmt: skip
    """One arm over all points.

    Worst and best are of the whole grid or of nothing: a part of it would hide the point that an arm loses.

    Args:
        lab: that measured.
        arm: its name.
        records: of this run.
        points: the grid.
        run: of the bench.
        costs: of the arm's captures.
    """
    known = {point_of(record): record for record in [*_kept(records[0], arm), *records]}
    found = [known[point] for point in points if point in known]
    ratios = [float(record.metrics.get("ttft_ratio") or 1.0) for record in found]
    whole = len(found) == len(points)
    worst = {
        "largest_ttft_ratio": max(ratios), "least_ttft_ratio": min(ratios),
        "bitwise": all(record.metrics["bitwise"] for record in found),
        "tokens_equal": all(record.metrics.get("tokens_equal", True) for record in found),
    }  # fmt: skip
    return make_record(
        bench=f"{BENCH}_sweep", arm=arm, device=lab.device, run=run,
        metrics={"points": float(len(found)), "of_points": float(len(points)), **costs, **(worst if whole else {})},
        workload={"grid": [[point.tokens, point.cached, point.concurrency] for point in map(point_of, found)]},
        notes=NOT_HERE, **model_facts(lab),
    )  # fmt: skip


def point_of(record: Record) -> Point:
    """Where in the grid a record of the bench is."""
    fresh, cached, concurrency = (record.workload[size] for size in ("fresh", "cached", "concurrency"))
    return Point(fresh, cached, concurrency)


def _kept(like: Record, arm: str) -> Iterable[Record]:
    """Earlier records of the arm, of the same code, model and device, by time."""
    folder = results_folder()
    stored = load(folder).records if folder.exists() else ()
    return (
        each for each in stored
        if (each.bench, each.arm, each.tree, each.model, each.dtype, each.device.name)
        == (BENCH, arm, like.tree, like.model, like.dtype, like.device.name)
    )  # fmt: skip


def captured(lab: Lab, arm: SparseArm) -> dict[str, float]:
    """Memory and seconds of all buckets of an arm, in a pool of its own: a shared one would be its who came first."""
    group = GraphGroup(lab.device)
    runner = arm.make(lab.model, lab.engine.kv, group, lab.prefill_buckets, lab.phases.options)
    try:
        runner.capture()
        costs = ledger_metrics(runner.captured.ledger)
    finally:
        runner.close()
        group.close()
    told = {name: costs[name] for name in ("buckets", "capture_s", "warmup_s")}
    return {"graph_gb": costs["capture_gb"], **told}
