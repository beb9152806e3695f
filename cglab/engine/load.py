"""A closed-loop load: a fixed number of requests in flight, the next one sent when one ends.

What is sent is decided before anything runs, by the :class:`Load` and its seed alone; when it is sent depends on
completions and never on a clock. So two arms that are given the same load do the same work, and
``LoadResult.payload`` proves it: a hash over every prompt, limit and seed (no equal hash, no comparison).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Protocol

import numpy as np

from cglab.engine.requests import GREEDY, Event, Request, Sampling
from cglab.engine.timing import RequestTiming, timing_of
from cglab.errors import InputError

Length = int | tuple[int, int]


class Server(Protocol):
    """What takes requests: the engine, or a stand-in for it."""

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running."""
        ...

    def submit(self, request: Request) -> None:
        """Queues a request; raises ``InputError`` for one that can never run."""
        ...

    def step(self) -> list[Event]:
        """Runs one batch; returns the tokens and ends that it brought."""
        ...

    def cancel(self, request: Request) -> object:
        """Ends a request early."""
        ...

    def flush_cache(self) -> None:
        """Forgets the prefixes of requests that have ended."""
        ...

    def now(self) -> float:
        """Seconds by the clock of all its times."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a server.

    Attributes:
        count: requests.
        concurrency: requests in flight.
        prompt_tokens: fresh tokens of each prompt, or the lowest and highest, drawn uniformly.
        new_tokens: most new tokens of each, or the lowest and highest; nothing else ends a request.
        shared_prefix: tokens that open every prompt. They are put into the prefix cache before the load starts, so
            ``shared_prefix=32768, prompt_tokens=1024`` is "32k cached + 1024 new".
        seed: of lengths, tokens and sampling. A request depends on the seed and its own index only.
        temperature: of sampling; 0 is greedy.

    Raises:
        InputError: for a value out of range.
    """

    count: int
    concurrency: int
    prompt_tokens: Length
    new_tokens: Length
    shared_prefix: int = 0
    seed: int = 0
    temperature: float = 0.0

    def __post_init__(self) -> None:
        for name, lowest in (("count", 1), ("concurrency", 1), ("shared_prefix", 0), ("seed", 0)):
            _require_whole(name, getattr(self, name), lowest)
        for name, lowest in (("prompt_tokens", 1), ("new_tokens", 0)):
            low, high = _bounds(getattr(self, name))
            _require_whole(name, low, lowest)
            _require_whole(name, high, low)
        Sampling(self.temperature)  # refuses what is no temperature

    def requests(self, vocabulary: int) -> list[Request]:
        """The requests, in order of submission, the same at every call.

        Args:
            vocabulary: token ids are drawn from 0 to ``vocabulary - 1``.

        Raises:
            InputError: for an empty vocabulary.
        """
        prefix = self.prefix(vocabulary)
        return [self._request(index, prefix, vocabulary) for index in range(self.count)]

    def prefix(self, vocabulary: int) -> list[int]:
        """The token ids that open every prompt; arguments as in :meth:`requests`."""
        _require_whole("vocabulary", vocabulary, 1)
        return self._generator(0).integers(vocabulary, size=self.shared_prefix).tolist()

    def _request(self, index: int, prefix: list[int], vocabulary: int) -> Request:
        generator = self._generator(index + 1)
        fresh, limit = (
            int(generator.integers(low, high + 1))
            for low, high in map(_bounds, (self.prompt_tokens, self.new_tokens))
        )
        prompt = prefix + generator.integers(vocabulary, size=fresh).tolist()
        seed = int(generator.integers(2**31))
        sampling = Sampling(self.temperature, seed) if self.temperature > 0 else GREEDY
        return Request(index, prompt, limit, sampling)

    def _generator(self, stream: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, stream))

    @property
    def most_new_tokens(self) -> int:
        """Most new tokens that any of its requests may ask for."""
        return _bounds(self.new_tokens)[1]

    @property
    def longest(self) -> int:
        """Most tokens that any of its requests may come to, prompt and new ones."""
        return self.shared_prefix + _bounds(self.prompt_tokens)[1] + self.most_new_tokens

    def as_dict(self) -> dict[str, Any]:
        """Plain values: the workload of a record."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a server made of a load.

    Attributes:
        load: what was asked.
        payload: sha256 over what was sent, from :func:`payload_hash`; arms compare only if theirs are equal.
        requests: those that were submitted, by index.
        outputs: their new token ids.
        seconds: from the first submission to the end.
        steps: batches that the server ran.
    """

    load: Load
    payload: str
    requests: tuple[RequestTiming, ...]
    outputs: tuple[tuple[int, ...], ...]
    seconds: float
    steps: int

    @property
    def unsent(self) -> int:
        """Requests that were never submitted, for want of time."""
        return self.load.count - len(self.requests)

    def ended(self, finish: str | None) -> list[RequestTiming]:
        """The requests with this end; None for those in flight when the run stopped."""
        return [each for each in self.requests if each.finish == finish]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, every token's time included."""
        return asdict(self)


def payload_hash(requests: Sequence[Request]) -> str:
    """sha256 over index, prompt, limit, stops and sampling of each request: equal for byte-identical work only."""
    digest = sha256()
    for request in requests:
        sampling = request.sampling
        head = (request.index, request.limit, sampling.temperature, sampling.seed, sorted(request.stops))
        digest.update(f"{head!r} {len(request.prompt)}\n".encode())
        digest.update(np.asarray(request.prompt, dtype="<i8").tobytes())
    return digest.hexdigest()


def drive(
    server: Server,
    load: Load,
    vocabulary: int,
    *,
    seconds: float | None = None,
    after_step: Callable[[list[Event]], None] | None = None,
) -> LoadResult:
    """Runs a load, ``load.concurrency`` requests in flight, until all have ended.

    The prefix cache is emptied first: prompts that an earlier run of the same load left there would all be hits.

    Args:
        server: with nothing else to do.
        load: what to ask.
        vocabulary: of the server's model.
        seconds: stop after so long; what is in flight then is reported as such and cancelled. None for no limit.
        after_step: called with the events of every step: to drain segments, or to cancel requests.

    Raises:
        InputError: if the server is busy with other requests, cannot hold the shared prefix, or the time is none.
        Exception: what a step raises ends the run; the server is left idle.
    """
    if not server.idle:
        raise InputError("the server has requests of others; let it become idle before a load is measured")
    if seconds is not None and not seconds > 0:
        raise InputError(f"seconds={seconds}; give a time above 0, or None for no limit")
    requests = load.requests(vocabulary)
    payload = payload_hash(requests)
    server.flush_cache()
    if load.shared_prefix:
        _warm_prefix(server, load.prefix(vocabulary))
    return _Drive(server, load, requests, after_step).run(payload, seconds)


def _warm_prefix(server: Server, prefix: list[int]) -> None:
    """One request that ends after its first token leaves the whole prefix in the cache."""
    server.submit(Request(0, prefix, 1))
    while not server.idle:
        server.step()


class _Drive:
    def __init__(
        self,
        server: Server,
        load: Load,
        requests: list[Request],
        after_step: Callable[[list[Event]], None] | None,
    ) -> None:
        self.server, self.load, self.after_step = server, load, after_step
        self.waiting = deque(requests)
        self.in_flight: list[Request] = []
        self.sent: list[Request] = []
        self.refusals: dict[int, str] = {}

    def run(self, payload: str, seconds: float | None) -> LoadResult:
        server, steps, started = self.server, 0, self.server.now()
        try:
            self._refill()
            # A server that is idle with requests of ours in flight has lost them: they are reported, not waited for.
            while self.in_flight and not server.idle and not (seconds and server.now() - started >= seconds):
                events = server.step()
                steps += 1
                if self.after_step is not None:
                    self.after_step(events)
                self._refill()
            timings = tuple(timing_of(each, self.refusals.get(each.index)) for each in self.sent)
            outputs = tuple(tuple(each.output) for each in self.sent)
            return LoadResult(self.load, payload, timings, outputs, server.now() - started, steps)
        finally:
            for request in () if server.idle else self.in_flight:
                server.cancel(request)
            while not server.idle:  # ends that were not told yet
                server.step()

    def _refill(self) -> None:
        """Sends a request for each one that ended, some of which end at once."""
        self.in_flight = [request for request in self.in_flight if request.finish is None]
        while self.waiting and len(self.in_flight) < self.load.concurrency:
            request = self.waiting.popleft()
            self.sent.append(request)
            try:
                self.server.submit(request)
            except InputError as error:
                self.refusals[request.index] = str(error)
            else:
                self.in_flight += [request] if request.finish is None else []


def _bounds(length: Length) -> tuple[int, int]:
    if isinstance(length, tuple):
        if len(length) != 2:
            raise InputError(f"a range of lengths is its lowest and highest, got {length}")
        return length
    return length, length


def _require_whole(name: str, value: object, lowest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise InputError(f"{name}={value!r}; give a whole number of at least {lowest}")
