"""The TTFT bench: time to first token under concurrency, prefill eager, breakable and full in turns.

Every request asks for one token, so that TTFT is prefill and queueing only. Before any load the step that its batches
are made of is traced eager and compared bitwise in each arm: the launch gap of that trace is what a graph can win, and
the record has it beside what was won.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np
import torch

from cglab.engine.load import Load
from cglab.errors import InputError
from cglab.graphs.buckets import bucket_list, sglang_prefill
from cglab.lab.facade import Lab
from cglab.lab.load_run import LoadRun
from cglab.lab.opening import open_lab
from cglab.lab.prefill_limit import PREFILL_LIMIT
from cglab.lab.step_metrics import Progress, model_facts, silent, won_metrics
from cglab.lab.ttft_grid import ARMS, CAPTURED, FULL_GRID, QUICK_GRID, Point, Probe, estimate, probe_steps
from cglab.measure.ab import schedule
from cglab.measure.crossover import find_crossover
from cglab.measure.record import Record, make_record, new_run
from cglab.measure.statistics import bootstrap_interval, difference, pooled_median

DEFAULT = "breakable"
INSTANCES, CONFIRM = 3, 7
"""Turns of each arm, and of each once more where the default arm came out slower than eager."""


def ttft(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    models: Sequence[str] | None = None,
) -> Iterator[Record]:
    """TTFT at every point of the grid by prefill arm, in turns, with what the eager trace predicts.

    Args:
        device: what is measured.
        quick: a small run that shows the machinery.
        progress: called with a line for every stage.
        models: names; by default ``qwen3-8b`` on a GPU and the shipped model on a CPU.

    Yields:
        A record for each arm of each point, then the crossover of each captured arm, by model.
    """
    large = device.type == "cuda" and not quick
    points = FULL_GRID if large else QUICK_GRID
    context = max(point.tokens + point.cached for point in points) + 1
    run = new_run()
    for name in models or ("qwen3-8b" if large else "pico-gqa",):
        progress(f"{name}: open")
        with open_lab(
            name, device=device, max_batch=max(point.concurrency for point in points), max_context=context,
            token_budget=None if large else 64, prefill_buckets=bucket_list(8192 if large else 64, sglang_prefill),
        ) as lab:  # fmt: skip
            probes = probe_steps(lab, points, progress)
            whole = f"{len(points)} points, about {INSTANCES * estimate(lab, points, probes):.0f} s in all"
            fresh: dict[int, dict[str, list[list[float]]]] = {}
            for number, point in enumerate(points, 1):
                progress(f"{name}: {point}, {number} of {whole}")
                records, times = _measure(lab, point, probes[point], run)
                yield from records
                if point.concurrency == 1 and not point.cached:
                    fresh[point.tokens] = times
            yield from _crossovers(lab, fresh, run)


def _turns(lab: Lab, load: Load, instances: int) -> dict[str, list[LoadRun]]:
    runs: dict[str, list[LoadRun]] = {arm: [] for arm in ARMS}
    for _, arm in schedule(ARMS, 0, instances):
        lab.captures.prefill = arm
        runs[arm].append(lab.load(load))
    return runs


def ttft_ms(runs: Sequence[LoadRun]) -> list[list[float]]:
    """Milliseconds to the first token of every request, by instance."""
    return [[each.ttft * 1e3 for each in run.result.requests if each.ttft is not None] for run in runs]


def _measure(
    lab: Lab, point: Point, probe: Probe, run: str
) -> tuple[list[Record], dict[str, list[list[float]]]]:
    """The records of a point, and its TTFT by arm and instance."""
    load = point.load
    before = {arm: lab.runner(arm, "prefill").coverage().copy() for arm in ARMS}
    runs = _turns(lab, load, INSTANCES)
    first = difference(ttft_ms(runs["eager"]), ttft_ms(runs[DEFAULT]))
    if flagged := first.verdict == "slower":
        runs = _turns(lab, load, CONFIRM)
    payloads = {each.result.payload for instances in runs.values() for each in instances}
    if len(payloads) != 1:
        raise InputError(f"the arms were sent {len(payloads)} different payloads; nothing is compared")
    (payload,) = payloads
    shared = {
        "flagged": flagged, "ratio_before_flag": first.ratio if flagged else None,
        "instances": float(len(runs["eager"])), "payload_equal": True,
    }  # fmt: skip
    records = [
        make_record(
            bench="ttft", arm=arm, device=lab.device, run=run,
            metrics={**_figures(runs, arm), **_gap(runs, arm, probe), **shared},
            samples=_samples(runs[arm]),
            workload={
                **asdict(point), "requests": load.count, "decode": "full", "payload": payload,
                "step": dict(probe.workload), "buckets": "SGLang's list to the token budget, captured on first use",
                "max_requests": lab.phases.prefill("full").max_requests,
                "max_cached": lab.phases.prefill("full").max_cached,
            },
            parity=probe.parity[arm].as_dict() if arm in probe.parity else None,
            coverage=(lab.runner(arm, "prefill").coverage() - before[arm]).as_dict(), **model_facts(lab),
        )
        for arm in ARMS
    ]  # fmt: skip
    return records, {arm: ttft_ms(runs[arm]) for arm in ARMS}


def _figures(runs: Mapping[str, Sequence[LoadRun]], arm: str) -> dict[str, Any]:
    """Times of one arm, its verdict against eager, its tokens against eager's, its forward occupancy."""
    times, samples = ttft_ms(runs[arm]), _samples(runs[arm])
    interval = bootstrap_interval(times)
    figures: dict[str, Any] = {
        "ttft_ms": pooled_median(times), "ttft_low_ms": interval.low, "ttft_high_ms": interval.high,
        "ttft_p90_ms": _median([each.latency.ttft_ms.p90 for each in runs[arm]]),
        "queueing_ms": median(samples["queueing_ms"]),
        "prefill_ms": median(np.subtract(samples["ttft_ms"], samples["queueing_ms"]).tolist()),
        "run_ms": median(each.result.seconds for each in runs[arm]) * 1e3,
        "occupancy_percent": _median([each.occupancy for each in runs[arm]]),
        "errors": float(sum(each.latency.errors for each in runs[arm])),
    }  # fmt: skip
    if arm != "eager":
        found = difference(ttft_ms(runs["eager"]), times)
        tokens = [each.parity(runs["eager"][0]) for each in runs[arm]]
        figures |= {
            "ratio_to_eager": found.ratio, "ratio_low": found.interval.low, "ratio_high": found.interval.high,
            "verdict": found.verdict, "tokens_equal": all(each.verdict == "bitwise" for each in tokens),
        }  # fmt: skip
    return figures


def _gap(runs: Mapping[str, Sequence[LoadRun]], arm: str, probe: Probe) -> dict[str, Any]:
    """Per step of the load: what the eager trace predicts that a graph wins, and what this arm won.

    The wall time is that of the load itself: between requests the host is colder than in a loop over one step.
    """
    busy = probe.trace.busy_us()
    if busy is None:  # no device records: there is no such time
        return {}
    wall, own = (
        median(each.result.seconds / each.result.steps for each in runs[a]) * 1e6 for a in ("eager", arm)
    )
    busy = busy / probe.trace.steps
    metrics: dict[str, Any] = {
        "eager_step_ms": wall / 1e3, "eager_busy_ms": busy / 1e3, "gap_share": max(wall - busy, 0.0) / wall,
        "eager_launches": probe.trace.launches / probe.trace.steps,
    }  # fmt: skip
    return metrics if arm == "eager" else metrics | won_metrics(probe.trace, wall, own)


def _samples(runs: Sequence[LoadRun]) -> dict[str, list[float]]:
    """TTFT and queueing of every request, and the instance that each belongs to."""
    rows = [
        (float(instance), each.ttft * 1e3, (each.queueing or 0.0) * 1e3)
        for instance, run in enumerate(runs)
        for each in run.result.requests
        if each.ttft is not None
    ]
    instance, times, queueing = map(list, zip(*rows, strict=True))
    return {"instance": instance, "ttft_ms": times, "queueing_ms": queueing}


def _crossovers(
    lab: Lab, fresh: Mapping[int, Mapping[str, Sequence[Sequence[float]]]], run: str
) -> Iterator[Record]:
    """Up to which size each captured arm wins, from TTFT of one request at a time."""
    for arm in CAPTURED:
        eager, captured = ({size: times[a] for size, times in fresh.items()} for a in ("eager", arm))
        found = find_crossover(eager, captured)
        yield make_record(
            bench="ttft_crossover", arm=arm, device=lab.device, run=run,
            metrics={
                "limit": _float(found.limit), "safe_limit": _float(found.safe_limit),
                "next_size": _float(found.next_size), "crossover": found.outcome, "default_limit": float(PREFILL_LIMIT),
                **{f"ratio_at_{each.size}": each.difference.ratio for each in found.evidence},
                **{f"verdict_at_{each.size}": each.difference.verdict for each in found.evidence},
            },
            workload={"sizes": sorted(fresh), "cached": 0, "concurrency": 1}, **model_facts(lab),
            notes="A limit that is the largest size measured is a lower bound: larger ones may win too.",
        )  # fmt: skip


def _float(size: int | None) -> float | None:
    return None if size is None else float(size)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
