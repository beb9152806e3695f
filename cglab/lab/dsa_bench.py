"""The DSA bench: S3's A/B on one GPU. Prefill by what is left of its breaks, in turns, at fresh and cached points.

Every point has all four arms, so that it is the ablation of the switches as well; what S3 does not have either (the
indexer's preparation recorded and attention not) is a break with its reason and no arm. Before the loads the step of a
point runs once in each arm, which must agree to the bit, and the one with breaks is traced: its launch gap is the most
that recording can win. Beside the points stands the bucket floor, measured and by S3's rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from cglab.engine.load import Load
from cglab.engine.workload import PrefillStep, steady_prefill
from cglab.errors import InputError
from cglab.graphs.breaks import BreakCall
from cglab.graphs.out_forms import same_bits
from cglab.lab import steps
from cglab.lab.arm_turns import figures, part_alone, samples, turns, verdicts
from cglab.lab.bucket_floor import bucket_floor
from cglab.lab.dsa_recorded import Earlier, asked_of, told
from cglab.lab.dsa_sweep import PER_LANE, captured, choice, load_of, open_for, swept, target_prefill
from cglab.lab.facade import Lab
from cglab.lab.selection_rule import BENCH
from cglab.lab.sparse_arms import ARMS, choose
from cglab.lab.sparse_prefill import SparseArm
from cglab.lab.step_metrics import Progress, model_facts, recorded_steps, silent
from cglab.lab.ttft_grid import Point, in_order
from cglab.measure.record import Record, make_record, new_run

NAMES: Final[Mapping[str, SparseArm]] = MappingProxyType(
    dict(zip(("breaks", "attention", "graph", "whole"), ARMS, strict=True))
)
"""Breaks alone, T8, T8 with T9, and T9b; by the names of the records."""
GRID: Final = in_order([
    *(Point(tokens, 0, many) for tokens in (512, 1024, 2048, 8192) for many in (1, 4)),
    *(Point(tokens, 32768, many) for tokens in (1024, 4096) for many in (1, 4, 16)),
])  # fmt: skip
"""S3's points, but for its prefixes of 128k."""
QUICK_GRID: Final = (Point(40, 0, 1), Point(12, 32, 2))
CONFIRM: Final = 7
"""Turns of each arm of a point where one was slower."""


def dsa(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    model: str | None = None,
    tokens: Sequence[int] | None = None,
    cached: Sequence[int] | None = None,
    concurrency: Sequence[int] | None = None,
    new_tokens: int = 64,
    per_lane: int = PER_LANE,
    floor_tokens: int = 128,
    memory: bool = True,
    again: bool = False,
) -> Iterator[Record]:
    """Requests on a model with sparse attention, by what its prefill leaves to breaks, in turns.

    Args:
        device: what is measured.
        quick: a small model and two points that show the machinery.
        progress: called with a line for every stage.
        model: its name; ``dsa-24`` on a GPU and ``dsa-tiny`` on a CPU.
        tokens: only the points of the grid with so many fresh tokens.
        cached: only those with so many cached ones.
        concurrency: only those with so many requests in flight.
        new_tokens: of each request; S3's 64, and the record states it.
        per_lane: requests for each in flight where several are; S3's 8, fewer for points that would take too long.
        floor_tokens: up to which bucket the floor is swept; 0 for no sweep.
        memory: whether every bucket of every arm is captured once more, for its memory and seconds.
        again: whether what the same code has recorded on this kind of device is measured once more.

    Yields:
        The floor of each arm, a record for each arm of each point, then one for each arm over all of them, with those
        of earlier runs of the same code that were kept, and where of these T9b is to be preferred.

    Raises:
        InputError: if no point of the grid is asked for, or no new token.
    """
    large = device.type == "cuda" and not quick
    wanted = {"tokens": tokens, "cached": cached, "concurrency": concurrency}
    points = [
        point for point in (GRID if large else QUICK_GRID)
        if all(given is None or getattr(point, name) in given for name, given in wanted.items())
    ]  # fmt: skip
    if not points or new_tokens < 1 or per_lane < 1:
        raise InputError(
            f"{len(points)} points with {per_lane} requests a lane of {new_tokens} new tokens; ask for some of the "
            "grid's, and for at least one of each"
        )
    new_tokens = new_tokens if large else min(new_tokens, 3)
    name, run = model or ("dsa-24" if large else "dsa-tiny"), new_run()
    progress(f"{name}: open")
    with open_for(name, device, points, new_tokens, large=large) as lab:
        kept = Earlier.kept(lab.name, lab.dtype, lab.device)
        known = Earlier() if again else kept
        yield from _floors(lab, run, floor_tokens if large else min(floor_tokens, 16), progress, known)
        sweep = [*kept.of(BENCH, NAMES)]
        for number, point in enumerate(points, 1):
            asked = load_of(point, new_tokens, device, per_lane)
            if found := known.run(BENCH, NAMES, asked_of(point, asked)):
                progress(told(point, found))
                continue
            progress(f"{name}: {point}, {number} of {len(points)}")
            for record in _point(lab, point, asked, run):
                sweep.append(record)
                yield record
        for arm in NAMES:
            costs = known.costs(f"{BENCH}_sweep", arm)
            if memory and not costs:
                costs = captured(lab, partial(target_prefill, lab, NAMES[arm]))
            yield swept(lab, arm, sweep, points=GRID if large else QUICK_GRID, run=run, costs=costs)
        yield choice(lab, sweep, run)


def _floors(lab: Lab, run: str, largest: int, progress: Progress, known: Earlier) -> Iterator[Record]:
    arms = list(NAMES.items())[1:] if largest else []
    if recorded := known.run("dsa_floor", dict(arms), {"largest": largest}):
        progress(told("the floors", recorded))
        return
    for name, arm in arms:
        progress(f"{lab.name}: the floor of {name}, up to {largest} tokens")
        found = bucket_floor(lab, arm, largest=largest)
        yield make_record(
            bench="dsa_floor", arm=name, device=lab.device, run=run,
            metrics={
                "floor": float(found.measured), "floor_by_rule": float(found.by_rule), "rows": float(found.rows),
                "differing_buckets": float(len(found.differing)),
            },
            workload={"largest": largest}, notes=str(found), **model_facts(lab),
        )  # fmt: skip


def _point(lab: Lab, point: Point, asked: Load, run: str) -> Iterator[Record]:
    """The records of one point."""
    requests = point.requests_a_step(lab.engine.scheduler.options.token_budget)
    arms = {name: SparseArm(arm.prefill, arm.attention, arm.preparation, requests * point.cached or None)
            for name, arm in NAMES.items()}  # fmt: skip
    with steady_prefill(lab.engine, requests * point.tokens, point.cached, requests) as step:
        alike, breaks = _alike(lab, arms, step)
        alone = {name: _alone(lab, arm, step) for name, arm in arms.items()}
    how = {name: partial(choose, lab, arm) for name, arm in arms.items()}
    runs = turns(lab, asked, how)
    flagged = any(verdicts(runs, arm).get("ttft_verdict") == "slower" for arm in arms)
    if flagged and lab.device.type == "cuda":  # the tape has no times to confirm
        runs = turns(lab, asked, how, CONFIRM)
    for name, arm in arms.items():
        yield make_record(
            bench=BENCH, arm=name, device=lab.device, run=run,
            metrics={
                **figures(runs[name]), **verdicts(runs, name), **alone[name], "flagged": flagged,
                "bitwise": alike[name], "breaks": float(breaks[name]),
                "cache_gb": sum(cache.nbytes for cache in lab.engine.kv.caches().values()) / 1e9,
            },
            samples=samples(runs[name]),
            workload={
                **asked_of(point, asked), "step": dict(step.workload), "decode": "full",
                "payload": runs[name][0].result.payload, "toggles": arm.name,
            },
            parity={"verdict": "bitwise" if alike[name] else "corrupted"},
            coverage={phase: each.as_dict() for phase, each in runs[name][-1].coverage.items()},
            notes="Bitwise is against the arm with breaks. One GPU; S3 ran four and eight.", **model_facts(lab),
        )  # fmt: skip
    choose(lab, NAMES["graph"])


def _alike(
    lab: Lab, arms: Mapping[str, SparseArm], step: PrefillStep
) -> tuple[dict[str, bool], dict[str, int]]:
    """Whether the step of each arm is the first one's to the bit, the cache too, and how many breaks it has."""
    outcomes: dict[str, list[Tensor]] = {}
    breaks: dict[str, int] = {}
    for name, arm in arms.items():
        choose(lab, arm)
        runner = lab.phases.prefill()
        hidden = runner.run(step.live, **step.inputs).clone()
        slots, caches = step.inputs["out_slots"], runner.kv.caches().values()
        outcomes[name] = [hidden, *(cache.index_select(1, slots) for cache in caches)]
        breaks[name] = sum(isinstance(each, BreakCall) for each in recorded_steps(runner, step))
    first = next(iter(outcomes.values()))
    alike = {name: all(map(same_bits, found, first)) for name, found in outcomes.items()}
    return alike, breaks


def _alone(lab: Lab, arm: SparseArm, step: PrefillStep) -> dict[str, float]:
    """The step by itself: wall and kernel time, launches, and the gap between these times."""
    choose(lab, arm)
    runner = lab.phases.prefill()
    run = partial(runner.run, step.live, **step.inputs)
    return part_alone("step", run, steps.timed(runner, step, lab.device), lab.device)
