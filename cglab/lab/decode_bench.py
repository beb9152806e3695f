"""The decode bench: arms in turns at several batch sizes, with traces, floor and capture cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cglab.engine.workload import DecodeStep, steady_decode
from cglab.graphs.clocks import clock_for, sample_seconds
from cglab.lab.facade import Lab
from cglab.lab.floor import bytes_read, read_bandwidth
from cglab.lab.opening import open_lab
from cglab.measure.ab import ABResult, interleave
from cglab.measure.parity import Parity
from cglab.measure.prediction import outcome, predict_gain, same_work
from cglab.measure.profiling import profile
from cglab.measure.record import Record, make_record, new_run
from cglab.measure.trace import Trace
from cglab.runners.base import Runner

Progress = Callable[[str], None]
ARMS = ("eager", "full", "breakable")
CALLS = 5


def silent(_: str) -> None:
    """No progress wanted."""


def _sustained(
    runner: Runner[Any], step: DecodeStep, device: torch.device, calls: int
) -> Callable[[], float]:
    """Seconds a step of ``calls`` steps in a row, as a loop without a host read would take."""
    clock = clock_for(device, "wall")
    return lambda: sample_seconds(
        lambda: runner.run(step.live, **step.inputs), clock, repeats=1, warmup=0, calls=calls
    )[0]


def _bare(runner: Runner[Any], step: DecodeStep) -> Callable[[], None] | None:
    """The bare recordings of the step's bucket, without runner; None for the eager arm."""
    sizes = [size for size in runner.captured.captured_sizes if size >= step.live]
    if not sizes:
        return None
    segments = runner.captured.recordings.steps_of(min(sizes))

    def replay() -> None:
        runner.set_live(step.live)
        for segment in segments:
            segment.replay()

    return replay


def _host_us(function: Callable[[], Any], device: torch.device, repeats: int = 30) -> float:
    """Median microseconds until ``function`` returns, the device idle before: what it costs the host."""
    clock, samples = clock_for(device, "wall"), []
    for _ in range(repeats):
        clock.synchronize()
        started = time.perf_counter()
        function()
        samples.append(time.perf_counter() - started)
    clock.synchronize()
    return sorted(samples)[repeats // 2] * 1e6


def decode(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    models: Sequence[str] | None = None,
) -> list[Record]:
    """The decode step: arms in turns at several batch sizes, with traces, floor and capture cost.

    Args:
        device: what is measured.
        quick: a small run that shows the machinery.
        progress: called with a line for every stage.
        models: names; by default the two Qwen3 shapes on a GPU and the shipped model on a CPU.
    """
    on_gpu = device.type == "cuda"
    names = models or (("qwen3-0.6b", "qwen3-8b") if on_gpu and not quick else ("pico-gqa",))
    records: list[Record] = []
    run = new_run()
    bandwidth = read_bandwidth(device, 4.0 if on_gpu else 0.2)
    for name in names:
        options = {} if on_gpu else {"max_batch": 4, "max_context": 128}
        with open_lab(name, device=device, **options) as lab:  # type: ignore[arg-type]
            for arm in ARMS:
                progress(f"{name}: capture {arm}")
                lab.runner(arm)
            for batch in [b for b in (1, 16, 64) if b <= lab.buckets[-1]]:
                context = min(512, lab.max_context) if on_gpu else 64
                progress(f"{name}: batch {batch}, context {context}")
                with steady_decode(lab.engine, batch, context) as step:
                    records += _decode_point(lab, step, run, bandwidth, quick=quick or not on_gpu)
    return records


def _decode_point(lab: Lab, step: DecodeStep, run: str, bandwidth: float, *, quick: bool) -> list[Record]:
    device = lab.device
    runners = {arm: lab.runner(arm) for arm in ARMS}
    before = {arm: runner.coverage().copy() for arm, runner in runners.items()}
    traces = {
        arm: profile(lambda r=runner: r.run(step.live, **step.inputs), steps=3, device=device)  # type: ignore[misc]
        for arm, runner in runners.items()
    }
    calls, repeats = (1, 3) if quick else (CALLS, 5)
    times = interleave(
        {arm: _sustained(runner, step, device, calls) for arm, runner in runners.items()},
        repeats=repeats,
        warmup=1,
    )
    parity = {arm: lab.step_parity(arm, step) for arm in ARMS if arm != "eager"}
    floor = bytes_read(lab.model, lab.config, step)
    records = []
    for arm, runner in runners.items():
        metrics: dict[str, Any] = {
            **_timed_metrics(arm, times, traces, device),
            "floor_ms": floor / bandwidth * 1e3, "floor_bytes": float(floor), "bandwidth_tb_s": bandwidth / 1e12,
            **_cost_metrics(runner, step, device),
        }  # fmt: skip
        records.append(
            make_record(
                bench="decode", arm=arm, device=device, run=run, metrics=metrics,
                samples={
                    "step_ms": [s * 1e3 for i in times[arm].instances for s in i],
                    **_ledger_columns(runner),
                },
                model=lab.name, weights=lab.weights, dtype=str(lab.dtype).removeprefix("torch."),
                workload={**lab.describe(step), "calls": calls},
                parity=_as_dict(parity.get(arm)), coverage=(runner.coverage() - before[arm]).as_dict(),
            )
        )  # fmt: skip
    return records


def _as_dict(parity: Parity | None) -> dict[str, Any] | None:
    return None if parity is None else parity.as_dict()


def _timed_metrics(
    arm: str, times: ABResult, traces: Mapping[str, Trace], device: torch.device
) -> dict[str, Any]:
    result, trace = times[arm], traces[arm]
    wall = None if result.median is None else result.median * 1e3
    metrics: dict[str, Any] = {
        "step_ms": wall,
        "step_low_ms": None if result.interval is None else result.interval.low * 1e3,
        "step_high_ms": None if result.interval is None else result.interval.high * 1e3,
        "ratio_to_eager": result.ratio, "verdict": result.verdict, "error": result.error,
    }  # fmt: skip
    busy = trace.busy_us()
    if device.type != "cuda" or busy is None or wall is None:
        return metrics
    metrics |= {
        "busy_ms": busy / trace.steps / 1e3, "launches": trace.launches / trace.steps,
        "graph_launches": trace.graph_launches / trace.steps,
        "kernels": sum(trace.kernels.values()) / trace.steps, "gap_us": trace.mean_gap_us(),
    }  # fmt: skip
    eager_wall = times["eager"].median
    if arm != "eager" and eager_wall is not None:
        predicted = predict_gain(traces["eager"], wall_us=eager_wall * 1e6)
        told = outcome(predicted, wall * 1e3, trace)
        work = same_work(traces["eager"], trace)
        metrics |= {
            "predicted_gain_ms": told.predicted_us / 1e3, "gained_ms": told.gained_us / 1e3, "outcome": told.verdict,
            "outcome_text": str(told), "busy_ratio": work.busy_ratio,
        }  # fmt: skip
        metrics |= _breaks(trace, wall, busy / trace.steps / 1e3, told.verdict)
    return metrics


def _breaks(trace: Trace, wall_ms: float, busy_ms: float, verdict: str) -> dict[str, Any]:
    """What breaks cost: each hands the device back to the host, and that gap cannot be gained.

    The remaining gap is taken from the unprofiled wall time, since profiling slows the host down most of all.
    """
    breaks = trace.graph_launches / trace.steps - 1
    if breaks < 1:
        return {}
    left = max(wall_ms - busy_ms, 0.0)
    told = f"{breaks:.0f} breaks leave {left:.2f} ms of the gap, {left / breaks * 1e3:.0f} us each"
    explained = {"outcome": "explained by breaks", "outcome_text": told} if verdict == "unexplained" else {}
    return {"breaks": breaks, "break_us": left / breaks * 1e3, **explained}


def _ledger_columns(runner: Runner[Any]) -> dict[str, list[float]]:
    """The bucket ledger as columns, in the order of capture."""
    rows = runner.captured.memory()
    if not rows:
        return {}
    names = ("warmup_ms", "capture_ms", "pool_bytes", "device_bytes", "breaks", "warmups")
    sizes = [float(line.key.size) for line in runner.captured.ledger]
    return {"bucket": sizes, **{f"bucket_{name}": [float(row[name]) for row in rows] for name in names}}


def _cost_metrics(runner: Runner[Any], step: DecodeStep, device: torch.device) -> dict[str, Any]:
    ledger = runner.captured.ledger
    if not ledger:
        return {}
    metrics: dict[str, Any] = {
        "buckets": float(len(ledger)),
        "capture_s": sum(c.capture_seconds for c in ledger),
        "warmup_s": sum(c.warmup_seconds for c in ledger),
        "capture_gb": sum(c.pool_bytes + c.device_bytes for c in ledger) / 1e9,
        "pool_gb": sum(c.pool_bytes for c in ledger) / 1e9,
        "capture_ms_per_bucket": sum(c.capture_seconds + c.warmup_seconds for c in ledger)
        / len(ledger)
        * 1e3,
    }
    bare = _bare(runner, step)
    if bare is not None and runner.backend == "full" and device.type == "cuda":
        clock = clock_for(device, "wall")
        seconds = sorted(sample_seconds(bare, clock, repeats=5, warmup=2, calls=CALLS))[2]
        through_runner = _host_us(lambda: runner.run(step.live, **step.inputs), device)
        metrics |= {"replay_ms": seconds * 1e3, "host_us": through_runner - _host_us(bare, device)}
    return metrics
