"""The replay bench: what a replay costs the host beyond the bare graph's ``replay()``, verb by verb.

Every verb is called alone, over and over, the device idle before each call; what it takes is the time until it
returns. A step calls each once, so what they do not explain is the path between them. A step hides all of this as
long as the device is behind the host; it is the start of every step after a host read, and the floor of small ones.

A step like an earlier one looks its decision up; what the first of its kind takes to decide is told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch

from cglab.engine.workload import Step
from cglab.graphs.coverage import Miss
from cglab.graphs.fits import Fit, Fits, kinds_of
from cglab.lab.facade import Lab
from cglab.lab.opening import open_lab
from cglab.lab.step_metrics import Progress, bare, host_us, model_facts, silent
from cglab.lab.steps import fixed_step
from cglab.measure.profiling import profile
from cglab.measure.record import Record, make_record, new_run
from cglab.runners.base import Runner

ARMS = ("full", "breakable")
SIZES = {"max_batch": 64, "max_context": 1024}
QUICK_SIZES = {"max_batch": 4, "max_context": 64, "token_budget": 32}
POINTS = (
    ("decode", {"batch": 1, "context": 512}), ("decode", {"batch": 16, "context": 512}),
    ("decode", {"batch": 13, "context": 512}), ("prefill", {"tokens": 512}), ("prefill", {"tokens": 500}),
)  # fmt: skip
"""Steps that fill their bucket, and steps that are padded up to it."""
QUICK_POINTS = (
    ("decode", {"batch": 2, "context": 32}), ("decode", {"batch": 3, "context": 32}), ("prefill", {"tokens": 13}),
)  # fmt: skip
ROUNDS, REPEATS, QUICK_REPEATS = 3, 30, 5


def replay(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    models: Sequence[str] | None = None,
) -> Iterator[Record]:
    """The host's part of captured steps, exact and padded, of decode and of prefill.

    Args:
        device: what is measured.
        quick: a small run that shows the machinery.
        progress: called with a line for every stage.
        models: names; by default the two Qwen3 shapes on a GPU and the shipped model on a CPU.

    Yields:
        A record for each step and arm; see ``verb_metrics`` for what it holds.
    """
    large, run = device.type == "cuda" and not quick, new_run()
    sizes, points = (SIZES, POINTS) if large else (QUICK_SIZES, QUICK_POINTS)
    for name in models or (("qwen3-8b", "qwen3-0.6b") if large else ("pico-gqa",)):
        progress(f"{name}: open")
        with open_lab(name, device=device, **sizes) as lab:  # type: ignore[arg-type]
            for phase, given in points:
                for arm in ARMS:
                    progress(f"{name}: {phase} {arm}, {', '.join(f'{k} {v}' for k, v in given.items())}")
                    with fixed_step(lab.engine, phase, given, lab.sizes) as step:
                        yield _point(lab, phase, arm, step, run, REPEATS if large else QUICK_REPEATS)


def _point(lab: Lab, phase: str, arm: str, step: Step, run: str, repeats: int) -> Record:
    runner, device = lab.runner(arm, phase), lab.device
    parity, before = lab.step_parity(arm, step, phase), runner.coverage().copy()
    samples = verb_samples(runner, step, device, repeats=repeats)
    metrics = verb_metrics({name: median(values) for name, values in samples.items()})
    if device.type == "cuda":
        metrics["launches_outside"] = _launches(
            lambda: runner.run(step.live, **step.inputs), device
        ) - _launches(bare(runner, step), device)
    described = lab.describe(step, phase)
    return make_record(
        bench="replay", arm=arm, device=device, run=run, metrics=metrics,
        samples={f"{name}_us": values for name, values in samples.items()},
        workload={"phase": phase, **described, "padded": described["bucket"] != step.rows},
        parity=parity.as_dict(), coverage=(runner.coverage() - before).as_dict(), **model_facts(lab),
    )  # fmt: skip


def verb_samples(
    runner: Runner[Any], step: Step, device: torch.device, *, repeats: int = REPEATS
) -> dict[str, list[float]]:
    """Microseconds until each verb returns, one sample a round; verbs in turns, so that drift meets all of them.

    Args:
        runner: has captured the bucket of the step.
        step: is run.
        device: what is measured.
        repeats: calls of a verb in a turn, whose median is the sample.

    Returns:
        By verb, and ``bare`` (the recordings alone) and ``total`` (the step as the engine runs it). All but
        ``total`` are empty where the step runs eager.
    """
    captured, live = runner.captured, step.rows
    whole = {"bare": bare(runner, step), "total": lambda: runner.run(step.live, **step.inputs)}
    with runner.during(step.live):
        values = {**step.inputs, **runner.derived(step.live)}
        key = captured.can_run(values, live)
        if isinstance(key, Miss):
            return {"total": [host_us(whole["total"], device, repeats) for _ in range(ROUNDS)]}
        captured.load(values, live, key.size)
        output = captured.replay(key)
    plan, fits = captured.buffers.plan(values, live, key.size), Fits()
    fits.keep(kinds_of(values), Fit(key, str(key), live, plan, 0))
    verbs: dict[str, Callable[[], Any]] = {
        "derive": lambda: runner.derived(step.live),
        "live_size": lambda: captured.live_size(values),
        "can_run": lambda: captured.can_run(values, live),
        "plan": lambda: captured.buffers.plan(values, live, key.size),
        "decide": lambda: fits.find(kinds_of(values), 0),
        "load": lambda: plan.load(values),
        "check": captured.contract.check,
        "replay": lambda: captured.replay(key),
        "trim": lambda: captured.trim(output, live, key.size),
    }
    samples: dict[str, list[float]] = {name: [] for name in (*verbs, *whole)}
    for _ in range(ROUNDS):
        for name, function in (verbs | whole).items():
            with runner.during(step.live) if name in verbs else nullcontext():
                samples[name].append(host_us(function, device, repeats))
    return samples


def verb_metrics(us: Mapping[str, float]) -> dict[str, Any]:
    """The host's part of a step, split; only ``total_us`` where nothing was replayed.

    Args:
        us: microseconds by verb, as ``verb_samples`` has them.

    Returns:
        ``host_us`` is what the step takes beyond the bare replay: ``derive_us`` (inputs that follow from what is live)
        + ``decide_us`` (the decision looked up) + ``load_us`` + ``check_us`` (addresses) + ``dispatch_us`` (what
        ``replay`` adds to the check and the launch) + ``trim_us`` + ``rest_us``. Beside it ``first_decide_us``, of a
        step unlike any before: ``live_size_us`` + ``can_run_us`` (bucket, whether a recording fits) + ``plan_us``.
    """
    if "bare" not in us:
        return {"total_us": us["total"]}
    split = {
        "derive_us": us["derive"], "decide_us": us["decide"], "load_us": us["load"],
        "check_us": us["check"], "dispatch_us": us["replay"] - us["check"] - us["bare"], "trim_us": us["trim"],
    }  # fmt: skip
    host = us["total"] - us["bare"]
    return {
        **split, "rest_us": host - sum(split.values()), "host_us": host, "bare_us": us["bare"],
        "total_us": us["total"], "first_decide_us": us["live_size"] + us["can_run"] + us["plan"],
        "live_size_us": us["live_size"], "can_run_us": us["can_run"], "plan_us": us["plan"],
    }  # fmt: skip


def _launches(function: Callable[[], Any], device: torch.device) -> float:
    trace = profile(function, steps=3, device=device)
    return trace.launches / trace.steps
