"""Results made by hand: comparisons with known times, traces of a GPU and of a CPU, recorded runs."""

from collections import Counter
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import pytest

from cglab.engine.acceptance import AcceptLengths
from cglab.engine.generation import Generation, Timings
from cglab.engine.load import Load, LoadResult
from cglab.engine.segments import Segment
from cglab.engine.timing import RequestTiming
from cglab.graphs.coverage import Coverage, Miss, Reason
from cglab.graphs.graph_nodes import GraphNode
from cglab.graphs.keys import ShapeKey
from cglab.graphs.ledger import CaptureCost
from cglab.graphs.recorded_graph import RecordedGraph
from cglab.lab.accepted import Accepted
from cglab.lab.bucket_costs import measured_costs
from cglab.lab.comparison import Comparison, Profile
from cglab.lab.load_run import LoadRun
from cglab.lab.load_sweep import LoadPoint, LoadSweep
from cglab.lab.parts import Part, StepParts
from cglab.lab.planning import plan
from cglab.lab.size_trace import SizeTrace
from cglab.lab.step_times import Group, Spent
from cglab.lab.workload_coverage import workload_coverage
from cglab.measure.ab import interleave
from cglab.measure.latency import latency
from cglab.measure.machine import Device
from cglab.measure.occupancy import Scrapes
from cglab.measure.parity import Parity, Verdict
from cglab.measure.record import Record
from cglab.measure.trace import DeviceEvent, HostCall, Span, Trace

MILLISECONDS = {"eager": (10.0, 11.0), "full": (4.0, 4.4), "breakable": (6.0, 6.6)}


def ledger(largest_pool_bytes):
    """Rows of the bucket ledger in the order of capture."""
    return [
        {
            "bucket": str(size), "warmup_ms": 2.0 * size, "capture_ms": 10.0 * size, "nodes": 20, "breaks": 0,
            "warmups": 1, "pool_bytes": largest_pool_bytes if size == 4 else 0, "device_bytes": 500_000,
        }
        for size in (4, 2, 1)
    ]  # fmt: skip


def drafted():
    """Two speculative runs whose passes are known."""
    runs = {}
    for name, passes in (("topk 1", {1: 3, 4: 1}), ("topk 3", {1: 1, 2: 1, 4: 2})):
        told = AcceptLengths(passes=Counter(passes), correct=3, proposed=12)
        runs[name] = Generation(
            [""], [[1]], ["length"], Timings(1.0, [0.01], [1], [0.5], [1.0]), Coverage(), accepted=told
        )
    return Accepted(runs)


def compared(batch=3, arms=("eager", "full", "breakable"), recorder="cuda", captured=True):
    """A comparison whose samples alternate between two known values."""
    clocks = {arm: cycle(MILLISECONDS[arm]) for arm in arms}
    times = interleave({arm: lambda c=clock: next(c) / 1e3 for arm, clock in clocks.items()}, repeats=4)
    coverage = {}
    for arm in arms:
        coverage[arm] = Coverage()
        for _ in range(20):
            if arm == "eager":
                coverage[arm].miss(Miss(Reason.BACKEND_EAGER), batch)
            elif captured:
                coverage[arm].hit("4", 4, batch)
            else:
                coverage[arm].miss(Miss(Reason.ABOVE_LARGEST, f"size {batch}, largest bucket 4"), batch)
    workload = {"batch": batch, "context": 128, "bucket": 4 if captured else None, "cache": 256}
    parity = {arm: Parity(Verdict.BITWISE, 96) for arm in arms if arm != "eager"}
    memory = {arm: [] if arm == "eager" else ledger(8_000_000) for arm in arms}
    return Comparison("decode", "pico-gqa", workload, recorder, times, parity, coverage, memory)


def eager_trace(kernels=6):
    """Kernels of 4 us, launched one by one every 10 us on thread 4711; two steps."""
    calls, events = [], []
    for step in range(2):
        for index in range(kernels):
            at, key = step * 1e5 + 10.0 * index, step * kernels + index + 1
            calls.append(HostCall("cudaLaunchKernel", at, at + 5, "4711", key))
            events.append(DeviceEvent(f"void gemm<{index}>(x)", at + 8, at + 12, "kernel", 7, key, at))
    windows = tuple((step * 1e5, step * 1e5 + 10.0 * kernels + 5) for step in range(2))
    return Trace(tuple(events), tuple(calls), windows=windows)


def full_trace(kernels=6):
    """The same kernels back to back from one graph launch; two steps."""
    calls, events = [], []
    for step in range(2):
        at = step * 1e5
        calls.append(HostCall("cudaGraphLaunch", at, at + 6, "4711", step + 1))
        for index in range(kernels):
            start = at + 8 + 4.5 * index
            events.append(DeviceEvent(f"void gemm<{index}>(x)", start, start + 4, "kernel", 7, step + 1, at))
    windows = tuple((step * 1e5, step * 1e5 + 8 + 4.5 * kernels) for step in range(2))
    return Trace(tuple(events), tuple(calls), windows=windows)


def cpu_trace():
    """Host operations only, as a profiler without a device gives them."""
    spans = tuple(Span(f"aten::add{i}", 20.0 * i, 20.0 * i + 12, "99") for i in range(5))
    return Trace((), (), operations=spans, windows=((0.0, 100.0),))


def profiled(**traces):
    workload = {"batch": 3, "context": 128, "bucket": 4, "cache": 256}
    return Profile("decode", "pico-gqa", workload, traces)


def record(arm, batch, step_ms, *, model="qwen3-8b", run="run-1", created="2026-11-30T10:00:00", kind="cuda"):
    """One decode record with what its views read."""
    parity = None if arm == "eager" else Parity(Verdict.BITWISE, 96).as_dict()
    return Record(
        bench="decode", arm=arm, device=Device("NVIDIA H200" if kind == "cuda" else "a processor", kind),
        id=f"{run}-{model}-{arm}-{batch}", run=run, created=created, model=model, weights="random", tree="old",
        dtype="bfloat16", workload={"batch": batch, "context": 512, "bucket": batch}, parity=parity,
        metrics={"step_ms": step_ms, "ratio_to_eager": None if arm == "eager" else step_ms / 38.0,
                 "floor_ms": 3.6, "launches": 1.0 if arm == "full" else 900.0},
    )  # fmt: skip


def loaded(arm="breakable", ttft=0.02):
    """One run of two requests of two tokens each: a prefill of 20 ms, a pause, a decode step of 10 ms."""
    timings = tuple(
        RequestTiming(index, 100, 0, "length", "", 0, 5.0, 5.0, 5.08, (5.0 + ttft, 5.08))
        for index in range(2)
    )
    result = LoadResult(Load(2, 2, 100, 2), "same", timings, ((7, 8), (9, 7)), 0.1, 2)
    segments = (Segment("prefill", 5.0, 0.02), Segment("decode", 5.07, 0.01))
    coverage = {"prefill": Coverage(), "decode": Coverage()}
    coverage["prefill"].hit("224", 224, 200)
    return LoadRun(
        "qwen3-8b", {"prefill": arm, "decode": "full"}, "cuda", result, latency(result), coverage, (), segments,
        30.0, {"prefill": 20.0, "decode": 10.0}, Scrapes(0.5, ()), 0,
    )  # fmt: skip


def load_swept():
    """Breakable twice as fast as eager, at one load."""
    runs = {"eager": (loaded("eager", 0.04),) * 3, "breakable": (loaded(),) * 3}
    return LoadSweep("prefill", "qwen3-8b", (LoadPoint(Load(2, 2, 100, 2), runs),))


def measured(bench, arm, workload, metrics, *, day=1, model="qwen3-8b"):
    """One record of a bench on a GPU, as its view reads it."""
    return Record(
        bench=bench, arm=arm, device=Device("NVIDIA H200", "cuda"), id=f"{arm}-{workload}", run=f"{bench}-run",
        created=f"2026-12-{day:02}T10:00:00", model=model, weights="random", tree="old", dtype="bfloat16",
        workload=workload, metrics=metrics, parity=None if arm == "eager" else Parity(Verdict.BITWISE, 96).as_dict(),
    )  # fmt: skip


def prefill_records():
    """Two sizes and three arms, one of which failed at one; then what all buckets cost."""
    sizes = [{"tokens": 512, "cached": 0, "bucket": 512}, {"tokens": 1024, "cached": 8192, "bucket": 1024}]
    times = {"eager": 20.0, "breakable": 12.0, "full": 10.0}
    records = [
        measured("prefill", arm, size, {"step_ms": None if (arm, size["tokens"]) == ("full", 1024) else ms})
        for size in sizes
        for arm, ms in times.items()
    ]
    return [*records, measured("prefill", "breakable", {"captured": "all buckets"}, {"buckets": 58.0})]


def ttft_records():
    """Two prompt sizes at two concurrencies, eager and breakable, with intervals."""
    return [
        measured(
            "ttft", arm, {"tokens": tokens, "cached": cached, "concurrency": many},
            {"ttft_ms": ms * many, "ttft_low_ms": ms * many - 1, "ttft_high_ms": ms * many + 2},
        )
        for tokens, cached in ((1024, 8192), (128, 0))
        for many in (4, 1)
        for arm, ms in (("eager", 25.0), ("breakable", 12.0))
    ]  # fmt: skip


def mtp_records():
    """A load in the three forms of the seed step, with intervals, and one that failed."""
    return [
        measured(
            "mtp", arm, {"dataset": "chat", "concurrency": 16, "batch": 16},
            {} if ms is None else {"tpot_ms": ms, "tpot_low_ms": ms - 0.5, "tpot_high_ms": ms + 0.25},
        )
        for arm, ms in (("eager", 9.0), ("graph", 8.0), ("fused", None))
    ]  # fmt: skip


def dflash_records():
    """Forward occupancy of the three samplers at two concurrencies."""
    return [
        measured("dflash", arm, {"concurrency": many}, {"occupancy_percent": percent})
        for many in (1, 16)
        for arm, percent in (("eager-untimed", 90.0), ("eager-timed", 93.5), ("graph", 96.0))
    ]


def planner_records():
    """Both phases of one load, the plan first."""
    times = {"prefill": (90.0, 100.0), "decode": (40.0, 50.0)}
    return [
        measured("planner", arm, {"load": "chat", "phase": phase, "trace": {}}, {"time_ms": ms, "waste": 0.1})
        for phase, both in times.items()
        for arm, ms in zip(("plan", "sglang"), both, strict=True)
    ]


def crossover_records():
    """Ratios of two captured arms at two sizes; only one of them finds a limit."""
    ratios = {"breakable": (0.5, 1.01, 128.0), "full": (1.2, 1.3, None)}
    return [
        measured("ttft_crossover", arm, {"sizes": [128, 8192]}, {
            "ratio_at_128": small, "ratio_at_8192": large, "verdict_at_128": "faster", "verdict_at_8192": "no difference",
            "limit": limit,
        })
        for arm, (small, large, limit) in ratios.items()
    ]  # fmt: skip


def pipeline_records():
    """Two arms at two caps and two concurrencies, of which the second is faster."""
    return [
        measured(
            "pipeline", arm, {"cap": cap, "concurrency": many, "stages": 2}, {"tok_s": cap * many * faster}
        )
        for cap in (2048, 8192)
        for many in (4, 16)
        for arm, faster in (("eager", 1.0), ("breakable", 2.0))
    ]


def growth_records():
    """Two arms over three batches and, with a cache of their own, over three contexts of two batches; then the fit."""
    series = [((1, 4, 2), (512,), 512), ((1,), (65536, 512, 8192), 65536), ((16,), (512, 8192, 2048), 8192)]
    records = [
        measured(
            "growth", arm, {"batch": batch, "context": context, "cache": cache},
            {"step_ms": 20.0 if arm == "eager" else 4.0 + batch * context / 8192, "floor_ms": 3.5}
            | ({"host_us": 100.0 + batch} if arm == "full" else {}),
        )
        for batches, contexts, cache in series
        for batch in batches
        for context in contexts
        for arm in ("eager", "full")
    ]  # fmt: skip
    return [*records, measured("growth", "full", {"fitted": "batch and context"}, {"base_ms": 4.0})]


def token_records():
    """Two batches, with the floor and one peer that could not run."""
    return [
        measured("token", arm, {"batch": batch, "context": 512}, {"floor_ms": 3.6, **metrics})
        for batch in (1, 16)
        for arm, metrics in (
            ("full", {"token_ms": 4.9, "replay_ms": 4.7}),
            ("sglang-0.5.16", {"token_ms": 6.3, "replay_ms": 6.0, "ratio_to_ours": 1.29}),
            ("torch-compile", {"error": "NotInstalledError: no compiler"}),
            ("floor", {"token_ms": 3.6}),
        )
    ]


def scheduler_records():
    """Two sizes of each axis, and the fit."""
    parts = {"plan_us": 1.0, "inputs_us": 3.0, "commit_us": 2.0, "step_us": 6.0}
    return [
        *(
            measured("scheduler", arm, {"running": running, "waiting": waiting}, parts, model=None)
            for arm, running, waiting in (
                ("running", 8, 0),
                ("running", 1, 0),
                ("waiting", 64, 0),
                ("waiting", 64, 8),
            )
        ),
        measured("scheduler", "fit", {"context": 100}, {"fixed_us": 14.0, "each_us": 7.0}, model=None),
    ]


def capture_records():
    """Both phases, two buckets each, first with kernels that were new; and the line through costs of several numbers."""
    parts = {"warmup": "ms", "begin": "ms", "record": "ms", "end": "ms", "instantiate": "ms"}
    parts |= {"pool": "bytes", "device": "bytes", "output": "bytes"}
    ledger = {
        f"bucket_{part}_{unit}": [2e3, 1e3] if unit == "ms" else [1e9, 0.0] for part, unit in parts.items()
    }
    return [
        *(
            replace(
                measured("capture", arm, {"phase": phase, "kernels": kernels}, {"total_s": 1.0}),
                samples=ledger,
            )
            for phase, arm in (("decode", "full"), ("prefill", "breakable"))
            for kernels in ("first use", "used before")
        ),
        measured("capture", "full", {"phase": "decode", "growth": [1, 2]}, {"seconds_per_bucket": 1.0}),
    ]


def planned():
    """A plan for three live sizes, costs measured at powers of two."""
    lines = [
        CaptureCost(ShapeKey(size), 0.01, 0.04, 9_000_000 * (size == 16), 500_000, 20, 0, 1)
        for size in (16, 8, 4, 2, 1)
    ]
    costs = measured_costs(lines, {1: 5.0, 16: 6.5}, {1: 30.0, 16: 30.0})
    return plan(SizeTrace("evening", {"decode": {3: 2, 5: 1, 16: 1}}), "decode", costs)


def parts():
    """Three segments with two breaks between them, beside one recording of it all."""
    breakable = [Part("segment", "", 18, 40.0), Part("break", "_prefill", None, 10.0), Part("segment", "", 29, 60.0),
                 Part("break", "_prefill", None, 12.0), Part("segment", "", None, 38.0)]  # fmt: skip
    workload = {"tokens": 100, "cached": 0, "requests": 4, "bucket": 112, "cache": 256}
    arms = {"breakable": tuple(breakable), "full": (Part("segment", "", 265, 150.0),)}
    return StepParts("prefill", "pico-gqa", workload, "cuda", arms)


def recorded_graph():
    """A copy after a kernel of a long name, a break, and a kernel."""
    nodes = (
        GraphNode(
            0, "kernel", "scaled<float, 4>(float*)" + "x" * 100, grid=(7, 1, 1), block=(128, 1, 1), segment=0
        ),
        GraphNode(1, "copy", "memcpy", (0,), bytes=64, segment=0),
        GraphNode(2, "break", "sample", (1,)),
        GraphNode(3, "kernel", "argmax", (2,), grid=(1, 1, 1), block=(32, 1, 1), segment=1),
    )
    return RecordedGraph(
        "decode breakable, bucket 4", ("graph of 2 nodes", "break sample", "graph of 1 nodes"), nodes
    )


def workload_covered(recorder="cuda"):
    """A captured decode, an eager one that is timed, and a part of a step whose time is not apart."""
    groups = {
        Group("decode", "full", "4", 4, 4): Spent(9, 8, 0.08),
        Group("decode", "eager", "BACKEND_EAGER", 0, 3): Spent(3, 2, 0.05),
        Group("prefill", "full", "ABOVE_LARGEST", 0, 900): Spent(2, 1, 0.2),
    }
    part = Coverage()
    part.miss(Miss(Reason.BELOW_FLOOR, "bucket 8"), 8)
    facts = {"prefill/ABOVE_LARGEST": "900 <tokens>, largest bucket 512"}
    return workload_coverage("qwen3-8b", recorder, groups, {"dsa_attention": part}, facts)


@pytest.fixture
def make():
    """The builders above, by name."""
    return SimpleNamespace(
        compared=compared, drafted=drafted, profiled=profiled, eager_trace=eager_trace, full_trace=full_trace,
        cpu_trace=cpu_trace, record=record, planned=planned, parts=parts, loaded=loaded, load_swept=load_swept,
        planner_records=planner_records, mtp_records=mtp_records, dflash_records=dflash_records,
        growth_records=growth_records, capture_records=capture_records,
        prefill_records=prefill_records, ttft_records=ttft_records, crossover_records=crossover_records,
        pipeline_records=pipeline_records, token_records=token_records, scheduler_records=scheduler_records,
        recorded_graph=recorded_graph, workload_covered=workload_covered,
    )  # fmt: skip


@pytest.fixture
def records():
    """Two models, two batch sizes, three arms."""
    return [
        record(arm, batch, ms, model=model)
        for model in ("qwen3-0.6b", "qwen3-8b")
        for batch in (1, 16)
        for arm, ms in (("eager", 38.0), ("full", 6.2), ("breakable", 9.1))
    ]
