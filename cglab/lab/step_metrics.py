"""What the benches of one step share: how a step is timed, and the figures beside its time.

Times are unprofiled; kernel-busy time, launches and gaps come from a trace of a run apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from cglab.engine.workload import Step
from cglab.errors import InputError
from cglab.graphs.breaks import BreakCall
from cglab.graphs.clocks import clock_for, median_seconds, sample_seconds
from cglab.graphs.ledger import CaptureCost
from cglab.graphs.recorder import Segment
from cglab.lab.facade import Lab
from cglab.measure.ab import ABResult
from cglab.measure.prediction import outcome, predict_gain, same_work
from cglab.measure.trace import Trace
from cglab.runners.base import Runner

Progress = Callable[[str], None]
ARMS = ("eager", "full", "breakable")
UNCAPTURED = ("eager", "transformers")
"""Arms of which no capture is expected to win the launch gap."""
CALLS = 5
"""Steps in a row behind one sample, as a loop without a host read would run them."""


def silent(_: str) -> None:
    """No progress wanted."""


def model_facts(lab: Lab) -> dict[str, Any]:
    """The model's fields of a record."""
    return {"model": lab.name, "weights": lab.weights, "dtype": str(lab.dtype).removeprefix("torch.")}


def sustained(
    runner: Runner[Any], step: Step, device: torch.device, calls: int = CALLS
) -> Callable[[], float]:
    """Seconds a step of ``calls`` steps in a row, as a loop without a host read would take."""
    clock = clock_for(device, "wall")
    return lambda: sample_seconds(
        lambda: runner.run(step.live, **step.inputs), clock, repeats=1, warmup=0, calls=calls
    )[0]


def recorded_steps(runner: Runner[Any], step: Step) -> tuple[Segment | BreakCall, ...]:
    """What is recorded for the step's bucket; nothing where the step runs eager."""
    size = runner.captured.pad(step.rows)
    captured = isinstance(size, int) and size in runner.captured.captured_sizes
    return runner.captured.recordings.steps_of(size) if captured else ()  # type: ignore[arg-type]


def bare(runner: Runner[Any], step: Step) -> Callable[[], None]:
    """The bare recordings of the step's bucket, without runner: over what its last run left in the buffers."""
    recorded = recorded_steps(runner, step)

    def replay() -> None:
        with runner.during(step.live):
            for each in recorded:
                each.replay()

    return replay


def host_us(function: Callable[[], Any], device: torch.device, repeats: int = 30) -> float:
    """Median microseconds until ``function`` returns, the device idle before: what it costs the host.

    Fewer repeats, but three, where they take more than a second.
    """
    clock, began = clock_for(device, "wall"), time.perf_counter()
    samples: list[float] = []
    while len(samples) < repeats and (len(samples) < 3 or time.perf_counter() - began < 1):
        clock.synchronize()
        started = time.perf_counter()
        function()
        samples.append(time.perf_counter() - started)
    clock.synchronize()
    return median(samples) * 1e6


def timed_metrics(
    arm: str, times: ABResult, traces: Mapping[str, Trace], device: torch.device
) -> dict[str, Any]:
    """Step time and verdict; on a GPU also what the trace shows, and what came of the prediction.

    Args:
        arm: one of ``times``, whose first arm is eager.
        times: of all arms.
        traces: of all arms.
        device: what was measured.
    """
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
    if arm not in UNCAPTURED and eager_wall is not None and traces["eager"].reliable:
        metrics |= won_metrics(traces["eager"], eager_wall * 1e6, wall * 1e3, trace)
        metrics["busy_ratio"] = same_work(traces["eager"], trace).busy_ratio
        metrics |= _left_by_breaks(trace, wall, busy / trace.steps / 1e3, metrics["outcome"])
    return metrics


def won_metrics(
    eager: Trace, eager_wall_us: float, captured_wall_us: float, captured: Trace | None = None
) -> dict[str, Any]:
    """What the eager trace predicts that a graph wins, and what was won; or why nothing can be predicted.

    Args:
        eager: trace of the eager step.
        eager_wall_us: its unprofiled wall time.
        captured_wall_us: that of the captured step.
        captured: its trace, to explain a difference.
    """
    try:
        predicted = predict_gain(eager, wall_us=eager_wall_us)
    except InputError as error:
        return {"outcome": "no prediction", "outcome_text": str(error)}
    told = outcome(predicted, captured_wall_us, captured)
    return {
        "predicted_gain_ms": told.predicted_us / 1e3, "gained_ms": told.gained_us / 1e3, "outcome": told.verdict,
        "outcome_text": str(told),
    }  # fmt: skip


def _left_by_breaks(trace: Trace, wall_ms: float, busy_ms: float, verdict: str) -> dict[str, Any]:
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


def break_metrics(
    runner: Runner[Any], step: Step, device: torch.device, *, busy_ms: float | None, calls: int = CALLS
) -> dict[str, float]:
    """The cost of a break, measured directly: nothing for a step without breaks.

    On the host, until the call returns: ``break_body_us`` of the marked function alone, ``break_host_us`` of the whole
    break, ``segment_host_us`` of the launch of the segment after it; ``host_ms`` is what these come to in a replay.
    Where that is below the kernel-busy time, the host is ahead of the device and its work is hidden.
    On the device: ``break_replay_us`` is what the bare replay takes beyond the kernel-busy time, for each break.

    Args:
        runner: whose bucket of the step is captured.
        step: was run by it before.
        device: what is measured.
        busy_ms: kernel-busy time of the captured step; None if no trace tells it.
        calls: replays in a row.
    """
    recorded = recorded_steps(runner, step)
    breaks = [each for each in recorded if isinstance(each, BreakCall)]
    if not breaks:
        return {}
    segments = [each for each in recorded if not isinstance(each, BreakCall)]
    seconds = median_seconds(bare(runner, step), clock_for(device, "wall"), repeats=5, warmup=1, calls=calls)
    metrics = {"breaks": float(len(breaks)), "replay_ms": seconds * 1e3}
    with runner.during(step.live), torch.no_grad():
        breaks[0].replay()  # the first break of a step derives what all share
        metrics["break_body_us"] = host_us(breaks[0].call, device)
        metrics["break_host_us"] = host_us(breaks[0].replay, device)
        metrics["segment_host_us"] = host_us(segments[1].replay, device)
    metrics["host_ms"] = len(breaks) * (metrics["break_host_us"] + metrics["segment_host_us"]) / 1e3
    if busy_ms is not None:
        metrics["break_replay_us"] = max(seconds * 1e6 - busy_ms * 1e3, 0.0) / len(breaks)
    return metrics


def bare_metrics(
    runner: Runner[Any], step: Step, device: torch.device, *, calls: int = CALLS
) -> dict[str, float]:
    """What a ``full`` replay takes without its runner, and what the runner costs the host; GPU only."""
    if runner.backend != "full" or device.type != "cuda" or not recorded_steps(runner, step):
        return {}
    replay = bare(runner, step)
    # In turns, as a host's speed drifts by more than the difference.
    beyond = [
        host_us(lambda: runner.run(step.live, **step.inputs), device, 10) - host_us(replay, device, 10)
        for _ in range(11)
    ]
    seconds = median_seconds(replay, clock_for(device, "wall"), repeats=5, warmup=2, calls=calls)
    return {"replay_ms": seconds * 1e3, "host_us": median(beyond)}


def ledger_metrics(ledger: Sequence[CaptureCost]) -> dict[str, float]:
    """What all captured buckets cost together; nothing where none was captured."""
    if not ledger:
        return {}
    seconds = sum(c.capture_seconds + c.warmup_seconds for c in ledger)
    return {
        "buckets": float(len(ledger)), "largest_bucket": float(max(c.key.size for c in ledger)),
        "capture_s": sum(c.capture_seconds for c in ledger), "warmup_s": sum(c.warmup_seconds for c in ledger),
        "capture_gb": sum(c.pool_bytes + c.device_bytes for c in ledger) / 1e9,
        "pool_gb": sum(c.pool_bytes for c in ledger) / 1e9, "capture_ms_per_bucket": seconds / len(ledger) * 1e3,
    }  # fmt: skip


def ledger_columns(ledger: Sequence[CaptureCost]) -> dict[str, list[float]]:
    """The bucket ledger as columns, in the order of capture."""
    if not ledger:
        return {}
    names = ("warmup_ms", "capture_ms", "pool_bytes", "device_bytes", "breaks", "warmups")
    rows = [line.as_row() for line in ledger]
    return {
        "bucket": [float(line.key.size) for line in ledger],
        **{f"bucket_{name}": [float(row[name]) for row in rows] for name in names},
    }
