"""Loads with drafts, run by several arms in turns, and what is told of each: rates, latencies, steps, and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any, Final

from cglab.engine.load import Load
from cglab.lab.facade import Lab
from cglab.lab.load_run import LoadRun
from cglab.measure.ab import schedule
from cglab.measure.parity import worst
from cglab.measure.profiling import profile
from cglab.measure.statistics import Instances, bootstrap_interval, difference, pooled_median

INSTANCES: Final = 3
Arms = Mapping[str, Callable[[], object]]
"""What brings a lab into each arm, by its name; the first is what the others are compared with."""


def every_size(concurrency: int) -> list[int]:
    """Buckets of which none pads: a batch that ends in waves has each of them."""
    return list(range(1, concurrency + 1))


def middle(asked: Load) -> int:
    """Tokens of a request that is half done."""
    return asked.longest - asked.most_new_tokens // 2


def turns(lab: Lab, asked: Load, arms: Arms, instances: int = INSTANCES) -> dict[str, list[LoadRun]]:
    """Runs in turns; before them each arm once, shortly, so that nothing is captured or loaded within one."""
    short = Load(asked.concurrency, asked.concurrency, asked.prompt_tokens, min(8, asked.most_new_tokens))
    for choose in arms.values():
        choose()
        lab.load(short)
    runs: dict[str, list[LoadRun]] = {arm: [] for arm in arms}
    for _, arm in schedule(tuple(arms), 0, instances):
        arms[arm]()
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
    "e2e": partial(_times, name="e2e"),
    "round": lambda runs: [round_ms(run) for run in runs],
})  # fmt: skip
"""Milliseconds by instance, for the verdicts."""


def figures(runs: Sequence[LoadRun]) -> dict[str, Any]:
    """Rates and latencies of one arm over its instances."""
    rounds = [round_ms(run) for run in runs]
    found: dict[str, Any] = {
        "tokens_s": median(run.latency.output_tok_s or 0.0 for run in runs),
        "round_ms": pooled_median(rounds), "accept_length": median(_committed(run) for run in runs),
        "errors": float(sum(run.latency.errors for run in runs)),
        "preemptions": float(sum(run.latency.preemptions for run in runs)), "instances": float(len(runs)),
    }  # fmt: skip
    for name in ("tpot", "ttft", "e2e", "queueing"):
        times = _times(runs, name)
        if any(times):
            interval = bootstrap_interval(times)
            found |= {
                f"{name}_ms": pooled_median(times), f"{name}_low_ms": interval.low, f"{name}_high_ms": interval.high,
            }  # fmt: skip
    return found


def _committed(run: LoadRun) -> float:
    """Tokens that a request got from a verify pass on average, the one of its prefill left out."""
    tokens = sum(len(output) - 1 for output in run.result.outputs)
    passes = sum(step.requests for step in run.steps if step.kind == "decode")
    return tokens / passes if passes else 0.0


def verdicts(runs: Mapping[str, Sequence[LoadRun]], arm: str) -> dict[str, Any]:
    """An arm against the first: by request and by step, with whether the tokens are the same."""
    first = runs[next(iter(runs))]
    if runs[arm] is first:
        return {}
    tokens = worst(run.parity(first[0]) for run in runs[arm])
    told: dict[str, Any] = {"tokens_equal": tokens.verdict == "bitwise", "first_difference": tokens.detail}
    for name, of in MEASURES.items():
        found = difference(of(first), of(runs[arm]))
        told |= {f"{name}_ratio": found.ratio, f"{name}_verdict": found.verdict}
    return told


def phase_ms(runs: Sequence[LoadRun]) -> dict[str, float]:
    """Median device time of each phase of a step within the load."""
    spent: dict[str, list[float]] = {}
    for segment in (segment for run in runs for segment in run.segments):
        spent.setdefault(f"{segment.kind}_ms", []).append(segment.seconds * 1e3)
    return {name: median(times) for name, times in spent.items() if name != "prefill_ms"}


def samples(runs: Sequence[LoadRun]) -> dict[str, list[float]]:
    """TPOT, TTFT and queueing of every request of every instance."""
    return {
        f"{name}_ms": [value for instance in _times(runs, name) for value in instance]
        for name in ("tpot", "ttft", "queueing")
    }


def part_alone(
    name: str, run: Callable[[], object], seconds: Callable[[], float], device: Any
) -> dict[str, float]:
    """Kernel time, launches and wall time of a part of a step by itself; what a trace lacks is left out.

    Its launch gap, wall less kernel time, is the most that a graph of it can win.

    Args:
        name: of the part.
        run: computes it.
        seconds: computes it and waits; how long that took.
        device: that it runs on.
    """
    trace = profile(run, steps=5, device=device)
    wall = median(seconds() for _ in range(30)) * 1e3
    busy = trace.busy_us()
    if busy is None:  # no device records: there is no such time
        return {f"{name}_wall_ms": wall}
    busy = busy / trace.steps / 1e3
    return {
        f"{name}_wall_ms": wall, f"{name}_busy_ms": busy, "gap_ms": wall - busy,
        f"{name}_launches": trace.launches / trace.steps,
    }  # fmt: skip
