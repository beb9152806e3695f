"""The decode bench: arms in turns at several batch sizes, with traces, floor and capture cost."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cglab.engine.workload import DecodeStep, steady_decode
from cglab.lab.facade import Lab
from cglab.lab.floor import bytes_read, read_bandwidth
from cglab.lab.opening import open_lab
from cglab.lab.step_metrics import (
    ARMS,
    CALLS,
    Progress,
    bare_metrics,
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
        {arm: sustained(runner, step, device, calls) for arm, runner in runners.items()},
        repeats=repeats,
        warmup=1,
    )
    parity = {arm: lab.step_parity(arm, step).as_dict() for arm in ARMS if arm != "eager"}
    floor = bytes_read(lab.model, lab.config, step)
    return [
        make_record(
            bench="decode", arm=arm, device=device, run=run,
            metrics={
                **timed_metrics(arm, times, traces, device),
                "floor_ms": floor / bandwidth * 1e3, "floor_bytes": float(floor), "bandwidth_tb_s": bandwidth / 1e12,
                **ledger_metrics(runner.captured.ledger), **bare_metrics(runner, step, device),
            },
            samples={
                "step_ms": [s * 1e3 for i in times[arm].instances for s in i],
                **ledger_columns(runner.captured.ledger),
            },
            workload={**lab.describe(step), "calls": calls}, **model_facts(lab),
            parity=parity.get(arm), coverage=(runner.coverage() - before[arm]).as_dict(),
        )
        for arm, runner in runners.items()
    ]  # fmt: skip
