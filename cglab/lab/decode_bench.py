"""The decode bench: arms in turns at several batch sizes, with traces, floor and capture cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cglab.engine.workload import steady_decode
from cglab.lab.decode_point import DecodeMeasuring
from cglab.lab.facade import Lab
from cglab.lab.floor import read_bandwidth
from cglab.lab.opening import open_lab
from cglab.lab.step_metrics import ARMS, CALLS, Progress, silent
from cglab.lab.transformers_arm import MISSING, installed, random_transformers, transformers_arm
from cglab.measure.record import Record, new_run


def decode(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    models: Sequence[str] | None = None,
) -> Iterator[Record]:
    """The decode step: arms in turns at several batch sizes, with traces, floor and capture cost.

    The eager step of ``transformers`` takes its turns too, where it is installed: it says whether ours is an honest
    baseline.

    Args:
        device: what is measured.
        quick: a small run that shows the machinery.
        progress: called with a line for every stage.
        models: names; by default the two Qwen3 shapes on a GPU and the shipped model on a CPU.

    Yields:
        A record for each arm of each step.
    """
    on_gpu = device.type == "cuda"
    names = models or (("qwen3-0.6b", "qwen3-8b") if on_gpu and not quick else ("pico-gqa",))
    large = on_gpu and not quick
    measuring = DecodeMeasuring(
        "decode", new_run(), read_bandwidth(device, 4.0 if on_gpu else 0.2), ARMS,
        calls=CALLS if large else 1, repeats=5 if large else 3,
    )  # fmt: skip
    options: dict[str, Any] = {} if on_gpu else {"max_batch": 4, "max_context": 128}
    for name in names:
        with open_lab(name, device=device, **options) as lab:
            yield from _points(lab, measuring, min(512, lab.max_context) if on_gpu else 64, progress)


def _points(lab: Lab, measuring: DecodeMeasuring, context: int, progress: Progress) -> Iterator[Record]:
    for arm in ARMS:
        progress(f"{lab.name}: capture {arm}")
        lab.runner(arm)
    progress(f"{lab.name}: open it in transformers" if installed() else MISSING)
    theirs = random_transformers(lab.config, device=lab.device, dtype=lab.dtype) if installed() else None
    for batch in [b for b in (1, 16, 64) if b <= lab.buckets[-1]]:
        progress(f"{lab.name}: batch {batch}, context {context}")
        with steady_decode(lab.engine, batch, context) as step:
            if theirs is None:
                yield from measuring.records(lab, step, notes=MISSING)
            else:
                other = transformers_arm(theirs, step, lab.device, calls=measuring.calls)
                yield from measuring.records(lab, step, other, notes=other.note)
