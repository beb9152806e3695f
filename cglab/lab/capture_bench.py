"""The capture bench: what warm-up and capture of a phase's buckets take, where it goes, and how it grows with them.

Seconds are the host's, the device waited for. Bytes are those of the pool, of device memory outside the allocator,
and of the output buffers. What is captured stays until a model is done: an executable that is given back leaves
memory in the driver, and the next one would seem to take none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from statistics import linear_regression, median
from typing import Any

import torch

from cglab.errors import InputError, no_such
from cglab.graphs.buckets import bucket_list, sglang_prefill
from cglab.graphs.ledger import CaptureCost, explain_growth
from cglab.lab.apart import runner_apart
from cglab.lab.facade import Lab
from cglab.lab.opening import open_lab
from cglab.lab.shared_bench import shared
from cglab.lab.step_metrics import Progress, ledger_metrics, model_facts, silent
from cglab.measure.kernel_cache import KernelCacheWatch
from cglab.measure.record import Record, make_record, new_run
from cglab.runners.base import Runner

SIZES = {"max_batch": 64, "max_context": 1024, "token_budget": 8192}
QUICK_SIZES = {"max_batch": 4, "max_context": 64, "token_budget": 32}
COUNTS = (1, 2, 4, 8, 12)
"""Numbers of decode buckets, the largest ones each time."""
REPEATS = 3
PARTS = ("decode", "prefill", "shared", "growth")
COLUMNS = (
    "warmup_ms", "begin_ms", "record_ms", "end_ms", "instantiate_ms", "warmups", "breaks",
    "pool_bytes", "device_bytes", "loaded_bytes", "output_bytes",
)  # fmt: skip


def capture(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    models: Sequence[str] | None = None,
    parts: Sequence[str] = PARTS,
) -> Iterator[Record]:
    """All buckets of decode and of prefill, captured in one go each.

    Args:
        device: what is measured.
        quick: a small run that shows the machinery.
        progress: called with a line for every stage.
        models: names; by default the two Qwen3 shapes on a GPU and the shipped model on a CPU.
        parts: ``decode`` (12 buckets on a GPU, every mode), ``prefill`` (58 buckets), ``shared`` (one executable for
            buckets of equal topology), ``growth`` (cost against the number of decode buckets).

    Yields:
        A record for each phase, mode and state of the kernels (``first use`` or ``used before``); then one each of
        ``shared`` and of ``growth``. ``compile_s`` is what opening the lab took of the compilers and is part of no
        other figure; ``kernel_cache``, ``cache_hits`` and ``cache_misses`` count from then on.

    Raises:
        InputError: for an unknown part.
    """
    if unknown := sorted(set(parts) - set(PARTS)):
        raise InputError(no_such("part of this bench", unknown[0], PARTS))
    large, run = device.type == "cuda" and not quick, new_run()
    sizes = SIZES if large else QUICK_SIZES
    listed = bucket_list(sizes["token_budget"], sglang_prefill)  # above the lab's own limit too
    for name in models or (("qwen3-8b", "qwen3-0.6b") if large else ("pico-gqa",)):
        progress(f"{name}: open")
        with ExitStack() as kept:
            with KernelCacheWatch() as compiled:  # a lab compiles when it is opened
                opened = open_lab(name, device=device, prefill_buckets=listed, **sizes)  # type: ignore[arg-type]
            lab = kept.enter_context(opened)
            first: list[CaptureCost] = []
            for phase, mode in (("decode", "full"), ("prefill", "breakable"), ("decode", "breakable")):
                for kernels in ("first use", "used before") if phase in parts else ():
                    progress(f"{name}: {phase} {mode}, kernels {kernels}")
                    runner = kept.enter_context(runner_apart(lab, phase, mode))
                    yield _captured(lab, runner, run, kernels, compiled)
                    first = first or runner.captured.ledger
            if "shared" in parts:
                progress(f"{name}: shared executables")
                yield shared(lab, run)
            if "growth" in parts:
                progress(f"{name}: cost by number of buckets")
                yield _growth(lab, run, first if "decode" in parts else [])


def _captured(lab: Lab, runner: Runner[Any], run: str, kernels: str, compiled: KernelCacheWatch) -> Record:
    before = lab.compile_seconds
    with compiled:
        seconds = _capture_seconds(runner)
    ledger = runner.captured.ledger
    rows = [line.as_row() for line in ledger]
    metrics = ledger_metrics(ledger)
    return make_record(
        bench="capture", arm=runner.backend, device=lab.device, run=run,
        metrics={
            **metrics, **total_metrics(ledger), "total_s": seconds,
            "rest_s": seconds - metrics["warmup_s"] - metrics["capture_s"],
            "compile_s": lab.compile_seconds, "compile_in_capture_s": lab.compile_seconds - before,
            "kernel_cache": compiled.state, "cache_hits": float(compiled.hits), "cache_misses": float(compiled.misses),
        },
        samples={
            "bucket": [float(line.key.size) for line in ledger],
            **{f"bucket_{name}": [float(row[name]) for row in rows] for name in COLUMNS},
        },
        workload={"phase": runner.technique, "buckets": len(ledger), "kernels": kernels, **_facts(lab)},
        notes="; ".join(explain_growth(ledger)), **model_facts(lab),
    )  # fmt: skip


def total_metrics(ledger: Sequence[CaptureCost]) -> dict[str, Any]:
    """Where the seconds and bytes of all buckets went, beside ``ledger_metrics``."""
    loaded, outputs = sum(line.loaded_bytes for line in ledger), sum(line.output_bytes for line in ledger)
    device, pool = sum(line.device_bytes for line in ledger), sum(line.pool_bytes for line in ledger)
    return {
        "begin_s": sum(line.seconds.begin for line in ledger),
        "record_s": sum(line.record_seconds for line in ledger),
        "end_s": sum(line.seconds.end for line in ledger),
        "instantiate_s": sum(line.seconds.instantiate for line in ledger),
        "warmups": float(sum(line.warmups for line in ledger)),
        "executables_gb": (device - loaded) / 1e9, "loaded_gb": loaded / 1e9, "outputs_gb": outputs / 1e9,
        "held_gb": (pool + device + outputs) / 1e9,
        "outputs_shared": all(line.output_bytes == 0 for line in ledger[1:]),
    }  # fmt: skip


def _capture_seconds(runner: Runner[Any]) -> float:
    """Seconds of capturing all buckets, with what no bucket's line has: trim rule, garbage, generator state."""
    synchronize = runner.group.recorder.synchronize
    synchronize()
    started = time.perf_counter()
    runner.capture()
    synchronize()
    return time.perf_counter() - started


def _growth(lab: Lab, run: str, first: Sequence[CaptureCost]) -> Record:
    """Seconds of captures of several numbers of buckets; bytes as the first capture of all took them, one by one."""
    counts = [count for count in COUNTS if count <= len(lab.buckets)]
    taken: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(REPEATS):
        for count in counts:
            with runner_apart(lab, "decode", "full", lab.buckets[-count:]) as runner:
                taken[count].append(_capture_seconds(runner))
    seconds = [median(taken[count]) for count in counts]
    metrics = {f"seconds_{name}": value for name, value in line_through(counts, seconds).items()}
    samples = {
        "count": [float(count) for count in counts for _ in taken[count]],
        "seconds": [each for count in counts for each in taken[count]],
    }
    if first:
        held = list(accumulate(line.pool_bytes + line.device_bytes - line.loaded_bytes for line in first))
        samples["bytes_by_count"] = [float(each) for each in held]
        fitted = line_through(range(1, len(held) + 1), [each / 1e9 for each in held])
        metrics |= {f"gb_{name}": value for name, value in fitted.items()}
    return make_record(
        bench="capture", arm="full", device=lab.device, run=run, metrics=metrics, samples=samples,
        workload={"phase": "decode", "growth": counts, **_facts(lab)}, **model_facts(lab),
        notes="A line through cost by number of buckets, the largest ones each time; kernels used before. "
        "Bytes are pool and executables of one capture, bucket by bucket.",
    )  # fmt: skip


def line_through(counts: Sequence[int], costs: Sequence[float]) -> dict[str, float]:
    """The straight line through costs by number of buckets.

    Args:
        counts: of buckets, at least two different ones.
        costs: seconds or gigabytes.

    Returns:
        ``per_bucket`` and ``fixed`` of the line, and ``off``: the largest distance of a cost from it, as a share of
        the largest cost.
    """
    fitted = linear_regression(counts, costs)
    off = (
        abs(cost - fitted.intercept - fitted.slope * count) for count, cost in zip(counts, costs, strict=True)
    )
    most = max(map(abs, costs))
    return {"per_bucket": fitted.slope, "fixed": fitted.intercept, "off": max(off) / most if most else 0.0}


def _facts(lab: Lab) -> dict[str, Any]:
    return {"cache": lab.max_context, "ops": lab.ops}
