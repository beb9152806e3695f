"""The planner bench: size traces of three loads, and the buckets that are best for each, beside SGLang's list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cglab.engine.workload import Step, steady_decode, steady_prefill
from cglab.errors import InputError
from cglab.lab.apart import runner_apart
from cglab.lab.bucket_costs import MeasuredCosts, measured_costs
from cglab.lab.facade import Lab
from cglab.lab.load_bench import open_for
from cglab.lab.loads import LOADS, QUICK_LOADS
from cglab.lab.planning import PhasePlan, plan
from cglab.lab.size_trace import SizeTrace
from cglab.lab.step_metrics import Progress, model_facts, silent, sustained
from cglab.measure.record import Record, make_record, new_run
from cglab.runners.base import Runner
from cglab.settings import read_settings

REPEATS = 5
CONTEXT = 512
"""Tokens of each request in the decode steps that are timed, or as many as fit."""


def planner(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    models: Sequence[str] | None = None,
    traces: str | None = None,
) -> Iterator[Record]:
    """Records each load's trace from the engine, measures what buckets cost, plans at the memory of SGLang's list.

    Args:
        device: what is measured.
        quick: small loads that show the machinery.
        progress: called with a line for every stage.
        models: names; by default ``qwen3-0.6b`` on a GPU and the shipped model on a CPU.
        traces: folder for the traces; None keeps those of the full loads in ``data/traces``, and no others.

    Yields:
        For each load and phase a record of the plan and one of SGLang's list.

    Raises:
        InputError: if traces of small loads are to go where those of the full loads are.
    """
    large = device.type == "cuda" and not quick
    committed = read_settings().data / "traces"
    if not large and traces is not None and Path(traces).resolve() == committed.resolve():
        raise InputError(
            f"{committed} holds traces of the full loads, which a quick run or one on a CPU would replace by those of "
            "small ones; give traces another folder, or run the full loads on a GPU"
        )
    kept = traces if traces is not None or not large else committed
    run = new_run()
    for name in models or ("qwen3-0.6b" if large else "pico-gqa",):
        for kind, load in (LOADS if large else QUICK_LOADS).items():
            with open_for(name, load, device, budget=None if large else 64) as lab:
                progress(f"{name}: trace of {kind}")
                costs = {"decode": decode_costs(lab)}  # before the pool has grown for anything else
                made = lab.load(load)
                trace = SizeTrace.from_steps(
                    kind, made.steps, model=Path(name).name, load=load.as_dict(), payload=made.result.payload
                )
                if kept is not None:
                    trace.save(kept)
                progress(f"{name}: cost of prefill buckets")
                costs["prefill"] = prefill_costs(lab, spread(lab.engine.scheduler.options.token_budget))
                for phase in trace.phases:
                    found = plan(trace, phase, costs[phase])
                    yield from _records(lab, found, run)


def decode_costs(lab: Lab) -> MeasuredCosts:
    """What the lab's decode buckets cost, every bucket timed full and eager."""
    full, eager = lab.runner("full"), lab.runner("eager")
    step_ms, eager_ms = {}, {}
    for size in full.captured.captured_sizes:
        with steady_decode(lab.engine, size, min(CONTEXT, lab.max_context)) as step:
            step_ms[size], eager_ms[size] = (_step_ms(lab, runner, step) for runner in (full, eager))
    return measured_costs(full.captured.ledger, step_ms, eager_ms)


def spread(largest: int) -> list[int]:
    """Sizes from 1 to ``largest``, each twice the one before: every step of a trace lies between two of them."""
    return [*(2**power for power in range(largest.bit_length()) if 2**power < largest), largest]


def prefill_costs(lab: Lab, buckets: Sequence[int] | None = None) -> MeasuredCosts:
    """What prefill buckets cost, every one timed breakable and eager on tokens without a cached prefix.

    Args:
        lab: an open lab.
        buckets: token counts, the largest within a step's budget; None for the lab's list.
    """
    eager = lab.runner("eager", "prefill")
    step_ms, eager_ms = {}, {}
    with runner_apart(lab, "prefill", "breakable", buckets) as breakable:
        breakable.capture()
        for size in breakable.captured.captured_sizes:
            requests = split(size, lab.engine.largest_batch, lab.max_context - 1)
            with steady_prefill(lab.engine, size, requests=requests) as step:
                step_ms[size], eager_ms[size] = (_step_ms(lab, runner, step) for runner in (breakable, eager))
        return measured_costs(breakable.captured.ledger, step_ms, eager_ms)


def split(tokens: int, most: int, longest: int) -> int:
    """The fewest requests, at most ``most``, that share ``tokens`` evenly with at most ``longest`` each.

    Raises:
        InputError: if there is no such number.
    """
    for requests in range(1, most + 1):
        if tokens % requests == 0 and tokens // requests <= longest:
            return requests
    raise InputError(
        f"{tokens} tokens cannot be split evenly over {most} requests of {longest} tokens; "
        "open the lab with a longer max_context or a larger max_batch"
    )


def _step_ms(lab: Lab, runner: Runner[Any], step: Step) -> float:
    once = sustained(runner, step, lab.device, 1)
    once()
    return median(once() for _ in range(REPEATS)) * 1e3


def _records(lab: Lab, found: PhasePlan, run: str) -> Iterator[Record]:
    chosen, listed = found.plan.chosen, found.plan.sglang
    for arm, each in {"plan": chosen, "sglang": listed}.items():
        yield make_record(
            bench="planner", arm=arm, device=lab.device, run=run,
            metrics={
                "time_ms": each.time_ms, "ratio_to_sglang": each.time_ms / listed.time_ms, "waste": each.waste,
                "buckets": float(len(each.buckets)), "captured_steps": float(each.captured_steps),
                "eager_steps": float(each.eager_steps), "memory_mb": each.memory_bytes / 1e6,
                "capture_s": each.capture_seconds,
                "ok": each.time_ms <= listed.time_ms and each.memory_bytes <= listed.memory_bytes,
            },
            samples={"bucket": [float(size) for size in each.buckets]},
            workload={"trace": found.trace.as_dict(), "load": found.trace.name, "phase": found.phase},
            notes=found.note, **model_facts(lab),
        )  # fmt: skip
