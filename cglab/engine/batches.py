"""What the scheduler is told and what it answers: options, chunks of prompts, and the two kinds of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from cglab.engine.requests import Request
from cglab.errors import InputError


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Policy of the scheduler.

    Attributes:
        token_budget: most tokens of a prefill batch, all its requests together.
        max_running: most requests that run at a time; None for as many as there are rows.
        prefix_reuse: tokens that an earlier request computed are not computed again.
        mixed: requests that decode ride along in prefill batches, as chunks of one token.

    Raises:
        InputError: for a budget or number of requests below 1.
    """

    token_budget: int
    max_running: int | None = None
    prefix_reuse: bool = True
    mixed: bool = False

    def __post_init__(self) -> None:
        if self.token_budget < 1 or (self.max_running is not None and self.max_running < 1):
            raise InputError(
                f"token_budget {self.token_budget} and max_running {self.max_running} must be at least 1"
            )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``start + length - 1`` of one request.

    Attributes:
        request: whose.
        start: first position to compute; everything before is in the cache.
        length: tokens, at least 1.
        last: reaches the request's newest token, so that it yields the next one.
    """

    request: Request
    start: int
    length: int
    last: bool

    @property
    def decoding_next(self) -> bool:
        """Whether its request decodes after it: one that gave way may have had its newest token before."""
        return self.last or (
            bool(self.request.output) and self.start + self.length == self.request.length - 1
        )


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Chunks of several requests, computed in one step.

    A mixed batch is one too (P84): a request that decodes is a chunk of length 1, so that what replays prefill
    graphs sees only extends.

    Attributes:
        chunks: those of requests that decode first, then in order of arrival.
    """

    chunks: tuple[Chunk, ...]

    @property
    def requests(self) -> tuple[Request, ...]:
        """The request of each chunk."""
        return tuple(chunk.request for chunk in self.chunks)

    @property
    def tokens(self) -> int:
        """Tokens to compute."""
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The newest token of each request.

    Attributes:
        requests: in order of arrival.
    """

    requests: tuple[Request, ...]

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The same as chunks of length 1."""
        return tuple(Chunk(request, request.computed, 1, last=True) for request in self.requests)

    @property
    def tokens(self) -> int:
        """Tokens to compute."""
        return len(self.requests)


Batch: TypeAlias = PrefillBatch | DecodeBatch
