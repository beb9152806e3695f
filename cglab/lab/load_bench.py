"""The load bench: three loads with decoding, prefill eager and breakable in turns: latency, rates, occupancy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from cglab.engine.load import Load
from cglab.lab.facade import Lab
from cglab.lab.load_run import LoadRun
from cglab.lab.loads import LOADS, QUICK_LOADS
from cglab.lab.opening import open_lab
from cglab.lab.step_metrics import Progress, model_facts, silent
from cglab.measure.ab import schedule
from cglab.measure.parity import worst
from cglab.measure.record import Record, make_record, new_run
from cglab.measure.statistics import Instances, difference

ARMS = ("eager", "breakable")
INSTANCES = 3
MEASURES: Mapping[str, Callable[[LoadRun], list[float]]] = {
    "ttft": lambda run: [each.ttft for each in run.result.requests if each.ttft],
    "tpot": lambda run: [each.tpot for each in run.result.requests if each.tpot],
    "e2e": lambda run: [each.e2e for each in run.result.requests if each.e2e],
}
"""Seconds of every request, for the verdicts."""


def open_for(name: str, load: Load, device: torch.device, *, budget: int | None) -> Lab:
    """A lab in which a load just fits, so that decode attends over no more cache than it needs.

    Args:
        name: of the model.
        load: what it will be asked.
        device: where it runs.
        budget: tokens of a prefill step; None for the default.
    """
    return open_lab(
        name, device=device, max_batch=load.concurrency, max_context=load.longest, token_budget=budget
    )


def load(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    models: Sequence[str] | None = None,
) -> Iterator[Record]:
    """Each load by prefill arm, in turns, decode captured in full: what users feel, and how busy the device was kept.

    Args:
        device: what is measured.
        quick: small loads that show the machinery.
        progress: called with a line for every load.
        models: names; by default ``qwen3-8b`` on a GPU and the shipped model on a CPU.

    Yields:
        A record for each arm of each load, by model.
    """
    large = device.type == "cuda" and not quick
    run = new_run()
    for name in models or ("qwen3-8b" if large else "pico-gqa",):
        for kind, asked in (LOADS if large else QUICK_LOADS).items():
            progress(f"{name}: {kind}")
            with open_for(name, asked, device, budget=None if large else 64) as lab:
                runs = _turns(lab, asked)
                facts = model_facts(lab)
            workload = {"load": kind, **asked.as_dict(), "decode": "full"}
            for arm in ARMS:
                yield make_record(
                    bench="load", arm=arm, device=device, run=run, metrics=_metrics(runs, arm),
                    samples={f"{what}_ms": _flat(of, runs[arm]) for what, of in MEASURES.items()},
                    workload=workload | {"payload": runs[arm][0].result.payload},
                    coverage={phase: each.as_dict() for phase, each in runs[arm][-1].coverage.items()},
                    notes="Coverage is of the last run. In low precision a padded step may round differently, and a "
                    "token at a near-tie then parts the outputs: see tokens_equal and first_difference.", **facts,
                )  # fmt: skip


def _turns(lab: Lab, asked: Load) -> dict[str, list[LoadRun]]:
    """Runs in turns; the first of each arm, in which buckets are captured and kernels loaded, is dropped."""
    runs: dict[str, list[LoadRun]] = {arm: [] for arm in ARMS}
    for _, arm in schedule(ARMS, 0, INSTANCES + 1):
        lab.captures.prefill = arm
        runs[arm].append(lab.load(asked))
    return {arm: instances[1:] for arm, instances in runs.items()}


def _flat(of: Callable[[LoadRun], list[float]], runs: Sequence[LoadRun]) -> list[float]:
    return [seconds * 1e3 for run in runs for seconds in of(run)]


def _metrics(runs: Mapping[str, Sequence[LoadRun]], arm: str) -> dict[str, Any]:
    """Medians over the instances of every figure of latency and occupancy, and verdicts against eager."""
    each = [
        run.latency.as_dict()
        | {"occupancy_percent": run.occupancy, "gauge_percent": run.gauge.median}
        | {f"{kind}_occupancy_percent": share for kind, share in run.occupancy_by_kind.items()}
        for run in runs[arm]
    ]
    known = {name: [value for one in each if (value := one.get(name)) is not None] for name in each[0]}
    metrics: dict[str, Any] = {name: float(median(values)) for name, values in known.items() if values}
    if arm == "eager":
        return metrics
    tokens = worst(run.parity(runs["eager"][0]) for run in runs[arm])
    metrics |= {"tokens_equal": tokens.verdict == "bitwise", "first_difference": tokens.detail}
    for what, of in MEASURES.items():
        eager, other = (_instances(of, runs[a]) for a in ("eager", arm))
        if eager and other:
            found = difference(eager, other)
            metrics |= {f"{what}_ratio": found.ratio, f"{what}_verdict": found.verdict}
    return metrics


def _instances(of: Callable[[LoadRun], list[float]], runs: Sequence[LoadRun]) -> Instances:
    return [samples for run in runs if (samples := of(run))]
