"""Runs a function under torch.profiler, every step in an annotation of its own.

A profiled run is never a timed one: recording each host call makes the host slower. Take kernel-busy time,
launches and gaps on the device from it; take wall time from an unprofiled run.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from cglab.errors import InputError, ResultsError
from cglab.graphs.clocks import clock_for
from cglab.measure.trace import Trace
from cglab.measure.trace_file import load_trace

STEP = "cglab.step"
"""Name of the annotation around each profiled step."""

QUIET = "6"
"""Kineto's level above all of its own: by default it tells standard error when it starts and stops."""


def prepare() -> None:
    """Gives the profiler its first use, empty, on this thread, so that any other may profile.

    It wants that on the thread that loaded torch, and complains on standard error otherwise.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    with torch.autograd.profiler.profile(use_kineto=True):
        pass


def profile(
    function: Callable[[], object],
    *,
    steps: int = 5,
    device: torch.device | str = "cpu",
    warmup: int = 2,
    save: str | Path | None = None,
) -> Trace:
    """Profiles ``steps`` calls of ``function`` and returns their trace, one window a step.

    Each step ends when its device work has ended, so that steps do not overlap. One more call runs under the
    profiler before the first window, since the profiler's own start falls on it. On a CPU there are no device
    records: the trace says so and has host operations only.

    Args:
        function: one step; what it returns is dropped.
        steps: windows.
        device: what the work runs on.
        warmup: calls before the profiler starts.
        save: keep the Chrome trace here, gzipped if the name ends with ``.gz``; Perfetto opens it.

    Raises:
        InputError: if ``steps`` is below 1.
        DeviceError: if the device is not there.
        ResultsError: if the trace cannot be written; an earlier file of that name is then untouched.
    """
    if steps < 1:
        raise InputError(f"steps={steps}: profile at least one step")
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    clock = clock_for(device)
    on_gpu = clock.device.type == "cuda"
    for _ in range(warmup):
        function()
    clock.synchronize()
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu, acc_events=True
    ) as profiler:
        function()
        clock.synchronize()
        for _ in range(steps):
            with record_function(STEP):
                function()
                clock.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(raw))
        if save is not None:
            _keep(raw.read_bytes(), Path(save))
        return load_trace(raw, device=clock.device.index if on_gpu else None).window(STEP)


def _keep(content: bytes, path: Path) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        slim = _slim(content)
        part.write_bytes(gzip.compress(slim, mtime=0) if path.suffix == ".gz" else slim)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ResultsError(
            f"cannot keep the trace at {path}: {error}; free space or name another path"
        ) from error


def _slim(content: bytes) -> bytes:
    """A Chrome trace without spaces, and without the numbers by which the profiler counts its host operations."""
    trace = json.loads(content)
    for event in trace["traceEvents"]:
        if event.get("cat") == "cpu_op":
            event.pop("args", None)
    return json.dumps(trace, separators=(",", ":")).encode()
