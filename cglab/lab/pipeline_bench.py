"""The pipeline bench: S2's protocol on stages in processes, prefill eager and captured in turns.

Requests of one length with one new token each, prefix reuse off, the budget of a forward equal to the cap. Each point
has throughput by arm, what was replayed and what ran eager; each cap the stages' own wall and kernel-busy time; and
the sweep the crossover, which is what the default cap is held against. Where there is one GPU, two stages can share it
to show that they are right (``pipeline_shared``); nothing of their speed is told then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from cglab.errors import InputError, RankError
from cglab.lab.pipeline_shared import MODELS as SHARED_MODELS
from cglab.lab.pipeline_shared import SIZES as SHARED
from cglab.lab.pipeline_shared import shared_records
from cglab.lab.stage_job import ARMS, StageJob, run_stages
from cglab.lab.step_metrics import Progress, silent
from cglab.measure.crossover import find_crossover
from cglab.measure.record import Metric, Record, make_record, new_run
from cglab.measure.statistics import difference
from cglab.models.loading import find_model
from cglab.runners.pipeline_stage import STAGE_LIMIT

SIZES: Mapping[str, Any] = {
    "caps": (512, 1024, 2048, 4096, 8192, 16384, 32768), "concurrencies": (4, 16, 64), "requests": 10, "instances": 3,
}  # fmt: skip
QUICK: Mapping[str, Any] = {
    "caps": (32, 64), "concurrencies": (2,), "prompt": 64, "requests": 2, "dtype": "float32",
}  # fmt: skip
Point = Mapping[str, Any]


def pipeline(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    models: Sequence[str] | None = None,
    stages: int = 2,
    caps: Sequence[int] | None = None,
    concurrencies: Sequence[int] | None = None,
    requests: int | None = None,
    most: int | None = None,
    instances: int | None = None,
    limit: float = 570.0,
    share: bool = False,
) -> Iterator[Record]:
    """Throughput and stage profile of a pipeline by cap, concurrency and arm, the arms in turns.

    Args:
        device: what is measured; on GPUs each stage has its own.
        quick: a small run that shows the machinery.
        progress: called with a line for every model.
        models: names; by default ``deep-narrow`` and ``qwen3-8b`` on GPUs, the shipped model on a CPU.
        stages: processes.
        caps: aggregate tokens of a forward; S2's by default, a few where it is quick or a device is shared.
        concurrencies: requests at a time, likewise.
        requests: so many times the concurrency run in all; S2's 10, likewise.
        most: requests of a run at most, but never fewer than the concurrency; None for no bound.
        instances: turns of each arm; 3 by default, 2 where a device is shared.
        limit: seconds after which the ranks of a model are ended.
        share: all stages on one device, joined through host memory: that they are right, and no times.

    Yields:
        A record for each arm of each point, for each arm of each rank at each cap, and for the crossover, by model;
        of stages that share a device one for each arm of each point alone (``pipeline_shared``).

    Raises:
        InputError: if there are fewer GPUs than stages that share none, or for settings with which nothing can run.
        RankError: if a rank failed, or was not done in time.
    """
    there = torch.cuda.device_count()
    if device.type == "cuda" and there < stages and not share:
        raise InputError(
            f"{stages} stages need {stages} GPUs and {there} are here; ask for fewer, use the CPU, or set share=true, "
            "which shows on one GPU that they are right, and nothing of their speed"
        )
    asked = {"caps": caps, "concurrencies": concurrencies, "requests": requests, "instances": instances}
    large, run = device.type == "cuda" and not quick, new_run()
    given = {name: value for name, value in asked.items() if value is not None}
    told = {
        **SIZES,
        **(SHARED if share else {}),
        **({} if large else QUICK),
        **given,
        "most": most,
        "limit": limit,
    }
    told |= {name: tuple(told[name]) for name in ("caps", "concurrencies")}
    listed = [each for value in told.values() for each in (value if isinstance(value, tuple) else (value,))]
    counts = [each for each in listed if isinstance(each, int | float)]
    if min(stages, *counts) < 1 or not told["caps"] or not told["concurrencies"]:
        raise InputError(
            f"stages {stages}, {', '.join(f'{name} {told[name]}' for name in (*SIZES, 'most', 'limit'))} must be at "
            "least 1 each"
        )
    wide = SHARED_MODELS if share else ("deep-narrow", "qwen3-8b")
    for name in models or (wide if large else ("pico-gqa",)):
        job = StageJob(name, stages, device.type, **told)
        if stages > (layers := find_model(name).config.num_layers):
            raise InputError(
                f"{name} has {layers} layers, and each of {stages} stages needs one; ask for fewer"
            )
        progress(f"{name}: {stages} stages, caps {job.caps}, concurrency {job.concurrencies}")
        if share:
            yield from shared_records(job, device, run)
            continue
        try:
            ranks = run_stages(job)
        except RankError as error:
            # Caps that all ranks had done stay; a crossover over some of the caps would mislead.
            if caps_done := whole_caps(job, error.measured):
                yield from job_records(replace(job, caps=caps_done), error.measured, device, run, sweep=False)
            raise
        yield from job_records(job, ranks, device, run)


def whole_caps(job: StageJob, ranks: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """The caps of a job of which every rank has all points."""
    wanted = len(ARMS) * (len(job.concurrencies) + 1)
    return tuple(
        cap for cap in job.caps
        if ranks and all(sum(p["cap"] == cap for p in rank["points"]) == wanted for rank in ranks)
    )  # fmt: skip


def job_records(
    job: StageJob,
    ranks: Sequence[Mapping[str, Any]],
    device: torch.device,
    run: str,
    *,
    sweep: bool = True,
) -> Iterator[Record]:
    """The records of a job.

    Args:
        job: what was measured.
        ranks: what each rank measured, as ``run_stages`` returns it; points of other caps are left out.
        device: where.
        run: name of the run.
        sweep: with the crossover, which all caps make.
    """
    facts = {"model": job.model, "weights": ranks[0]["weights"], "dtype": job.dtype}
    shared = job.workload(ranks)
    ranks = [
        {**each, "points": [point for point in each["points"] if point["cap"] in job.caps]} for each in ranks
    ]
    swept = [point for point in ranks[0]["points"] if point["kind"] == "throughput"]
    by_place = {(p["cap"], p["concurrency"], p["arm"]): p for p in swept}
    for point in swept:
        eager = by_place[point["cap"], point["concurrency"], "eager"]
        yield make_record(
            bench="pipeline", arm=point["arm"], device=device, run=run, metrics=_throughput(job, point, eager),
            samples={"seconds": point["seconds"]}, coverage=point["coverage"],
            workload={**shared, **{name: point[name] for name in ("cap", "concurrency", "requests")}}, **facts,
        )  # fmt: skip
    for rank, measured in enumerate(ranks):
        for point in (point for point in measured["points"] if point["kind"] == "stage"):
            traced = [_same(other["points"], point) for other in ranks]
            walls = [
                wall
                for p in measured["points"]
                if p["kind"] == "throughput" and (p["cap"], p["concurrency"], p["arm"]) == _place(point)
                for wall in p["stage_ms"]
            ]
            yield make_record(
                bench="pp_prefill", arm=point["arm"], device=device, run=run, metrics=_stage(point, walls, traced),
                samples={"stage_ms": walls}, parity=point["parity"],
                workload={**shared, "cap": point["cap"], "concurrency": point["concurrency"], "rank": rank}, **facts,
            )  # fmt: skip
    if not sweep:
        return
    yield make_record(
        bench="pp_prefill_crossover", arm="breakable", device=device, run=run, metrics=_crossover(job, by_place),
        workload={**shared, "caps": list(job.caps), "concurrencies": list(job.concurrencies)},
        notes="Of each cap the concurrency with the best throughput of each arm counts.", **facts,
    )  # fmt: skip


def _place(point: Point) -> tuple[Any, ...]:
    return point["cap"], point["concurrency"], point["arm"]


def _same(points: Sequence[Point], wanted: Point) -> Point:
    """The traced point of another rank at the same place."""
    return next(p for p in points if p["kind"] == "stage" and _place(p) == _place(wanted))


def _throughput(job: StageJob, point: Point, eager: Point) -> dict[str, Metric]:
    """Input and output tokens over wall time, and whether both arms did the same work (S2's own conditions)."""
    tokens = point["requests"] * (job.prompt + 1)
    found: dict[str, Metric] = {
        "tok_s": tokens / median(point["seconds"]), "requests": float(point["requests"]),
        "errors": float(point["errors"]),
        "forwards_replayed": float(point["coverage"]["captured"]), "forwards_eager": float(point["coverage"]["eager"]),
        "largest_forward": float(point["largest"]), "exact_lengths": point["exact"],
        "tokens_equal": point["tokens"] == eager["tokens"] and point["repeated"],
        "ok": point["exact"] and not point["errors"] and point["largest"] <= point["cap"],
    }  # fmt: skip
    if point is not eager:
        told = difference([[s] for s in eager["seconds"]], [[s] for s in point["seconds"]])
        found |= {"gain": 1 / told.ratio, "verdict": told.verdict}
    return found


def _stage(point: Point, walls: Sequence[float], traced: Sequence[Point]) -> dict[str, Metric]:
    """One stage: wall unprofiled, busy from the traced run, and how many devices were busy at a time in that."""
    stage_ms, busy_ms = median(walls), point["busy_ms"]
    found: dict[str, Metric] = {"stage_ms": stage_ms, "forwards_traced": float(point["forwards"])}
    names = ("breaks", "replay_ms", "break_host_us", "segment_host_us", "host_ms", "break_replay_us")
    found |= {name: point[name] for name in names if name in point}
    if busy_ms is None:
        return found
    found |= {"busy_ms": busy_ms, "gap_ms": stage_ms - busy_ms, "wall_over_busy": stage_ms / busy_ms}
    if "break_replay_us" in point:
        found["break_ms"] = point["break_replay_us"] / 1e3
    return found | {"active_devices": active_devices(traced)}


def active_devices(traced: Sequence[Point]) -> float | None:
    """Average number of devices with a kernel of the model running, over the run that all of them traced.

    Args:
        traced: of each rank ``traced_busy_ms``, the union of its kernels, and ``traced_wall_ms``.

    Returns:
        0 to the number of ranks; None where a rank could not tell.
    """
    busy = [each["traced_busy_ms"] for each in traced]
    if None in busy:
        return None
    return float(sum(busy) / max(each["traced_wall_ms"] for each in traced))


def _crossover(job: StageJob, points: Mapping[tuple[int, int, str], Point]) -> dict[str, Metric]:
    """Up to which cap the captured arm wins, and what a small cap reaches of the largest one's eager peak."""

    def peak(cap: int, arm: str) -> list[list[float]]:
        """Seconds a token by instance, at the concurrency where the arm is fastest."""
        tries = [points[cap, concurrency, arm] for concurrency in job.concurrencies]
        each = [[s / (p["requests"] * (job.prompt + 1)) for s in p["seconds"]] for p in tries]
        return [[seconds] for seconds in min(each, key=median)]

    peaks = {arm: {cap: peak(cap, arm) for cap in job.caps} for arm in ARMS}
    found = find_crossover(peaks["eager"], peaks["breakable"])
    rate = {
        arm: {cap: 1 / median(s for (s,) in each) for cap, each in by.items()} for arm, by in peaks.items()
    }
    small, large = min(job.caps), max(job.caps)
    metrics: dict[str, Metric] = {
        "crossover_cap": None if found.limit is None else float(found.limit), "crossover": found.outcome,
        "safe_cap": None if found.safe_limit is None else float(found.safe_limit), "default_cap": float(STAGE_LIMIT),
        "recovery_eager": rate["eager"][small] / rate["eager"][large],
        "recovery_graph": rate["breakable"][small] / rate["eager"][large],
    }  # fmt: skip
    for cap in job.caps:
        metrics[f"peak_gain_at_{cap}"] = rate["breakable"][cap] / rate["eager"][cap]
    return metrics
