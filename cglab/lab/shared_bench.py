"""What one executable for all decode buckets of equal topology would save, and what a change of bucket then costs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from cglab.engine.workload import steady_decode
from cglab.errors import CaptureError
from cglab.graphs.breaks import BreakCall
from cglab.graphs.clocks import clock_for
from cglab.graphs.cuda import CudaRecorder, CudaSegment
from cglab.graphs.recorder import Segment
from cglab.lab.apart import runner_apart
from cglab.lab.facade import Lab
from cglab.lab.shared_executables import CudaGraphDriver, GraphDriver, SharedExecutables
from cglab.lab.step_metrics import model_facts
from cglab.lab.steps import compare_outputs, run_step
from cglab.measure.parity import Parity, worst
from cglab.measure.record import Record, make_record
from cglab.runners.base import Runner

CONTEXT = 32
ROUNDS = 5
"""Times that each bucket of a group is switched to."""


def shared(lab: Lab, run: str, driver: GraphDriver | str | None = None) -> Record:
    """The lab's decode buckets, recorded once more without executables: on shared ones, then on one each.

    Args:
        lab: whose buckets; what it captured itself is not touched.
        run: of the record.
        driver: makes the executables; a text says why there is none; None asks what this machine has.

    Returns:
        A record of arm ``shared``. Bytes are growth of device memory outside the allocator. ``switch_us`` is what
        launching another bucket of a group takes beyond launching the same one again, the device waited for.
    """
    chosen = driver_for(lab.device) if driver is None else driver
    facts: dict[str, Any] = {
        "bench": "capture", "arm": "shared", "device": lab.device, "run": run, **model_facts(lab),
        "workload": {"phase": "decode", "buckets": len(lab.buckets), "cache": lab.max_context,
                     "ops": lab.ops},
    }  # fmt: skip
    if isinstance(chosen, str):
        return make_record(metrics={}, notes=f"not run: {chosen}", **facts)
    recorder = CudaRecorder(lab.device, instantiate=False) if lab.device.type == "cuda" else None
    with runner_apart(lab, "decode", "full", recorder=recorder) as runner:
        runner.capture()
        captured, footprint = runner.captured, runner.group.recorder.footprint
        graphs = {size: address(captured.recordings.steps_of(size)) for size in captured.captured_sizes[::-1]}
        before = footprint()
        with SharedExecutables(graphs, chosen) as executables:
            groups = {size: place for place, group in enumerate(executables.groups) for size in group.buckets}
            firsts = [group.buckets[0] for group in executables.groups]
            taken = footprint() - before
            others = [chosen.instantiate(graph) for size, graph in graphs.items() if size not in firsts]
            saved = footprint() - before - taken
            runner.group.recorder.synchronize()
            for each in others:
                chosen.destroy(each)
            times = _switch_times(lab, runner, executables)
            parity = worst([_parity(lab, runner, executables, size) for size in graphs])
            told = str(executables)
            runner.group.recorder.synchronize()
        return make_record(
            metrics={
                "buckets": float(len(graphs)), "executables": float(len(firsts)), "shared_gb": taken / 1e9,
                "separate_gb": (taken + saved) / 1e9, "saved_gb": saved / 1e9,
                **{name: median(values) for name, values in times.items() if values},
            },
            samples={
                "bucket": [float(size) for size in graphs],
                "bucket_group": [float(groups[size]) for size in graphs],
                "bucket_nodes": [float(line.nodes or 0) for line in captured.ledger], **times,
            },
            parity=parity.as_dict(), notes=told, **facts,
        )  # fmt: skip


def driver_for(device: torch.device) -> GraphDriver | str:
    """The driver of a device, or why there is none."""
    if device.type != "cuda":
        return "the tape has no executables that could be shared; it takes a CUDA device"
    try:
        return CudaGraphDriver()
    except ImportError as error:
        return f"the driver's Python bindings are missing ({error}); install cuda-bindings"


def address(steps: Sequence[Segment | BreakCall]) -> int:
    """Of the one graph of a full recording.

    Raises:
        CaptureError: for a recording of several segments, or of another recorder.
    """
    (segment, *more) = steps
    if more or not isinstance(segment, CudaSegment):
        raise CaptureError(
            f"{len(steps)} steps are no single graph", advice="record it full, on a CUDA device"
        )
    return segment.address


def _switch_times(lab: Lab, runner: Runner[Any], executables: SharedExecutables) -> dict[str, list[float]]:
    """Microseconds of one request's step at every bucket of a group: after a switch, and once more without one."""
    clock, times = clock_for(lab.device, "wall"), defaultdict[str, list[float]](list)
    with steady_decode(lab.engine, 1, CONTEXT) as step, runner.during(step.live):
        runner.captured.load(step.inputs, 1, runner.captured.buckets[-1])  # padding beyond it in every bucket
        for size in [size for group in executables.groups for size in group.buckets * ROUNDS]:
            clock.synchronize()
            started = time.perf_counter()
            switched = executables.switch(size)
            updated = time.perf_counter()
            executables.launch(size)
            clock.synchronize()
            ended = time.perf_counter()
            executables.launch(size)
            clock.synchronize()
            plain = time.perf_counter() - ended
            if switched:
                times["update_us"].append((updated - started) * 1e6)
                times["switched_us"].append((ended - started) * 1e6)
                times["plain_us"].append(plain * 1e6)
                times["switch_us"].append((ended - started - plain) * 1e6)
    return dict(times)


def _parity(lab: Lab, runner: Runner[Any], executables: SharedExecutables, size: int) -> Parity:
    """A bucket on its shared executable, which held another bucket before, against its own executable."""
    captured = runner.captured
    with steady_decode(lab.engine, size, CONTEXT) as step:
        views = run_step(runner, step)
        wanted = [view.clone() for view in views]
        others = executables.group_of(size).buckets
        other = others[others.index(size) - 1]
        with runner.during(step.live):
            for bucket in (other, size):
                live = min(bucket, size)
                captured.load({name: value[:live] for name, value in step.inputs.items()}, live, bucket)
                for view in views:
                    view.fill_(-1)
                executables.launch(bucket)
        return compare_outputs(views, wanted)
