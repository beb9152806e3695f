"""A request, and what a call of ``generate`` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from cglab.graphs.coverage import Coverage


@dataclass
class Request:
    """One prompt on its way.

    Attributes:
        index: position among the prompts of the call.
        prompt: token ids.
        limit: most new tokens.
        output: new token ids so far.
        row: row of the page table while it runs; 0 before and after.
        pages: KV pages that it owns.
        finish: why it ended: "length" or "stop"; None while it runs.
        first_token_at, finished_at: seconds since the start of the call.
    """

    index: int
    prompt: list[int]
    limit: int
    output: list[int] = field(default_factory=list)
    row: int = 0
    pages: list[int] = field(default_factory=list)
    finish: str | None = None
    first_token_at: float = 0.0
    finished_at: float = 0.0

    @property
    def length(self) -> int:
        """Tokens so far, prompt and output."""
        return len(self.prompt) + len(self.output)

    def slot(self, position: int, page_size: int) -> int:
        """KV slot of a position."""
        return self.pages[position // page_size] * page_size + position % page_size

    def accept(self, token: int, stops: Sequence[int], now: float) -> None:
        """Takes one new token and decides whether the request ends."""
        if not self.output:
            self.first_token_at = now
        self.output.append(token)
        if token in stops:
            self.finish = "stop"
        elif len(self.output) >= self.limit:
            self.finish = "length"
        self.finished_at = now


@dataclass(frozen=True)
class Timings:
    """Wall times of one call, in seconds.

    Attributes:
        total: the whole call.
        steps: each decode step, from batch to token ids on the host.
        step_batches: live requests of each decode step.
        first_token: time to first token of each request, queueing included.
        finished: when each request ended.
    """

    total: float
    steps: list[float]
    step_batches: list[int]
    first_token: list[float]
    finished: list[float]

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


@dataclass(frozen=True)
class Generation:
    """What ``generate`` returns.

    Attributes:
        text: new text of each prompt; empty strings without a tokenizer.
        tokens: new token ids of each prompt.
        finish: why each ended: "length" or "stop".
        timings: wall times.
        coverage: captured and eager decode steps of this call, with reasons.
    """

    text: list[str]
    tokens: list[list[int]]
    finish: list[str]
    timings: Timings
    coverage: Coverage

    def __str__(self) -> str:
        count = sum(len(tokens) for tokens in self.tokens)
        return f"{len(self.tokens)} requests, {count} new tokens; {self.coverage}; {self.timings}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish": self.finish,
            "coverage": self.coverage.as_dict(),
        }
