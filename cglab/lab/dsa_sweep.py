"""What the DSA benches share: the lab that a grid needs, and what is told of it whole, measured by several runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from cglab.engine.load import Load
from cglab.graphs.buckets import bucket_list, sglang_prefill
from cglab.lab.facade import Lab
from cglab.lab.opening import PAGE_SIZE, open_lab
from cglab.lab.selection_rule import BENCH, WHOLE, point_of, selection_rule, step_costs
from cglab.lab.sparse_prefill import SparseArm
from cglab.lab.step_metrics import ledger_metrics, model_facts
from cglab.lab.ttft_grid import Point
from cglab.measure.record import Record, make_record
from cglab.runners.base import GraphGroup, Runner

PER_LANE: Final = 8
"""S3's requests for each that is in flight."""
QUICK_BUCKETS: Final = (4, 8, 16, 32, 64)
NOT_HERE: Final = (
    "No arm records the indexer's preparation and leaves attention a break: S3 has none either. Its draft extend (T10) "
    "is a switch of the bench dsa-ablation."
)


def swept(
    lab: Lab, arm: str, records: Sequence[Record], *, points: Sequence[Point], run: str, costs: Mapping[str, float]
) -> Record:  # fmt: skip
    """One arm over all points.

    Worst and best are of the whole grid or of nothing: a part of it would hide the point that an arm loses.

    Args:
        lab: that measured.
        arm: its name.
        records: of this run and of earlier ones of the same code, in the order in which they were made.
        points: the grid.
        run: of the bench.
        costs: of the arm's captures.
    """
    known = measured(arm, records)
    found = [known[point] for point in points if point in known]
    metrics = {"points": float(len(found)), "of_points": float(len(points)), **costs}
    if len(found) == len(points):
        ratios = [float(record.metrics.get("ttft_ratio") or 1.0) for record in found]
        metrics |= {
            "largest_ttft_ratio": max(ratios), "least_ttft_ratio": min(ratios),
            "bitwise": all(record.metrics.get("bitwise") is True for record in found),
            "tokens_equal": all(record.metrics.get("tokens_equal", True) for record in found),
        }  # fmt: skip
    return make_record(
        bench=f"{BENCH}_sweep", arm=arm, device=lab.device, run=run,
        metrics=metrics,
        workload={"grid": [[point.tokens, point.cached, point.concurrency] for point in map(point_of, found)]},
        notes=NOT_HERE, **model_facts(lab),
    )  # fmt: skip


def choice(lab: Lab, records: Sequence[Record], run: str) -> Record:
    """Where the selection is better recorded (T9b) than left as the only break (T9).

    Args:
        lab: that measured.
        records: as of ``swept``.
        run: of the bench.
    """
    costs = step_costs(records)
    rule, verdicts = selection_rule(costs), Counter(cost.verdict for cost in costs)
    return make_record(
        bench="dsa_choice", arm=WHOLE, device=lab.device, run=run,
        metrics={
            "points": float(len(costs)), "faster": float(verdicts["faster"]), "slower": float(verdicts["slower"]),
            "recorded": float(sum(rule.why_break(cost.tokens, cost.cached) is None for cost in costs)),
        },
        workload={"limits": [list(limit) for limit in rule.limits]},
        notes=str(rule), **model_facts(lab),
    )  # fmt: skip


def measured(arm: str, records: Iterable[Record]) -> dict[Point, Record]:
    """The newest record of an arm at every point, of records in the order in which they were made."""
    return {point_of(record): record for record in records if record.arm == arm}


def open_for(
    name: str, device: torch.device, points: Sequence[Point], new_tokens: int, *, large: bool, **draft: Any
) -> Lab:
    """A lab with room for the requests of every point, and for what they find in the cache.

    Args:
        name: of a model with latent attention.
        device: where it runs.
        points: of the grid.
        new_tokens: of each request.
        large: S3's token budget and SGLang's buckets; else small ones that show the machinery.
        **draft: as ``open_lab`` takes it.
    """
    longest = max(point.tokens + point.cached for point in points) + new_tokens
    fresh = max(point.concurrency * (point.tokens + new_tokens + 2 * PAGE_SIZE) for point in points)
    budget = 8192 if large else 64
    return open_lab(
        name, device=device, max_batch=max(point.concurrency for point in points), max_context=longest,
        token_budget=budget, cache_tokens=fresh + max(point.cached for point in points) + longest,
        prefill_buckets=bucket_list(budget, sglang_prefill, explicit=None if large else QUICK_BUCKETS), **draft,
    )  # fmt: skip


def load_of(point: Point, new_tokens: int, device: torch.device, per_lane: int = PER_LANE) -> Load:
    """The requests of a point: S3's 16 at concurrency 1, else so many a lane; a few where there is no time to take."""
    count = 2 * PER_LANE if point.concurrency == 1 else per_lane * point.concurrency
    asked = count if device.type == "cuda" else 2 * point.concurrency
    return Load(asked, point.concurrency, point.tokens, new_tokens, shared_prefix=point.cached)


def target_prefill(lab: Lab, arm: SparseArm, group: GraphGroup) -> Runner[Any]:
    """The prefill of the lab's model in an arm, for ``captured``."""
    return arm.make(lab.model, lab.engine.kv, group, lab.prefill_buckets, lab.phases.options)


def captured(lab: Lab, make: Callable[[GraphGroup], Runner[Any]]) -> dict[str, float]:
    """Memory and seconds of all buckets of a runner, in a pool of its own: a shared one would be its who came first.

    Args:
        lab: of the runner.
        make: makes it in a group.
    """
    group = GraphGroup(lab.device)
    runner = make(group)
    try:
        runner.capture()
        costs = ledger_metrics(runner.captured.ledger)
    finally:
        runner.close()
        group.close()
    told = {name: costs[name] for name in ("buckets", "capture_s", "warmup_s")}
    return {"graph_gb": costs["capture_gb"], **told}
