"""One step of a technique, held still: made, run by any runner, compared and timed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cglab.engine.engine import Engine
from cglab.engine.workload import DecodeStep, PrefillStep, Step, steady_decode, steady_prefill
from cglab.errors import ToggleError
from cglab.graphs.clocks import clock_for, sample_seconds
from cglab.measure.parity import Parity, compare_logits, compare_tokens, worst
from cglab.runners.base import Runner


def fixed_step(
    engine: Engine, name: str, sizes: dict[str, int | None], defaults: dict[str, int]
) -> AbstractContextManager[Step]:
    """The step of a technique at a size.

    Args:
        engine: holds its requests.
        name: the toggle.
        sizes: ``batch`` and ``context`` of decode; ``tokens``, ``cached`` and ``requests`` of prefill; None for
            the default.
        defaults: of sizes that are not given.

    Raises:
        ToggleError: for a size that the technique does not have.
    """
    known = ("batch", "context") if name == "decode" else ("tokens", "cached", "requests")
    given = {key: value for key, value in sizes.items() if value is not None}
    if wrong := sorted(given.keys() - set(known)):
        raise ToggleError(f"{name} has no size {wrong[0]!r}; good names: {', '.join(known)}")
    chosen = {key: given.get(key, defaults[key]) for key in known}
    return (steady_decode if name == "decode" else steady_prefill)(engine, **chosen)


def describe(step: Step, runner: Runner[Any]) -> dict[str, Any]:
    """The workload of a step as it is recorded, with the bucket that serves it (None: it runs eager)."""
    bucket = next((size for size in runner.captured.buckets if size >= step.rows), None)
    return {**step.workload, "bucket": bucket}


def run_step(runner: Runner[Any], step: DecodeStep | PrefillStep) -> tuple[Tensor, ...]:
    """Runs it; what comes out, as a tuple."""
    output = runner.run(step.live, **step.inputs)
    return output if isinstance(output, tuple) else (output,)


def timed(runner: Runner[Any], step: Step, device: torch.device) -> Callable[[], float]:
    """Seconds of one run by the wall clock, the device waited for."""
    clock, run = clock_for(device, "wall"), partial(runner.run, step.live, **step.inputs)
    return lambda: sample_seconds(run, clock, repeats=1, warmup=0)[0]


def step_parity(runner: Runner[Any], step: Step) -> Parity:
    """One captured step against the same step run eager at the padded size (oracle 1), every output."""
    before, size = runner.coverage().captured, runner.captured.pad(step.rows)
    got = [tensor.clone() for tensor in run_step(runner, step)]
    if isinstance(size, int) and runner.coverage().captured > before:
        want = runner.run_padded_eager(step.live, size, **step.inputs)
    else:  # it ran eager, at its live size
        want = runner.run_live_eager(step.live, **step.inputs)
    wanted = want if isinstance(want, tuple) else (want,)
    return worst(
        compare_logits(one, other)
        if one.is_floating_point()
        else compare_tokens(one.unsqueeze(-1).tolist(), other.unsqueeze(-1).tolist())
        for one, other in zip(got, wanted, strict=True)
    )
