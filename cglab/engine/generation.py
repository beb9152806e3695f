"""What a call of ``generate`` takes and returns, and the records that it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from cglab.engine.acceptance import AcceptLengths
from cglab.engine.requests import Request, Sampling
from cglab.errors import InputError
from cglab.graphs.coverage import Coverage


def limits_of(max_new_tokens: int | Sequence[int], count: int) -> list[Any]:
    """A limit for each of ``count`` prompts, from one for all or one for each.

    Raises:
        InputError: for another number of limits, or one that is no whole number of at least 0.
    """
    each = isinstance(max_new_tokens, Sequence) and not isinstance(max_new_tokens, str)
    limits: list[Any] = list(max_new_tokens) if each else [max_new_tokens] * count  # type: ignore[arg-type]
    if len(limits) != count:
        raise InputError(f"{len(limits)} limits for {count} prompts; give one for each, or one for all")
    for limit in limits:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise InputError(f"max_new_tokens must be a whole number of at least 0, got {limit!r}")
    return limits


def requests_of(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    sampling: Sampling,
    stops: Sequence[int],
) -> list[Request]:
    """A request for each prompt; arguments as ``Engine.generate`` takes them.

    Raises:
        InputError: as ``limits_of``.
    """
    return [
        Request(i, list(prompt), limit, Sampling(sampling.temperature, sampling.seed + i), frozenset(stops))
        for i, (prompt, limit) in enumerate(
            zip(prompts, limits_of(max_new_tokens, len(prompts)), strict=True)
        )
    ]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that was computed.

    Attributes:
        kind: ``prefill`` or ``decode``.
        requests: live requests.
        tokens: live tokens.
        seconds: from the plan to token ids on the host.
    """

    kind: str
    requests: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Timings:
    """Wall times of one call, in seconds.

    Attributes:
        total: the whole call.
        steps: each decode step, from batch to token ids on the host.
        step_batches: live requests of each decode step.
        first_token: time to first token of each request, queueing included.
        finished: when each request ended.
        prefills: each prefill step, likewise.
        prefill_tokens: live tokens of each prefill step.
    """

    total: float
    steps: list[float]
    step_batches: list[int]
    first_token: list[float]
    finished: list[float]
    prefills: list[float] = field(default_factory=list)
    prefill_tokens: list[int] = field(default_factory=list)

    @property
    def median_step(self) -> float | None:
        """Median decode step; None if there was none."""
        return median(self.steps) if self.steps else None

    def __str__(self) -> str:
        step = (
            f"{self.median_step * 1e3:.2f} ms median step"
            if self.median_step is not None
            else "no decode step"
        )
        return f"{self.total:.3f} s, {len(self.steps)} decode steps, {step}"


def timings_of(
    requests: Sequence[Request], steps: Sequence[StepRecord], started: float, ended: float
) -> Timings:
    """Wall times of one call.

    Args:
        requests: those of the call, ended.
        steps: what was computed, in order.
        started, ended: of the call, in seconds by the clock of the steps.
    """
    decodes, prefills = ([step for step in steps if step.kind == kind] for kind in ("decode", "prefill"))
    return Timings(
        ended - started, [s.seconds for s in decodes], [s.requests for s in decodes],
        [(r.first_token_at or started) - started for r in requests],
        [(r.finished_at or started) - started for r in requests],
        [s.seconds for s in prefills], [s.tokens for s in prefills],
    )  # fmt: skip


@dataclass(frozen=True)
class Generation:
    """What ``generate`` returns.

    Attributes:
        text: new text of each prompt; empty strings without a tokenizer.
        tokens: new token ids of each prompt.
        finish: why each ended: "length" or "stop".
        timings: wall times.
        coverage: captured and eager decode steps of this call, with reasons.
        prefill: likewise of its prefill steps.
        accepted: what became of drafted tokens; None without speculative decoding.
        speculation: likewise of each runner of speculative decoding, by technique; its steps are no decode steps.
    """

    text: list[str]
    tokens: list[list[int]]
    finish: list[str]
    timings: Timings
    coverage: Coverage
    prefill: Coverage = field(default_factory=Coverage)
    accepted: AcceptLengths | None = None
    speculation: Mapping[str, Coverage] = field(default_factory=dict)

    def __str__(self) -> str:
        count = sum(len(tokens) for tokens in self.tokens)
        phases = self.speculation or {"decode": self.coverage}
        steps = "; ".join(f"{name} {counts}" for name, counts in {**phases, "prefill": self.prefill}.items())
        drafts = "" if self.accepted is None else f"; {self.accepted}"
        return f"{len(self.tokens)} requests, {count} new tokens; {steps}{drafts}; {self.timings}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish": self.finish,
            "coverage": self.coverage.as_dict(),
            "prefill": self.prefill.as_dict(),
            "accepted": None if self.accepted is None else self.accepted.as_dict(),
            "speculation": {name: counts.as_dict() for name, counts in self.speculation.items()},
        }
