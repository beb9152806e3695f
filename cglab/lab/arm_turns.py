"""Loads with drafts, run by several arms in turns, and what is told of each: rates, latencies, steps, and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from cglab.engine.load import Load
from cglab.errors import InputError
from cglab.lab.facade import Lab
from cglab.lab.load_run import LoadRun
from cglab.measure.ab import schedule
from cglab.measure.parity import Parity, compare_tokens, worst
from cglab.measure.profiling import profile
from cglab.measure.statistics import bootstrap_interval, difference, pooled_median

INSTANCES: Final = 3
Arms = Mapping[str, Callable[[], object]]
"""What brings a lab into each arm, by its name; the first is what the others are compared with."""


def every_size(concurrency: int) -> list[int]:
    """Buckets of which none pads: a batch that ends in waves has each of them."""
    return list(range(1, concurrency + 1))


def middle(asked: Load) -> int:
    """Tokens of a request that is half done."""
    return asked.longest - asked.most_new_tokens // 2


TIMES: Final = ("tpot", "ttft", "e2e", "queueing")
"""Of a request, in ``RequestTiming``."""
COMPARED: Final = ("tpot", "ttft", "e2e", "round")
"""What verdicts are about."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What is told of one load in one arm, which is one instance.

    Attributes:
        times: milliseconds by measure: of each request ``TIMES``, and ``round`` of each speculative step.
        rates: ``tokens_s`` and ``accept_length``, and how many ``errors`` and ``preemptions`` there were.
        payload: of what was sent.
        outputs: new tokens of each request.
    """

    times: Mapping[str, Sequence[float]]
    rates: Mapping[str, float]
    payload: str
    outputs: Sequence[Sequence[int]]

    @classmethod
    def of(cls, run: LoadRun | Turn) -> Turn:
        """Of a run; one that is kept stays as it is."""
        if isinstance(run, Turn):
            return run
        times = {name: _times(run, name) for name in TIMES}
        rates = {
            "tokens_s": run.latency.output_tok_s or 0.0, "accept_length": _committed(run),
            "errors": float(run.latency.errors), "preemptions": float(run.latency.preemptions),
        }  # fmt: skip
        return cls({**times, "round": round_ms(run)}, rates, run.result.payload, run.result.outputs)

    def parity(self, other: Turn) -> Parity:
        """Its tokens against those of another, request by request.

        Raises:
            InputError: if they were not asked the same, or no request got a token.
        """
        if self.payload != other.payload:
            raise InputError("the turns were sent different requests; compare turns of one and the same load")
        return compare_tokens(self.outputs, other.outputs)


Runs = Sequence[LoadRun | Turn]


def rounds(
    lab: Lab, asked: Load, arms: Arms, instances: int = INSTANCES, *, first: int = 0
) -> Iterator[dict[str, LoadRun]]:
    """A run of every arm, round by round.

    Before them each arm runs once, shortly, so that nothing is captured or loaded within one.

    Args:
        lab: that runs them.
        asked: of each run.
        arms: that take turns.
        instances: rounds in all.
        first: how many of them are there already.
    """
    short = Load(asked.concurrency, asked.concurrency, asked.prompt_tokens, min(8, asked.most_new_tokens))
    for choose in arms.values():
        choose()
        lab.load(short)
    for number in range(first, instances):
        found = {}
        for _, arm in schedule(tuple(arms), number, number + 1):
            arms[arm]()
            found[arm] = lab.load(asked)
        yield found


def turns(lab: Lab, asked: Load, arms: Arms, instances: int = INSTANCES) -> dict[str, list[LoadRun]]:
    """All rounds by arm; arguments as ``rounds``."""
    made = list(rounds(lab, asked, arms, instances))
    return {arm: [each[arm] for each in made] for arm in arms}


def round_ms(run: LoadRun) -> list[float]:
    """Milliseconds of every speculative step: draft, verify, acceptance."""
    return [step.seconds * 1e3 for step in run.steps if step.kind == "decode"]


def _times(run: LoadRun, name: str) -> list[float]:
    return [
        float(seconds) * 1e3 for each in run.result.requests if (seconds := getattr(each, name)) is not None
    ]


def _by_instance(runs: Runs, name: str) -> list[Sequence[float]]:
    return [Turn.of(each).times[name] for each in runs]


def figures(runs: Runs) -> dict[str, Any]:
    """Rates and latencies of one arm over its instances."""
    rates = [Turn.of(each).rates for each in runs]
    found: dict[str, Any] = {
        "tokens_s": median(each["tokens_s"] for each in rates), "round_ms": pooled_median(_by_instance(runs, "round")),
        "accept_length": median(each["accept_length"] for each in rates),
        "errors": sum(each["errors"] for each in rates), "preemptions": sum(each["preemptions"] for each in rates),
        "instances": float(len(runs)),
    }  # fmt: skip
    for name in TIMES:
        times = _by_instance(runs, name)
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


def verdicts(runs: Mapping[str, Runs], arm: str) -> dict[str, Any]:
    """An arm against the first: by request and by step, with whether the tokens are the same."""
    first = runs[next(iter(runs))]
    if runs[arm] is first:
        return {}
    tokens = worst(Turn.of(run).parity(Turn.of(first[0])) for run in runs[arm])
    told: dict[str, Any] = {"tokens_equal": tokens.verdict == "bitwise", "first_difference": tokens.detail}
    for name in COMPARED:
        found = difference(_by_instance(first, name), _by_instance(runs[arm], name))
        told |= {f"{name}_ratio": found.ratio, f"{name}_verdict": found.verdict}
    return told


def phase_ms(runs: Sequence[LoadRun]) -> dict[str, float]:
    """Median device time of each phase of a step within the load."""
    spent: dict[str, list[float]] = {}
    for segment in (segment for run in runs for segment in run.segments):
        spent.setdefault(f"{segment.kind}_ms", []).append(segment.seconds * 1e3)
    return {name: median(times) for name, times in spent.items() if name != "prefill_ms"}


def samples(runs: Runs) -> dict[str, list[float]]:
    """TPOT, TTFT and queueing of every request of every instance."""
    return {
        f"{name}_ms": [value for instance in _by_instance(runs, name) for value in instance]
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
