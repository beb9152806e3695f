"""A request on its way through the engine, and what it streams."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Final

from cglab.errors import InputError

SEEDS: Final = 1 << 63  # seeds travel to the device as int64
HOTTEST: Final = 1e30  # noise of float32 times a temperature must stay finite, or the first token always wins


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: what logits are divided by before drawing, 0 to 1e30; 0 takes the most likely token.
        seed: of the draws, 0 to 2^63 - 1; the same seed and tokens give the same draws in any batch.

    Raises:
        InputError: for a temperature that is no number or out of range, or such a seed.
    """

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        heat = self.temperature
        if isinstance(heat, bool) or not (isinstance(heat, Real) and 0 <= heat <= HOTTEST):
            raise InputError(
                f"temperature must be a finite number from 0 to {HOTTEST:g}, got {heat!r}; 0 is greedy"
            )
        if isinstance(self.seed, bool) or not (isinstance(self.seed, int) and 0 <= self.seed < SEEDS):
            raise InputError(f"seed must be a whole number from 0 to 2^63 - 1, got {self.seed!r}")


GREEDY: Final = Sampling()


@dataclass(eq=False)
class Request:
    """One prompt on its way. The scheduler writes everything from ``output`` on, a speculator ``passes``.

    Attributes:
        index: position among the prompts of the call.
        prompt: token ids.
        limit: most new tokens; 0 ends it at once.
        sampling: how tokens are chosen.
        stops: token ids that end it; the stop token is kept in the output.
        drafts: most drafted tokens that count in a step of speculative decoding; None for all that are made.
        output: new token ids so far.
        row: row of the page table while it runs; 0 before and after.
        pages: KV pages in the order of its positions; those from the prefix cache are shared.
        window_pages: pages of the sliding-window pool by the same index, 0 where already given back; empty
            for models without such layers.
        computed: tokens whose keys and values are in the cache.
        reused: of them, tokens that the prefix cache had at the last admission.
        restored: of these, tokens that came back from host memory.
        dirty: its row of the page table must be written to the device before the next step.
        finish: why it ended: "length", "stop", "cancelled" or "error"; None while it waits or runs.
        preemptions: how often it gave its memory to an older request, to be computed again.
        passes: verify passes of speculative decoding that it was in.
        arrived_at, admitted_at, first_token_at, finished_at: by the caller's clock, in seconds; None before.
            ``admitted_at`` is the first admission.
        token_times: when each output token came.
    """

    index: int
    prompt: list[int]
    limit: int
    sampling: Sampling = GREEDY
    stops: frozenset[int] = frozenset()
    drafts: int | None = None
    output: list[int] = field(default_factory=list)
    row: int = 0
    pages: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)
    computed: int = 0
    reused: int = 0
    restored: int = 0
    dirty: bool = False
    finish: str | None = None
    preemptions: int = 0
    passes: int = 0
    arrived_at: float | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    token_times: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens so far, prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output

    @property
    def decoding(self) -> bool:
        """Only its newest token, one that the model made, is not in the cache yet."""
        return bool(self.output) and self.computed == self.length - 1

    def slot(self, position: int, page_size: int) -> int:
        """KV slot of a position."""
        return self.pages[position // page_size] * page_size + position % page_size

    def window_slot(self, position: int, page_size: int) -> int:
        """Slot of a position in the pool of sliding-window layers; in page 0 if the position has left it."""
        return self.window_pages[position // page_size] * page_size + position % page_size

    def accept(self, tokens: Sequence[int], now: float) -> int:
        """Takes new tokens up to the one that ends the request, if one does.

        Returns:
            How many were taken; those after the end never were.
        """
        for count, token in enumerate(tokens, 1):
            if not self.output:
                self.first_token_at = now
            self.output.append(token)
            self.token_times.append(now)
            if token in self.stops:
                self.end("stop", now)
            elif len(self.output) >= self.limit:
                self.end("length", now)
            if self.finish is not None:
                return count
        return len(tokens)

    def end(self, finish: str, now: float) -> None:
        """Notes why and when it ended."""
        self.finish, self.finished_at = finish, now


def listed(requests: Iterable[Request]) -> list[Request]:
    """Requests as a list of their own.

    Raises:
        InputError: for what holds none.
    """
    if not isinstance(requests, Iterable):
        raise InputError(f"requests come in a list, got a {type(requests).__name__}; give [Request(...)]")
    return list(requests)


def check_request(request: Request) -> None:
    """Refuses what would fail in the middle of a step, or be computed as something else.

    Raises:
        InputError: for what is no request, or has a field of another kind.
    """
    if not isinstance(request, Request):
        raise InputError(f"a {type(request).__name__} is no request; give a Request")
    prompt, limit, what = request.prompt, request.limit, f"prompt {request.index}"
    if not isinstance(prompt, list) or not all(issubclass(kind, Integral) for kind in set(map(type, prompt))):
        raise InputError(
            f"{what} must be a list of whole token ids, got a {type(prompt).__name__}: encode it"
        )
    if isinstance(limit, bool) or not isinstance(limit, Integral):
        raise InputError(f"{what} may add {limit!r} tokens; give a whole number of at least 0")
    if not isinstance(request.sampling, Sampling):
        raise InputError(f"{what} is sampled by {request.sampling!r}; give a Sampling(temperature, seed)")
    if isinstance(request.stops, str) or not isinstance(request.stops, Collection):
        raise InputError(f"{what} stops at {request.stops!r}; give a set of token ids")
    drafts = request.drafts
    if drafts is not None and (isinstance(drafts, bool) or not isinstance(drafts, int) or drafts < 0):
        raise InputError(
            f"{what} may use {drafts!r} drafts a step; give a whole number of at least 0, or None"
        )
    if request.output and request.arrived_at is None:
        raise InputError(f"{what} has output before it ran; make it part of the prompt")


@dataclass(frozen=True, slots=True)
class Event:
    """What a request streams: a token, its end, or both at once.

    Attributes:
        request: whose.
        token: the new token id; None for an end without one.
        at: by the caller's clock, in seconds.
        finish: why the request ended with this event; None if it goes on.
    """

    request: Request
    token: int | None
    at: float
    finish: str | None
