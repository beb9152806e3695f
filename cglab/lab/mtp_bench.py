"""The MTP bench: S0's A/B on one GPU. Loads with drafts, the seed step eager, captured and fused in turns.

The pair is about as large as S0's, with random weights, so acceptance is pinned to S0's mean: what is drafted is real
and verified, and how much of it is committed is the same in every arm. Before the loads the eager seed step is traced:
its launch gap is the most that a graph of it can win, and the record has it beside what was won.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import torch

from cglab.engine.load import Load
from cglab.engine.speculation import Speculation
from cglab.engine.workload import DecodeStep
from cglab.errors import InputError, no_such
from cglab.lab import steps
from cglab.lab.arm_turns import (
    INSTANCES,
    every_size,
    figures,
    middle,
    part_alone,
    phase_ms,
    round_ms,
    samples,
    turns,
    verdicts,
)
from cglab.lab.draft_round import SeedRound
from cglab.lab.facade import Lab
from cglab.lab.load_run import LoadRun
from cglab.lab.opening import open_lab
from cglab.lab.step_metrics import Progress, model_facts, silent
from cglab.measure.record import Record, make_record, new_run
from cglab.measure.statistics import pooled_median

ARMS: Final = ("eager", "graph", "fused")
PAIRS: Final = {
    True: ("gemma-31b-like", "gemma-31b-like-assistant"),
    False: ("pico-gqa", "pico-gqa-assistant"),
}
"""Target and draft on a GPU, and where only the machinery is shown."""
PINNED: Final = 3.13
"""Tokens per verify pass, of four: S0's accept length."""
LOADS: Final[Mapping[str, Load]] = MappingProxyType({
    "chat": Load(27, concurrency=16, prompt_tokens=1000, new_tokens=1000),
    "summarisation": Load(16, concurrency=8, prompt_tokens=8000, new_tokens=1000),
})  # fmt: skip
"""S0's lengths; three instances send 81 and 48 requests to each arm."""
QUICK_LOADS: Final[Mapping[str, Load]] = MappingProxyType({
    "chat": Load(6, concurrency=4, prompt_tokens=24, new_tokens=24),
    "summarisation": Load(4, concurrency=2, prompt_tokens=120, new_tokens=24),
})  # fmt: skip


def mtp(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    loads: Sequence[str] = tuple(LOADS),
    new_tokens: int | None = None,
) -> Iterator[Record]:
    """Loads on a target with its assistant, by the seed step's arm, in turns.

    Args:
        device: what is measured.
        quick: a small pair and small loads that show the machinery.
        progress: called with a line for every stage.
        loads: names of ``LOADS``.
        new_tokens: of each request, where S0's thousand take too long; the record states it.

    Yields:
        A record for each arm of each load.

    Raises:
        InputError: for an unknown load, or too few new tokens for a draft.
    """
    large = device.type == "cuda" and not quick
    known = LOADS if large else QUICK_LOADS
    if unknown := [kind for kind in loads if kind not in known]:
        raise InputError(no_such("load", unknown[0], known))
    if new_tokens is not None and new_tokens < 2:
        raise InputError(f"requests of {new_tokens} new tokens draft nothing; give new_tokens=2 or more")
    run, (target, draft) = new_run(), PAIRS[large]
    for kind in loads:
        asked = known[kind]
        if new_tokens is not None:
            asked = Load(asked.count, asked.concurrency, asked.prompt_tokens, new_tokens)
        progress(f"{target}: open for {kind}")
        with open_lab(
            target, draft=draft, speculation=Speculation(steps=3, pinned=PINNED), device=device,
            max_batch=asked.concurrency, max_context=asked.longest, token_budget=None if large else 64,
            buckets=every_size(asked.concurrency),
        ) as lab:  # fmt: skip
            yield from _records(lab, kind, asked, run, progress)


def _records(lab: Lab, kind: str, asked: Load, run: str, progress: Progress) -> Iterator[Record]:
    progress(f"{kind}: the seed step alone")
    gap = _seed_alone(lab, asked)
    drafts = lab.compare("seed_step", ARMS, batch=asked.concurrency, context=middle(asked))
    progress(f"{kind}: {INSTANCES} turns of {', '.join(ARMS)}")
    runs = turns(lab, asked, {arm: partial(setattr, lab.captures, "seed_step", arm) for arm in ARMS})
    for arm in ARMS:
        yield make_record(
            bench="mtp", arm=arm, device=lab.device, run=run,
            metrics={
                **figures(runs[arm]), **verdicts(runs, arm), **_seed(runs, arm, gap),
                "draft_ms": (drafts.times[arm].median or 0.0) * 1e3,
            },
            samples=samples(runs[arm]),
            workload={
                "dataset": kind, "batch": asked.concurrency, **asked.as_dict(), **lab.drafted, "decode": "full",
                "cache": lab.max_context, "payload": runs[arm][0].result.payload,
            },
            parity=drafts.parity[arm].as_dict() if arm in drafts.parity else None,
            coverage={phase: each.as_dict() for phase, each in runs[arm][-1].coverage.items()},
            notes="One GPU, acceptance pinned; S0 ran trained weights on two H100s.", **model_facts(lab),
        )  # fmt: skip


def _seed_alone(lab: Lab, asked: Load) -> dict[str, float]:
    """One eager seed step by itself."""
    sizes = {"batch": asked.concurrency, "context": middle(asked)}
    with steps.fixed_step(lab.engine, "seed_step", sizes, lab.sizes) as step:
        arm = lab.phases.arm("seed_step", "eager")
        if not isinstance(arm, SeedRound) or not isinstance(step, DecodeStep):
            raise InputError("there is no seed step to measure; open the lab with a draft")
        runner, piece = next(iter(arm.pieces(step)))
        run = partial(runner.run, piece.live, **piece.inputs)
        return part_alone("seed", run, steps.timed(runner, piece, lab.device), lab.device)


def _seed(runs: Mapping[str, Sequence[LoadRun]], arm: str, alone: Mapping[str, float]) -> dict[str, float]:
    """Device time of the phases of a step within the load; of eager also what its seed step is made of."""
    told = phase_ms(runs[arm])
    if arm == "eager":
        told |= alone
        told["seed_share"] = told["seed_step_ms"] / pooled_median([round_ms(run) for run in runs[arm]])
    return told
