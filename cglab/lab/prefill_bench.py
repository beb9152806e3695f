"""The prefill bench: one step of several sizes by every arm, and what its breaks cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cglab.engine.workload import PrefillStep, steady_prefill
from cglab.graphs.buckets import bucket_list, padding_waste, sglang_prefill
from cglab.lab.facade import Lab
from cglab.lab.opening import open_lab
from cglab.lab.step_metrics import (
    ARMS,
    CALLS,
    Progress,
    bare_metrics,
    break_metrics,
    ledger_columns,
    ledger_metrics,
    model_facts,
    silent,
    sustained,
    timed_metrics,
)
from cglab.measure.ab import interleave
from cglab.measure.profiling import profile
from cglab.measure.record import Record, make_record, new_run
from cglab.models.compiled import nothing_compiled
from cglab.runners.prefill import PrefillRunner

POINTS = ((8192, 0), (1024, 8192), (2048, 0), (1025, 0), (512, 0), (128, 0))
"""New and cached tokens of the measured steps, largest first, as buckets are captured on first use; 1025 is padded
to 1280, the most that SGLang's list pads a step of this size."""
QUICK_POINTS = ((64, 0), (24, 32), (33, 0))
SAMPLE_SECONDS = 0.15
"""Length of one sample: as many steps in a row as fit, from 1 to ``CALLS``."""


def prefill(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    models: Sequence[str] | None = None,
) -> Iterator[Record]:
    """One prefill step by every arm, in turns: busy time, launches, breaks, padding, capture cost of its bucket.

    Args:
        device: what is measured.
        quick: a small run that shows the machinery.
        progress: called with a line for every stage.
        models: names; by default the two Qwen3 shapes on a GPU and the shipped model on a CPU.

    Yields:
        A record for each arm of each step, by model.
    """
    large = device.type == "cuda" and not quick
    names = models or (("qwen3-8b", "qwen3-0.6b") if large else ("pico-gqa",))
    points = POINTS if large else QUICK_POINTS
    budget, context = max(tokens for tokens, _ in points), max(map(sum, points)) + 1
    run = new_run()
    for name in names:
        progress(f"{name}: open")
        with open_lab(
            name, device=device, max_batch=2, max_context=context, token_budget=budget,
            prefill_buckets=bucket_list(budget, sglang_prefill),  # above the lab's own limit too
        ) as lab:  # fmt: skip
            for tokens, cached in points:
                progress(f"{name}: {tokens} tokens after {cached} cached")
                with steady_prefill(lab.engine, tokens, cached) as step:
                    records = _point(lab, step, run, quick=not large)
                yield from records


def calls_within(seconds: float) -> int:
    """How many steps of this length make a sample."""
    return max(1, min(CALLS, int(SAMPLE_SECONDS / seconds)))


def _point(lab: Lab, step: PrefillStep, run: str, *, quick: bool) -> list[Record]:
    device = lab.device
    runners = {arm: lab.phases.prefill(arm) for arm in ARMS}
    before = {arm: runner.coverage().copy() for arm, runner in runners.items()}
    traces = {
        arm: profile(lambda r=runner: r.run(step.live, **step.inputs), steps=2, device=device)  # type: ignore[misc]
        for arm, runner in runners.items()
    }
    calls = 1 if quick else calls_within(sustained(runners["eager"], step, device, 1)())
    timed = {arm: sustained(runner, step, device, calls) for arm, runner in runners.items()}
    with nothing_compiled(lab.model):  # B57, B58
        times = interleave(timed, repeats=3, warmup=1)
    parity = {arm: lab.step_parity(arm, step, "prefill").as_dict() for arm in ARMS if arm != "eager"}
    records = []
    for arm, runner in runners.items():
        counted = (runner.coverage() - before[arm]).as_dict()  # what follows is not the runner's own business
        metrics: dict[str, Any] = timed_metrics(arm, times, traces, device)
        busy = metrics.get("busy_ms")
        metrics |= {
            **ledger_metrics(runner.captured.ledger),
            **bare_metrics(runner, step, device, calls=calls),
            **break_metrics(runner, step, device, busy_ms=busy, calls=calls),
            "calls": float(calls),
            "wall_over_busy": metrics["step_ms"] / busy if busy and metrics["step_ms"] else None,
            "padding_waste": _waste(runner.captured.pad(step.rows), step) if arm != "eager" else 0.0,
        }
        records.append(
            make_record(
                bench="prefill", arm=arm, device=device, run=run, metrics=metrics,
                samples={
                    "step_ms": [s * 1e3 for i in times[arm].instances for s in i],
                    **ledger_columns(runner.captured.ledger),
                },
                workload={**lab.describe(step, "prefill"), **_axis(runner)},
                parity=parity.get(arm), coverage=counted, **model_facts(lab),
                notes="Buckets are SGLang's list, each captured when a step first needed it.",
            )
        )  # fmt: skip
    return records


def _waste(bucket: object, step: PrefillStep) -> float:
    """Padded rows over live ones; a step that runs eager has none."""
    return padding_waste(step.rows, bucket) if isinstance(bucket, int) else 0.0


def _axis(runner: PrefillRunner) -> dict[str, int]:
    """The fixed sizes of a full recording."""
    sizes = {"max_requests": runner.max_requests, "max_cached": runner.max_cached}
    return sizes if runner.backend == "full" else {}
