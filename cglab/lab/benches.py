"""The recorded benches: each measures its arms in turns and returns result records.

A bench says what it did with its own numbers: times unprofiled, busy time from a run apart, parity and coverage
beside them, and what was predicted from the eager trace before anything was captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cglab.engine.workload import DecodeStep, steady_decode
from cglab.graphs.clocks import clock_for, sample_seconds
from cglab.lab import suites
from cglab.lab.facade import Lab
from cglab.lab.floor import bytes_read, read_bandwidth
from cglab.lab.opening import open_lab
from cglab.lab.recovery import recovery_sweep
from cglab.measure.ab import ABResult, interleave
from cglab.measure.parity import Parity
from cglab.measure.prediction import outcome, predict_gain, same_work
from cglab.measure.profiling import profile
from cglab.measure.record import Record, make_record, new_run
from cglab.measure.trace import Trace
from cglab.runners.decode import DecodeRunner

Progress = Callable[[str], None]
ARMS = ("eager", "full", "breakable")
CALLS = 10


@dataclass(frozen=True)
class Bench:
    """One bench.

    Attributes:
        text: what it measures.
        run: called with the device, ``quick`` and a progress function; returns the records.
    """

    text: str
    run: Callable[..., list[Record]]


def _silent(_: str) -> None:
    """No progress wanted."""


def _sustained(
    runner: DecodeRunner, step: DecodeStep, device: torch.device, calls: int
) -> Callable[[], float]:
    """Seconds a step of ``calls`` steps in a row, as a loop without a host read would take."""
    clock = clock_for(device, "wall")
    return lambda: sample_seconds(
        lambda: runner.run(step.live, **step.inputs), clock, repeats=1, warmup=0, calls=calls
    )[0]


def _bare(runner: DecodeRunner, step: DecodeStep) -> Callable[[], None] | None:
    """The bare recordings of the step's bucket, without runner; None for the eager arm."""
    sizes = [size for size in runner.captured.captured_sizes if size >= step.live]
    if not sizes:
        return None
    segments = runner.captured.recordings.steps_of(min(sizes))

    def replay() -> None:
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
    progress: Progress = _silent,
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
                samples={"step_ms": [s * 1e3 for i in times[arm].instances for s in i]},
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


def _cost_metrics(runner: DecodeRunner, step: DecodeStep, device: torch.device) -> dict[str, Any]:
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


def recovery(device: torch.device, *, quick: bool = False, progress: Progress = _silent) -> list[Record]:
    """An exception at recorded operations of a captured decode step; after each, a right step and a right capture.

    Args:
        device: where it runs.
        quick: first, last and a few operations instead of all.
        progress: called with a line for every mode.
    """
    records, run = [], new_run()
    for mode in ("full", "breakable"):
        progress(f"recovery of a {mode} capture")
        swept = recovery_sweep(device, mode, sample=6 if quick else None)
        records.append(
            make_record(
                bench="recovery", arm=mode, device=device, run=run,
                model="pico-gqa", weights="trained", dtype="float32",
                metrics={
                    "operations": float(swept.operations), "tried": float(len(swept.tried)),
                    "failed": float(len(swept.failed)), "ok": not swept.failed,
                    "memory_growth_bytes": float(swept.growth),
                },
                notes="; ".join(swept.failed[:5]),
            )
        )  # fmt: skip
    return records


def parity(device: torch.device, *, quick: bool = False, progress: Progress = _silent) -> list[Record]:
    """Random sequences of decode batches against the three oracles, in float32 and, on a GPU, bfloat16.

    Args:
        device: the recorder follows from it.
        quick: few sequences.
        progress: called with a line for every dtype.
    """
    from cglab.lab.oracles import check_technique

    records, run = [], new_run()
    cases = 20 if quick else 2000
    for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
        progress(f"parity in {dtype}")
        found = check_technique(
            "decode", cases if dtype == torch.float32 else cases // 4, device=device, dtype=dtype
        )
        facts = found.as_dict()
        metrics: dict[str, Any] = {k: v for k, v in facts.items() if isinstance(v, bool | str)}
        metrics |= {
            k: float(v) for k, v in facts.items() if isinstance(v, int | float) and not isinstance(v, bool)
        }
        records.append(
            make_record(
                bench="parity", arm="decode", device=device, run=run, model="pico-gqa", weights="trained",
                dtype=found.dtype, workload={"cases": found.cases}, metrics={**metrics, "ok": found.ok},
                notes="; ".join(map(str, found.mismatches[:3])),
            )
        )  # fmt: skip
    return records


BENCHES: Mapping[str, Bench] = {
    "decode": Bench(
        "decode step: eager, full and breakable in turns; launches, gaps, floor, capture cost", decode
    ),
    "recovery": Bench(
        "a fault at every recorded operation of a capture, and what is left afterwards", recovery
    ),
    "parity": Bench("random sequences of batches against the three oracles", parity),
    "notebooks": Bench("every notebook under nbval, on the model of CGLAB_MODEL", suites.notebooks),
    "gpu-tests": Bench("the tests that need a CUDA device", suites.gpu_tests),
}
