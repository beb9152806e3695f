"""Continuous batching without a device: which requests run next, on which tokens, and who must give way.

Prefill goes first, as in SGLang: prompts are computed in chunks under one token budget for the whole batch, in order
of arrival; otherwise everybody decodes one step, which may yield several tokens of each. When KV runs out, cached
pages that nobody holds are evicted, then the youngest request gives way: it returns to the front of the queue, and its
tokens so far are its prompt when it comes back (preemption by recompute). A request only ever takes memory from
younger ones; the youngest itself waits. So the oldest always advances and everyone ends. The schedule is a function of
tokens and of the order of calls; times are only noted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cglab.engine.batches import Batch, Chunk, DecodeBatch, PrefillBatch, SchedulerOptions
from cglab.engine.host_pages import HostPages
from cglab.engine.memory import CacheLayout, RequestMemory
from cglab.engine.requests import Event, Request
from cglab.errors import AccountingError, InputError


class Scheduler:
    """Turns requests into batches: ``add``, then ``plan`` and ``commit`` in turns until ``idle``.

    Args:
        layout: sizes of the KV cache.
        options: budget and policy.
        host: where evicted pages of prefixes go; None forgets them.

    Attributes:
        waiting: not admitted yet, or preempted; in order of arrival.
        running: hold a row and pages; in order of arrival, all older than those that wait.
        in_flight: the batch that was planned and is neither committed nor failed.
        memory: who holds which row and pages.
        prefix_reuse_reason: why there is no prefix reuse; None if there is.

    Raises:
        InputError: if the window pool cannot hold a window and a chunk of ``token_budget``.
    """

    def __init__(self, layout: CacheLayout, options: SchedulerOptions, host: HostPages | None = None) -> None:
        self.options = options
        self.prefix_reuse_reason: str | None = None
        if not options.prefix_reuse:
            self.prefix_reuse_reason = "switched off by prefix_reuse=False"
        elif layout.window is not None:
            self.prefix_reuse_reason = (
                f"sliding-window layers keep only the last {layout.window} tokens, so a cached prefix would "
                "lack their keys and values"
            )
        self.memory = RequestMemory(
            layout, options.token_budget, prefix_reuse=self.prefix_reuse_reason is None, host=host
        )
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.max_running = min(options.max_running or layout.rows, layout.rows - 1)
        self.in_flight: Batch | None = None
        self._overtaken = 0  # requests admitted since those that decode last ran

    @property
    def idle(self) -> bool:
        """Nobody waits and nobody runs."""
        return not self.waiting and not self.running

    def add(self, request: Request, now: float) -> Event | None:
        """Puts a request at the end of the queue.

        Args:
            request: a new one.
            now: the caller's clock, in seconds.

        Returns:
            The end of a request that wants no token; it never waits.

        Raises:
            InputError: if it can never run: no prompt, a negative limit, more tokens than the cache holds.
        """
        room, total = self.memory.layout.room, len(request.prompt) + request.limit
        if request.arrived_at is not None:
            raise InputError(f"request {request.index} was added before; make a new one")
        if not request.prompt:
            raise InputError(f"prompt {request.index} is empty; give at least one token")
        if request.limit < 0:
            raise InputError(f"request {request.index} may add {request.limit} tokens; give 0 or more")
        if total > room:
            ahead = self.memory.layout.lookahead
            raise InputError(
                f"prompt {request.index} has {len(request.prompt)} tokens and may add {request.limit}: {total} "
                f"do not fit into a context of {room}{f' ({ahead} more are kept for drafts)' if ahead else ''}; "
                "shorten it, or give the cache more pages or max_context"
            )
        request.arrived_at = now
        if not request.limit:
            request.end("length", now)
            return Event(request, None, now, request.finish)
        self.waiting.append(request)
        return None

    def cancel(self, request: Request, now: float) -> Event | None:
        """Ends a request that waits or runs; its memory is free at once, or at the commit of a batch in flight.

        Returns:
            Its end; None if it had ended before.

        Raises:
            InputError: if it was never added here.
        """
        if request.finish is not None:
            return None
        if request in self.waiting:
            self.waiting.remove(request)
        elif request not in self.running:
            raise InputError(f"request {request.index} is not known here; add it before")
        elif self.in_flight is None or request not in self.in_flight.requests:
            self._leave(request)
        request.end("cancelled", now)
        return Event(request, None, now, request.finish)

    def plan(self, now: float) -> Batch | None:
        """Decides what runs next; the batch is then computed and committed.

        Returns:
            Chunks of prompts, or one decode step; None only if ``idle``.

        Raises:
            InputError: if the batch before was neither committed nor failed.
        """
        if self.in_flight is not None:
            raise InputError("the batch planned before is in flight; commit it, or tell that it failed")
        mixed = self.options.mixed
        if mixed or not any(request.decoding for request in self.running):
            self._overtaken = 0
        riders = self._decoders() if mixed else []
        if chunks := self._chunks(self.options.token_budget - len(riders), now):
            riding = (Chunk(request, request.computed, 1, last=True) for request in riders)
            self.in_flight = PrefillBatch((*riding, *chunks))
        elif decoders := self._decoders():
            self.in_flight = DecodeBatch(tuple(decoders))
            self._overtaken = 0
        return self.in_flight

    def commit(self, batch: Batch, tokens: Sequence[Sequence[int]], now: float) -> list[Event]:
        """Takes what a batch computed.

        Args:
            batch: the one in flight.
            tokens: the next tokens of each chunk with ``last``, or of each request of a decode batch, in order: one,
                and after a decode step up to ``lookahead`` more, of which all but the last are in the cache. Those
                after a request's limit or stop token are dropped.
            now: the caller's clock, in seconds.

        Returns:
            The tokens of those requests, the last one with its end where it ended.

        Raises:
            InputError: if the batch is not in flight or the number of tokens is another; nothing was changed.
        """
        chunks = batch.chunks
        wanted = sum(chunk.last for chunk in chunks)
        if len(tokens) != wanted:
            raise InputError(
                f"tokens of {len(tokens)} chunks for a batch that yields {wanted}; give some for each"
            )
        most = 1 + self.memory.layout.lookahead * isinstance(batch, DecodeBatch)
        if wrong := [len(new) for new in tokens if not 1 <= len(new) <= most]:
            raise InputError(f"{wrong[0]} tokens of one request in a batch that yields 1 to {most} of each")
        self._land(batch)
        events, drawn = [], iter(tokens)
        for chunk in chunks:
            request, new = chunk.request, next(drawn) if chunk.last else ()
            if request.finish is None:
                # Accepted first: a page that they fill is published under them.
                taken = request.accept(new, now)
                self.memory.advance(request, chunk.length + max(taken - 1, 0))
                ends = [None] * (taken - 1) + [request.finish]
                events += [Event(request, token, now, end) for token, end in zip(new, ends, strict=False)]
            if request.finish is not None:
                self._leave(request)
        return events

    def fail(self, batch: Batch, now: float) -> list[Event]:
        """Ends the requests of a batch that could not be computed, as "error"; nothing of it is cached.

        Raises:
            InputError: if the batch is not in flight.
        """
        self._land(batch)
        events = []
        for request in batch.requests:
            if request.finish is None:
                request.end("error", now)
                events.append(Event(request, None, now, request.finish))
            self._leave(request)
        return events

    def check_invariants(self) -> None:
        """Compares every book with every request.

        Raises:
            AccountingError: if a row or page leaked, has two owners, or a request is out of place.
        """
        self.memory.check(self.running)
        if len(self.running) > self.max_running:
            raise AccountingError(f"{len(self.running)} requests run, {self.max_running} may")
        for request in self.waiting:
            if request.row or request.pages or request.window_pages or request.finish:
                raise AccountingError(f"request {request.index} waits and holds memory, or has ended")

    def _decoders(self) -> list[Request]:
        """Requests that can decode now, oldest first, each with pages for its newest token and what is drafted."""
        return [
            request
            for request in list(self.running)  # those that give way decode no longer
            if request.decoding and self._grow(request)
        ]

    def _chunks(self, budget: int, now: float) -> list[Chunk]:
        """Chunks of prompts under the budget: the one that was begun, then new requests.

        Only the youngest can be in the middle of its prompt: whoever has budget left after an older one's
        chunk comes after the end of that one's prompt.
        """
        begun = [request for request in self.running[-1:] if not request.decoding]
        chunks: list[Chunk] = []
        while budget > 0 and (request := begun.pop() if begun else self._admit(now)):
            length = min(budget, request.length - request.computed)
            end = request.computed + length
            if not self.memory.grow(request, end):
                break  # there is nobody younger to give way; what comes free is for it, not for new ones
            chunks.append(Chunk(request, request.computed, length, last=end == request.length))
            budget -= length
        return chunks

    def _admit(self, now: float) -> Request | None:
        """Lets the oldest waiting request in, if its tokens fit and leave a step's pages for each that runs.

        At most ``max_running`` overtake those that decode: an endless row of requests that end with their
        first token would otherwise hold up decoding for ever.
        """
        if not self.waiting or max(len(self.running), self._overtaken) >= self.max_running:
            return None
        if not self.memory.admit(self.waiting[0], spare=len(self.running) * self.memory.layout.step_pages):
            return None
        request = self.waiting.popleft()
        self.running.append(request)
        self._overtaken += 1
        if request.admitted_at is None:
            request.admitted_at = now
        return request

    def _grow(self, request: Request) -> bool:
        """Pages for a decode step, at the cost of younger requests; False if it must wait itself."""
        while not self.memory.grow(request, request.length + self.memory.layout.lookahead):
            youngest = self.running[-1]
            if youngest is request:
                return False
            self._leave(youngest)
            youngest.preemptions += 1
            self.waiting.appendleft(youngest)
        return True

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.memory.release(request)

    def _land(self, batch: Batch) -> None:
        if batch is not self.in_flight:
            raise InputError("this batch is not in flight; commit the one that was planned last, once")
        self.in_flight = None
