"""The main job: capture the decode step of a real model at every bucket, generate, check, measure.

Everything is taken from one lab in one process, the arms in turns. The times are unprofiled; the trace for
the timeline is a run of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cglab.engine.generation import Generation
from cglab.engine.workload import steady_decode
from cglab.lab import Lab
from cglab.lab.comparison import TAPE_NOTE, Comparison, Profile
from cglab.measure.parity import Parity, worst
from cglab.measure.record import Record, make_record, new_run

ARMS = ("eager", "full", "breakable")
CAPTURED = ARMS[1:]
PROMPTS = 5
CONTEXT = 64
GRAPH_NOTE = "Recorded with CUDA graphs; the arms took turns in one process."

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Checked:
    """One captured step against the same step run eager at the padded size."""

    arm: str
    live: int
    bucket: int
    parity: Parity


@dataclass(frozen=True)
class Tour:
    """What the main job found.

    Attributes:
        model, weights, dtype: what ran.
        recorder: ``cuda`` or ``tape``.
        generations: of the same prompts, by arm.
        checks: every bucket at its fewest and most live requests, both captured arms.
        comparisons: one a bucket, all arms in turns.
        profile: one traced step of each arm.
        memory: the bucket ledger, by captured arm.
        records: one an arm and comparison, to be kept.
    """

    model: str
    weights: str
    dtype: str
    recorder: str
    generations: dict[str, Generation]
    checks: tuple[Checked, ...]
    comparisons: tuple[Comparison, ...]
    profile: Profile
    memory: dict[str, list[dict[str, Any]]]
    records: tuple[Record, ...]

    @property
    def note(self) -> str:
        """How far its times may be trusted."""
        return TAPE_NOTE if self.recorder == "tape" else GRAPH_NOTE

    @property
    def ok(self) -> bool:
        """Whether every captured step did the work of its eager oracle, and was captured at all."""
        replayed = all(self.generations[arm].coverage.captured for arm in CAPTURED)
        return replayed and all(check.parity.ok for check in self.checks)

    def parity(self, arm: str, bucket: int) -> str:
        """Worst verdict of an arm in a bucket; the eager arm is the reference."""
        found = [check.parity for check in self.checks if (check.arm, check.bucket) == (arm, bucket)]
        return str(worst(found).verdict) if found else "reference"

    def rows(self) -> list[dict[str, Any]]:
        """One row a bucket and arm: parity, coverage, times, cost. The summary that is printed."""
        rows = []
        for comparison in self.comparisons:
            bucket = comparison.workload["bucket"]
            for arm in comparison.times.arms:
                ledger = self.memory.get(arm.name, [])
                paid = next((row for row in ledger if row["bucket"] == str(bucket)), None)
                steps = comparison.coverage[arm.name]
                rows.append(
                    {
                        "bucket": bucket,
                        "live": comparison.workload["batch"],
                        "arm": arm.name,
                        "parity": self.parity(arm.name, bucket),
                        "captured": f"{steps.captured}/{steps.steps}",
                        "step ms": _milli(arm.median),
                        "95 %": arm.interval and f"{_milli(arm.interval.low)} to {_milli(arm.interval.high)}",
                        "capture ms": paid and f"{paid['warmup_ms'] + paid['capture_ms']:.3g}",
                        "pool MB": paid and f"{paid['pool_bytes'] / 1e6:.3g}",
                    }
                )
        return rows

    def generation_rows(self) -> list[dict[str, Any]]:
        """One row an arm: steps, coverage with reasons, and how many requests have the tokens of the eager arm."""
        wanted = self.generations["eager"].tokens
        rows = []
        for arm, found in self.generations.items():
            equal = sum(ours == theirs for ours, theirs in zip(found.tokens, wanted, strict=True))
            reasons = ", ".join(f"{name.lower()} {count}" for name, count in found.coverage.reasons.items())
            rows.append(
                {
                    "arm": arm,
                    "requests": len(wanted),
                    "new tokens": sum(map(len, found.tokens)),
                    "steps": found.coverage.steps,
                    "captured": found.coverage.captured,
                    "eager because": reasons or None,
                    "tokens as eager": f"{equal}/{len(wanted)}",
                }
            )
        return rows


def live_sizes(buckets: Sequence[int]) -> list[tuple[int, int]]:
    """Fewest and most live requests of each bucket: the most padding and none."""
    return [(below + 1, size) for below, size in pairwise([0, *buckets])]


def stages(buckets: Sequence[int]) -> int:
    """How often :func:`run_tour` reports progress."""
    return 2 * len(ARMS) + 2 * len(buckets) + 1


def run_tour(lab: Lab, progress: Progress) -> Tour:
    """Runs the main job on an open lab.

    Args:
        lab: the model and its device.
        progress: called with what comes next, ``stages`` times.
    """
    for arm in ARMS:
        progress(f"capture {arm}")
        lab.runner(arm)
    generations = {}
    for arm in ARMS:
        progress(f"generate, {arm}")
        lab.captures.decode = arm
        generations[arm] = _generate(lab)
    checks, comparisons = [], []
    context = min(CONTEXT, lab.max_context)
    for fewest, most in live_sizes(lab.buckets):
        progress(f"parity of bucket {most}")
        for live in sorted({fewest, most}):
            with steady_decode(lab.engine, live, context, seed=live) as step:
                checks += [Checked(arm, live, most, lab.step_parity(arm, step)) for arm in CAPTURED]
        progress(f"times of bucket {most}")
        live = max(fewest, most - 1)  # padded by one wherever the bucket allows it
        comparisons.append(lab.compare("decode", ARMS, batch=live, context=context, repeats=8))
    progress("timeline")
    profile = lab.profile("decode", ("eager", "full"), batch=min(4, lab.buckets[-1]), context=context)
    return Tour(
        model=lab.name,
        weights=lab.weights,
        dtype=_dtype(lab),
        recorder=lab.group.recorder.name,
        generations=generations,
        checks=tuple(checks),
        comparisons=tuple(comparisons),
        profile=profile,
        memory={arm: lab.runner(arm).captured.memory() for arm in CAPTURED},
        records=tuple(_records(lab, comparisons)),
    )


def _generate(lab: Lab) -> Generation:
    """Requests that end at different steps, so that the batch shrinks through the buckets."""
    prompts = lab.sample_prompts(min(PROMPTS, lab.buckets[-1]))
    return lab.generate(prompts, [8 * (index + 1) for index in range(len(prompts))], stop_at_end=False)


def _records(lab: Lab, comparisons: Sequence[Comparison]) -> list[Record]:
    run = new_run()
    return [
        make_record(
            bench="demo",
            arm=arm.name,
            device=lab.device,
            run=run,
            metrics={"step_ms": arm.median and arm.median * 1e3, "verdict": arm.verdict, "error": arm.error},
            samples={"step_ms": [seconds * 1e3 for instance in arm.instances for seconds in instance]},
            model=lab.name,
            weights=lab.weights,
            dtype=_dtype(lab),
            workload=each.workload,
            parity=each.parity[arm.name].as_dict() if arm.name in each.parity else None,
            coverage=each.coverage[arm.name].as_dict(),
            notes=each.note,
        )
        for each in comparisons
        for arm in each.times.arms
    ]


def _dtype(lab: Lab) -> str:
    return str(lab.dtype).removeprefix("torch.")


def _milli(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:.3g}"
