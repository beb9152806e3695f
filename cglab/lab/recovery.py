"""Fault injection: an exception at every recorded operation of a capture, and what the process is like afterwards."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cglab.engine.workload import DecodeStep, steady_decode
from cglab.graphs import faults
from cglab.graphs.coverage import Reason
from cglab.graphs.options import CaptureFailedWarning, Options
from cglab.lab.facade import Lab
from cglab.lab.opening import open_lab
from cglab.runners.decode import DecodeRunner


@dataclass
class Swept:
    """What a sweep showed.

    Attributes:
        operations: recorded operations of one capture.
        tried: indices where a fault was planned.
        failed: one line for each index after which something was wrong.
        growth: bytes allocated at the end beyond the level before the first fault.
    """

    operations: int
    tried: list[int]
    failed: list[str] = field(default_factory=list)
    growth: int = 0


def recovery_sweep(
    device: torch.device, mode: str, *, sample: int | None = None, indices: Sequence[int] | None = None
) -> Swept:
    """Plans a fault at recorded operations of a decode capture; each is followed by an eager step and a capture.

    Args:
        device: where it runs.
        mode: full or breakable.
        sample: number of operations to try, spread evenly, first and last among them; None tries all.
        indices: exactly these, instead.
    """
    with (
        open_lab(
            "pico-gqa",
            device=device,
            dtype=torch.float32,
            max_batch=2,
            max_context=64,
            buckets=[2],
            ops="portable",  # faults are planned at operators, which a compiled region has none of
        ) as lab,
        steady_decode(lab.engine, 2, 20) as step,
        frozen_heap(),
    ):
        wanted = lab.runner("eager").run(step.live, **step.inputs)[1].clone()
        with faults.planned(None) as plan:
            _attempt(lab, mode, step)
        count = plan.seen
        tried = list(indices) if indices is not None else spread(count, sample)
        swept = Swept(count, tried)
        level = _level(lab)
        for index in tried:
            with faults.planned(index):
                output, reason = _attempt(lab, mode, step)
            if reason != Reason.CAPTURE_FAILED.name:
                swept.failed.append(f"operation {index}: the fault did not fail the capture ({reason})")
            if not torch.equal(output, wanted):
                swept.failed.append(f"operation {index}: the eager step after it differs")
            output, reason = _attempt(lab, mode, step)
            if reason is not None or not torch.equal(output, wanted):
                swept.failed.append(f"operation {index}: the capture after it failed or differs ({reason})")
            del output
            if (grown := _level(lab) - level) > 0:
                swept.failed.append(f"operation {index}: {grown} bytes more than before")
        swept.growth = _level(lab) - level
    return swept


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Every capture collects garbage first; what is alive before the sweep need not be looked through each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def spread(count: int, sample: int | None) -> list[int]:
    """Indices below ``count``: so many, evenly spread, first and last among them; all for None."""
    if sample is None or sample >= count:
        return list(range(count))
    return sorted({round(i * (count - 1) / (sample - 1)) for i in range(sample)})


def _attempt(lab: Lab, mode: str, step: DecodeStep) -> tuple[Tensor, str | None]:
    """Captures anew, runs one step; returns its logits and the reason if it ran eager."""
    runner = DecodeRunner(lab.model, lab.engine.kv, lab.group, lab.buckets, Options(backend=mode, warmups=1))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CaptureFailedWarning)
            runner.capture()
        logits = runner.run(step.live, **step.inputs)[1].clone()
        return logits, next(iter(runner.coverage().reasons), None)
    finally:
        runner.close()


def _level(lab: Lab) -> int:
    gc.collect()
    if lab.device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(lab.device)
    return lab.memory()["device"]["allocated"]
