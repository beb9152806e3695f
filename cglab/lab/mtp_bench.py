"""The MTP bench: S0's A/B on one GPU. Loads with drafts, the seed step eager, captured and fused in turns.

The pair is about as large as S0's, with random weights, so acceptance is pinned to S0's mean: what is drafted is real
and verified, and how much of it is committed is the same in every arm. Before the loads the eager seed step is traced:
its launch gap is the most that a graph of it can win, and the record has it beside what was won.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any, Final

import torch

from cglab.engine.load import Load
from cglab.engine.speculation import Speculation
from cglab.engine.workload import DecodeStep
from cglab.errors import InputError
from cglab.lab import steps
from cglab.lab.draft_round import SeedRound
from cglab.lab.facade import Lab
from cglab.lab.load_run import LoadRun
from cglab.lab.opening import open_lab
from cglab.lab.step_metrics import Progress, model_facts, silent
from cglab.measure.ab import schedule
from cglab.measure.parity import worst
from cglab.measure.profiling import profile
from cglab.measure.record import Record, make_record, new_run
from cglab.measure.statistics import Instances, bootstrap_interval, difference, pooled_median

ARMS: Final = ("eager", "graph", "fused")
INSTANCES: Final = 3
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
        InputError: for an unknown load.
    """
    large = device.type == "cuda" and not quick
    known = LOADS if large else QUICK_LOADS
    if unknown := [kind for kind in loads if kind not in known]:
        raise InputError(f"no load {unknown[0]!r}; good names: {', '.join(known)}")
    run, (target, draft) = new_run(), PAIRS[large]
    for kind in loads:
        asked = known[kind]
        if new_tokens is not None:
            asked = Load(asked.count, asked.concurrency, asked.prompt_tokens, new_tokens)
        progress(f"{target}: open for {kind}")
        with open_lab(
            target, draft=draft, speculation=Speculation(steps=3, pinned=PINNED), device=device,
            max_batch=asked.concurrency, max_context=asked.longest, token_budget=None if large else 64,
            buckets=_buckets(asked.concurrency),
        ) as lab:  # fmt: skip
            yield from _records(lab, kind, asked, run, progress)


def _buckets(concurrency: int) -> list[int]:
    """Every size: a batch that ends in waves has each of them, and none is padded."""
    return list(range(1, concurrency + 1))


def _records(lab: Lab, kind: str, asked: Load, run: str, progress: Progress) -> Iterator[Record]:
    progress(f"{kind}: the seed step alone")
    gap = _seed_alone(lab, asked)
    drafts = lab.compare("seed_step", ARMS, batch=asked.concurrency, context=_middle(asked))
    progress(f"{kind}: {INSTANCES} turns of {', '.join(ARMS)}")
    runs = _turns(lab, asked)
    for arm in ARMS:
        yield make_record(
            bench="mtp", arm=arm, device=lab.device, run=run,
            metrics={
                **_figures(runs[arm]), **_verdicts(runs, arm), **_seed(runs, arm, gap),
                "draft_ms": (drafts.times[arm].median or 0.0) * 1e3, "instances": float(INSTANCES),
            },
            samples=_samples(runs[arm]),
            workload={
                "dataset": kind, "batch": asked.concurrency, **asked.as_dict(), **lab.drafted, "decode": "full",
                "cache": lab.max_context, "payload": runs[arm][0].result.payload,
            },
            parity=drafts.parity[arm].as_dict() if arm in drafts.parity else None,
            coverage={phase: each.as_dict() for phase, each in runs[arm][-1].coverage.items()},
            notes="One GPU, acceptance pinned; S0 ran trained weights on two H100s.", **model_facts(lab),
        )  # fmt: skip


def _middle(asked: Load) -> int:
    """Tokens of a request that is half done."""
    return asked.longest - asked.most_new_tokens // 2


def _seed_alone(lab: Lab, asked: Load) -> dict[str, float]:
    """Kernel time, launches and wall time of one eager seed step; what a trace lacks is left out."""
    sizes = {"batch": asked.concurrency, "context": _middle(asked)}
    with steps.fixed_step(lab.engine, "seed_step", sizes, lab.sizes) as step:
        arm = lab.phases.arm("seed_step", "eager")
        if not isinstance(arm, SeedRound) or not isinstance(step, DecodeStep):
            raise InputError("there is no seed step to measure; open the lab with a draft")
        runner, piece = next(iter(arm.pieces(step)))
        run = partial(runner.run, piece.live, **piece.inputs)
        trace = profile(run, steps=5, device=lab.device)
        wall = median(steps.timed(runner, piece, lab.device)() for _ in range(30)) * 1e3
    busy = trace.busy_us()
    if busy is None:  # no device records: there is no such time
        return {"seed_wall_ms": wall}
    busy = busy / trace.steps / 1e3
    return {
        "seed_wall_ms": wall, "seed_busy_ms": busy, "gap_ms": wall - busy,
        "seed_launches": trace.launches / trace.steps,
    }  # fmt: skip


def _turns(lab: Lab, asked: Load) -> dict[str, list[LoadRun]]:
    """Runs in turns; before them each arm once, shortly, so that nothing is captured or loaded within one."""
    short = Load(asked.concurrency, asked.concurrency, asked.prompt_tokens, min(8, asked.most_new_tokens))
    for arm in ARMS:
        lab.captures.seed_step = arm
        lab.load(short)
    runs: dict[str, list[LoadRun]] = {arm: [] for arm in ARMS}
    for _, arm in schedule(ARMS, 0, INSTANCES):
        lab.captures.seed_step = arm
        runs[arm].append(lab.load(asked))
    return runs


def round_ms(run: LoadRun) -> list[float]:
    """Milliseconds of every speculative step: draft, verify, acceptance."""
    return [step.seconds * 1e3 for step in run.steps if step.kind == "decode"]


def _times(runs: Sequence[LoadRun], name: str) -> list[list[float]]:
    return [
        [float(seconds) * 1e3 for each in run.result.requests if (seconds := getattr(each, name)) is not None]
        for run in runs
    ]


MEASURES: Final[Mapping[str, Callable[[Sequence[LoadRun]], Instances]]] = MappingProxyType({
    "tpot": partial(_times, name="tpot"),
    "ttft": partial(_times, name="ttft"),
    "round": lambda runs: [round_ms(run) for run in runs],
})  # fmt: skip
"""Milliseconds by instance, for the verdicts."""


def _figures(runs: Sequence[LoadRun]) -> dict[str, Any]:
    """Rates and latencies of one arm over its instances."""
    rounds = [round_ms(run) for run in runs]
    figures: dict[str, Any] = {
        "tokens_s": median(run.latency.output_tok_s or 0.0 for run in runs),
        "round_ms": pooled_median(rounds), "accept_length": median(_committed(run) for run in runs),
        "errors": float(sum(run.latency.errors for run in runs)),
        "preemptions": float(sum(run.latency.preemptions for run in runs)),
    }  # fmt: skip
    for name in ("tpot", "ttft", "queueing"):
        times = _times(runs, name)
        if any(times):
            interval = bootstrap_interval(times)
            figures |= {
                f"{name}_ms": pooled_median(times), f"{name}_low_ms": interval.low, f"{name}_high_ms": interval.high,
            }  # fmt: skip
    return figures


def _committed(run: LoadRun) -> float:
    """Tokens that a request got from a verify pass on average, the one of its prefill left out."""
    tokens = sum(len(output) - 1 for output in run.result.outputs)
    passes = sum(step.requests for step in run.steps if step.kind == "decode")
    return tokens / passes if passes else 0.0


def _verdicts(runs: Mapping[str, Sequence[LoadRun]], arm: str) -> dict[str, Any]:
    """The arm against the eager one: by request and by step, with whether the tokens are the same."""
    if arm == "eager":
        return {}
    tokens = worst(run.parity(runs["eager"][0]) for run in runs[arm])
    told: dict[str, Any] = {"tokens_equal": tokens.verdict == "bitwise", "first_difference": tokens.detail}
    for name, of in MEASURES.items():
        found = difference(of(runs["eager"]), of(runs[arm]))
        told |= {f"{name}_ratio": found.ratio, f"{name}_verdict": found.verdict}
    return told


def _seed(runs: Mapping[str, Sequence[LoadRun]], arm: str, alone: Mapping[str, float]) -> dict[str, float]:
    """Device time of the phases of a step within the load; of eager also what its seed step is made of."""
    told: dict[str, float] = {}
    for kind in ("seed_step", "draft_loop", "verify"):
        spent = [each.seconds * 1e3 for run in runs[arm] for each in run.segments if each.kind == kind]
        if spent:
            told[f"{kind}_ms"] = median(spent)
    if arm == "eager":
        told |= alone
        told["seed_share"] = told["seed_step_ms"] / pooled_median([round_ms(run) for run in runs[arm]])
    return told


def _samples(runs: Sequence[LoadRun]) -> dict[str, list[float]]:
    """TPOT, TTFT and queueing of every request of every instance."""
    return {
        f"{name}_ms": [value for instance in _times(runs, name) for value in instance]
        for name in ("tpot", "ttft", "queueing")
    }
