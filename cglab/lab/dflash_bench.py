"""The DFLASH bench: S4's forward occupancy, with its points told apart.

Three arms in turns: the sampler eager and in no timed segment, as S4 found it; eager within the draft's segment; and in
the draft's graph, as S4 left it. From the first to the second arm nothing is done otherwise, so what occupancy gains
there is accounting; what it gains from the second to the third is real. The target's weights are random, so acceptance
is pinned: what is drafted is real and verified, and how much of it is committed is the same in every arm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any, Final

import torch

from cglab.engine.drafters import BlockDrafter
from cglab.engine.load import Load
from cglab.engine.speculation import Speculation
from cglab.engine.workload import DecodeStep
from cglab.errors import InputError, no_such
from cglab.graphs.clocks import clock_for, sample_seconds
from cglab.lab import steps
from cglab.lab.arm_turns import every_size, figures, middle, part_alone, phase_ms, samples, turns, verdicts
from cglab.lab.draft_round import BlockRound
from cglab.lab.drafting import BLOCK, RANDOM_BLOCK
from cglab.lab.facade import Lab
from cglab.lab.load_run import LoadRun
from cglab.lab.opening import open_lab
from cglab.lab.step_metrics import Progress, model_facts, silent
from cglab.measure.record import Record, make_record, new_run

ARMS: Final[Mapping[str, tuple[str, bool]]] = MappingProxyType(
    {"eager-untimed": ("eager", False), "eager-timed": ("eager", True), "graph": ("graph", True)}
)
"""The sampler's toggle, and whether one outside of the graph is part of a timed segment."""
PAIRS: Final = {True: ("qwen3-8b", "qwen3-8b-dflash"), False: ("pico-gqa", RANDOM_BLOCK)}
"""Target and draft on a GPU, and where only the machinery is shown."""
PINNED: Final = 3.0
"""Tokens per verify pass, of eight."""
PROMPT, NEW_TOKENS = 128, 2048
"""Tokens of a request; SGLang's own check of the gauge generates as many."""


def dflash(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    batches: Sequence[int] = (1, 16),
    new_tokens: int = NEW_TOKENS,
) -> Iterator[Record]:
    """Forward occupancy, step time and launches of speculative steps by where the sampler is, in turns.

    Args:
        device: what is measured.
        quick: a small pair and few tokens that show the machinery.
        progress: called with a line for every stage.
        batches: requests at a time.
        new_tokens: of each request.

    Yields:
        A record for each arm of each batch.

    Raises:
        InputError: for too few new tokens to draft any.
    """
    if new_tokens < 2:
        raise InputError(f"requests of {new_tokens} new tokens draft nothing; give new_tokens=2 or more")
    large = device.type == "cuda" and not quick
    run, (target, draft) = new_run(), PAIRS[large]
    for batch in batches:
        asked = Load(batch, batch, PROMPT if large else 24, new_tokens if large else min(new_tokens, 48))
        progress(f"{target}: open for {batch} at a time")
        with open_lab(
            target, draft=draft, speculation=Speculation(steps=BLOCK - 1, pinned=PINNED), device=device,
            max_batch=batch, max_context=asked.longest, token_budget=None if large else 64,
            buckets=every_size(batch),
        ) as lab:  # fmt: skip
            yield from _records(lab, asked, run, progress)


def choose(lab: Lab, arm: str) -> None:
    """Sets where the sampler runs, and whether its time is counted.

    Args:
        lab: opened with a block draft.
        arm: one of ``ARMS``.

    Raises:
        InputError: without a block draft, or for another arm.
    """
    if arm not in ARMS:
        raise InputError(no_such("arm of the sampler", arm, ARMS))
    speculator = lab.engine.speculator
    if speculator is None or not isinstance(drafter := speculator.drafter, BlockDrafter):
        raise InputError("there is no sampler to measure; open the lab with a block draft")
    lab.captures.draft_sampler, drafter.sampler_timed = ARMS[arm]


def _records(lab: Lab, asked: Load, run: str, progress: Progress) -> Iterator[Record]:
    sizes: dict[str, Any] = {"batch": asked.concurrency, "context": middle(asked)}
    progress("the sampler alone, and whole steps traced")
    gap = _sampler_alone(lab, sizes)
    compared = lab.compare("draft_sampler", ("eager", "graph"), **sizes)
    traced = lab.profile("draft_sampler", ("eager", "graph"), whole=True, **sizes)
    progress(f"turns of {', '.join(ARMS)}")
    runs = turns(lab, asked, {arm: partial(choose, lab, arm) for arm in ARMS})
    gauges = {arm: _occupied(runs[arm]) for arm in ARMS}
    for arm, (mode, _) in ARMS.items():
        trace = traced.traces[mode]
        busy = trace.busy_us()
        told = figures(runs[arm])
        yield make_record(
            bench="dflash", arm=arm, device=lab.device, run=run,
            metrics={
                **told, "step_ms": told["round_ms"], **verdicts(runs, arm), **phase_ms(runs[arm]), **gauges[arm],
                **(_points(gauges) if arm == "graph" else gap), "launches": trace.launches / trace.steps,
                **({} if busy is None else {"busy_ms": busy / trace.steps / 1e3}),
                "draft_ms": (compared.times[mode].median or 0.0) * 1e3,
            },
            samples=samples(runs[arm]),
            workload={
                "batch": asked.concurrency, **asked.as_dict(), **lab.drafted, "cache": lab.max_context,
                "payload": runs[arm][0].result.payload,
            },
            parity=compared.parity[mode].as_dict() if mode in compared.parity else None,
            coverage={phase: each.as_dict() for phase, each in runs[arm][-1].coverage.items()},
            notes="Acceptance pinned. Occupancy is the median of the gauge as SGLang reads it.", **model_facts(lab),
        )  # fmt: skip


def _sampler_alone(lab: Lab, sizes: Mapping[str, int]) -> dict[str, float]:
    """One eager sampler by itself, on what a draft has just handed out."""
    with steps.fixed_step(lab.engine, "draft_sampler", sizes, lab.sizes) as step:
        arm = lab.phases.arm("draft_sampler", "eager")
        if not isinstance(arm, BlockRound) or not isinstance(step, DecodeStep):
            raise InputError("there is no sampler to measure; open the lab with a block draft")
        run = partial(arm.draft.tokens, arm.draft.run(step.live, **step.inputs))
        clock = clock_for(lab.device, "wall")
        return part_alone(
            "sampler", run, lambda: sample_seconds(run, clock, repeats=1, warmup=0)[0], lab.device
        )


def _occupied(runs: Sequence[LoadRun]) -> dict[str, float]:
    """Forward occupancy over the instances: the gauge where it was read often enough, and over the whole run."""
    read = [value for run in runs if (value := run.gauge.median) is not None]
    whole = [value for run in runs if (value := run.occupancy) is not None]
    return ({"occupancy_percent": median(read)} if len(read) == len(runs) else {}) | (
        {"whole_percent": median(whole)} if whole else {}
    )


def _points(gauges: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """What the graph gains over S4's first arm, in two parts."""
    found: dict[str, float] = {}
    for kind in ("occupancy", "whole"):
        if all(f"{kind}_percent" in each for each in gauges.values()):
            untimed, timed, graph = (gauges[arm][f"{kind}_percent"] for arm in ARMS)
            found |= {f"{kind}_accounting": timed - untimed, f"{kind}_real": graph - timed}
    return found
