"""Continuous batching over one cache: plan a batch, compute it on the runner of its phase, sample, stream.

Small on purpose: it is the bench for the captures, not a server. Who runs next is the scheduler's business and knows
no device; what a step computes is a runner's. In between there is one step: page tables that changed are written,
inputs are copied to the device, the runner replays (or runs eager, with its reason), and the tokens come back. A
speculator makes of a decode step several runners' and brings back several tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cglab.engine.batches import Batch, DecodeBatch, PrefillBatch, SchedulerOptions
from cglab.engine.cache import layout_of
from cglab.engine.generation import Generation, StepRecord, requests_of, timings_of
from cglab.engine.host_tier import HostTier
from cglab.engine.inputs import next_tokens, spans_of, step_inputs, write_page_tables
from cglab.engine.phases import Forward, Phases
from cglab.engine.requests import GREEDY, Event, Request, Sampling, check_request, listed
from cglab.engine.scheduler import Scheduler
from cglab.engine.segments import ForwardSegments
from cglab.engine.speculator import Speculator
from cglab.engine.weights import KnownWeights
from cglab.errors import InputError
from cglab.graphs.clocks import clock_for
from cglab.graphs.coverage import Coverage
from cglab.models.decoder import Decoder
from cglab.models.kv import PagedKV
from cglab.runners.base import Runner, coverages


class Engine:
    """Runs requests of one model over one cache.

    Args:
        model: the decoder.
        kv: its cache; row 0 and page 0 stay reserved.
        phases: runners over both.
        options: the scheduler's.
        speculator: decodes by drafting and verifying; None decodes token by token.
        host: memory of the host for prefixes that leave the cache; None forgets them.

    Attributes:
        scheduler: who waits, runs, and holds which pages.
        segments: device time of every forward, for forward occupancy.

    Raises:
        InputError: for host memory where no prefix is kept.
    """

    def __init__(
        self,
        model: Decoder,
        kv: PagedKV,
        phases: Phases,
        options: SchedulerOptions,
        speculator: Speculator | None = None,
        host: HostTier | None = None,
    ) -> None:
        self.model, self.kv, self.phases, self.speculator = model, kv, phases, speculator
        self.host = host
        self.max_context = min(len(kv.context_positions), model.config.max_position)
        lookahead = speculator.speculation.lookahead if speculator else 0
        overlap = speculator.drafter.overlap if speculator else 0
        layout = layout_of(kv, self.max_context, lookahead, overlap)
        self.scheduler = Scheduler(layout, options, host.books if host else None)
        if host and self.scheduler.prefix_reuse_reason:
            raise InputError(
                f"host memory is for prefixes, and none is kept: {self.scheduler.prefix_reuse_reason}; do without it"
            )
        self.now: Callable[[], float] = time.perf_counter
        self.segments = ForwardSegments(clock_for(kv.device), now=self.now)
        self._weights = KnownWeights(model)
        self._watchers: list[list[StepRecord]] = []
        self._ended: list[Event] = []

    @property
    def idle(self) -> bool:
        """No request waits or runs, and every event was handed out."""
        return self.scheduler.idle and not self._ended

    @property
    def largest_batch(self) -> int:
        """Most requests that run at a time."""
        return self.scheduler.max_running

    def submit(self, request: Request) -> None:
        """Queues a request; its events come out of ``step``.

        Raises:
            InputError: for unknown token ids, a temperature with speculative decoding, or a request that can never
                run.
        """
        check_request(request)
        if self.speculator and request.sampling.temperature:
            raise InputError(
                f"prompt {request.index} is sampled at temperature {request.sampling.temperature:g}, and drafts are "
                "accepted greedily; give temperature 0, or open the model without a draft"
            )
        vocabulary = self.model.config.vocab_size
        if request.prompt and not (min(request.prompt) >= 0 and max(request.prompt) < vocabulary):
            raise InputError(
                f"prompt {request.index} has token ids outside of 0 to {vocabulary - 1}; "
                "encode it with this model's tokenizer"
            )
        if self.idle:
            self._forget_other_weights(thorough=False)
        event = self.scheduler.add(request, self.now())
        if event is not None:
            self._ended.append(event)

    def _forget_other_weights(self, *, thorough: bool) -> None:
        """Cached prefixes were computed with the weights of then: with others they would be wrong without a word."""
        if self.scheduler.prefix_reuse_reason is None and self._weights.changed(thorough=thorough):
            self.flush_cache()

    def cancel(self, request: Request) -> None:
        """Ends a request early; that too is an event of the next step. Nothing happens to one that has ended."""
        event = self.scheduler.cancel(request, self.now())
        if event is not None:
            self._ended.append(event)

    def abandon(self, requests: Sequence[Request]) -> None:
        """Ends requests without a word: a batch in flight fails, the rest is cancelled, events are dropped."""
        if self.scheduler.in_flight is not None:
            self.scheduler.fail(self.scheduler.in_flight, self.now())
        for request in requests:
            if request in self.scheduler.running or request in self.scheduler.waiting:
                self.scheduler.cancel(request, self.now())
        self._ended.clear()

    @contextmanager
    def watched(self) -> Iterator[list[StepRecord]]:
        """Within, every step that was computed is noted in the list."""
        steps: list[StepRecord] = []
        self._watchers.append(steps)
        try:
            yield steps
        finally:
            self._watchers = [watcher for watcher in self._watchers if watcher is not steps]

    def flush_cache(self) -> None:
        """Forgets the prefixes of requests that have ended, in host memory too."""
        self.scheduler.memory.pages.forget()

    def plan(self) -> Batch | None:
        """Decides what runs next, and copies what that moves between the device and host memory.

        Returns:
            As ``Scheduler.plan``.

        Raises:
            Exception: what a copy raised; the batch has failed then, and no prefix is left.
        """
        batch = self.scheduler.plan(self.now())
        if self.host is not None:
            try:
                self.host.move()
            except BaseException:
                self._fail(batch)
                raise
        return batch

    def _fail(self, batch: Batch | None) -> None:
        """Ends a batch; what should have come back from host memory for it may not have come."""
        if batch is not None:
            self._ended += self.scheduler.fail(batch, self.now())
        if self.host is not None:
            self.flush_cache()

    def step(self) -> list[Event]:
        """Computes one batch.

        Returns:
            Tokens and ends since the last call, this batch's last.

        Raises:
            Exception: what the batch raised; its requests have ended as "error" then, the others go on.
        """
        started = self.now()
        batch = self.plan()
        if batch is not None:
            try:
                tokens = self.compute(batch)
            except BaseException:
                self._fail(batch)
                raise
            now = self.now()
            kind = "decode" if isinstance(batch, DecodeBatch) else "prefill"
            record = StepRecord(kind, len(batch.requests), batch.tokens, now - started)
            for watcher in self._watchers:
                watcher.append(record)
            self._ended += self.scheduler.commit(batch, tokens, now)
            if self.speculator:
                self.speculator.ended(batch.requests)
        events, self._ended = self._ended, []
        return events

    def compute(self, batch: Batch) -> list[list[int]]:
        """The next tokens of every chunk that reaches its request's end."""
        if self.speculator and isinstance(batch, DecodeBatch):
            write_page_tables(self.kv, batch.requests)
            return self.speculator.step(batch, self.segments)
        computed = self.forward(batch)
        tokens = [[int(token)] for token in computed.tokens.tolist()]
        if self.speculator and computed.hidden is not None:  # the tokens are out already, as in S3
            self.speculator.drafter.prefilled(batch.chunks, computed.hidden, tokens, self.segments)
        return tokens

    @torch.no_grad()
    def forward(self, batch: Batch) -> Forward:
        """Runs a batch on the runner of its phase, without a draft."""
        write_page_tables(self.kv, batch.requests)
        if isinstance(batch, PrefillBatch):
            return self._prefill(batch)
        runner = self.phases.decode(sampling=any(r.sampling.temperature for r in batch.requests))
        inputs = step_inputs(batch.chunks, runner.inputs, self.kv)
        with self.segments.timed("decode"):
            tokens, logits = runner.run(len(batch.requests), **inputs)
        return Forward(tokens, logits)

    def _prefill(self, batch: PrefillBatch) -> Forward:
        runner, spans = self.phases.prefill(), spans_of(batch.chunks)
        inputs = step_inputs(batch.chunks, runner.inputs, self.kv)
        ending = [index for index, chunk in enumerate(batch.chunks) if chunk.last]
        with self.segments.timed("prefill"):
            hidden = runner.run(spans, **inputs)
            logits = runner.last_logits(hidden, spans, ending)
            tokens = next_tokens([batch.chunks[index] for index in ending], logits, self.kv)
        return Forward(tokens, logits, hidden)

    def stream(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Runs requests to their end; whatever stops that early cancels the rest.

        Raises:
            InputError: if others are in flight, or for a request that can never run: nothing has run then.
        """
        if not self.idle:
            raise InputError("other requests are in flight; let them end, or submit these and call step")
        requests = listed(requests)
        self._forget_other_weights(thorough=True)
        try:
            for request in requests:
                self.submit(request)
            # Not until idle: while the caller looked at the last event, others may have come.
            while self._ended or any(request.finish is None for request in requests):
                yield from self.step()
        finally:
            self.abandon(requests)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        *,
        sampling: Sampling = GREEDY,
        stops: Sequence[int] = (),
        decode: Callable[[list[int]], str] | None = None,
    ) -> Generation:
        """Continuations of token-id prompts.

        Args:
            prompts: token ids of each prompt.
            max_new_tokens: limit for all, or one for each.
            sampling: greedy, or a temperature and the seed of the first prompt; each prompt after it has the next.
            stops: token ids that end a request; the stop token is kept in the output.
            decode: turns token ids into text.

        Raises:
            InputError: for requests that can never run.
        """
        requests = requests_of(prompts, max_new_tokens, sampling, stops)
        runners: dict[str, Runner[Any]] = {"prefill": self.phases.prefill()}
        drafting = self.speculator.runners if self.speculator else {}
        runners |= drafting
        if not drafting:
            runners["decode"] = self.phases.decode(sampling=sampling.temperature > 0)
        before = coverages(runners)
        drafted = self.speculator.accepted.copy() if self.speculator else None
        started = self.now()
        with self.watched() as steps:
            list(self.stream(requests))
        coverage = {name: counts - before[name] for name, counts in coverages(runners).items()}
        return Generation(
            [decode(r.output) if decode else "" for r in requests],
            [r.output for r in requests],
            [r.finish or "length" for r in requests],
            timings_of(requests, steps, started, self.now()),
            coverage.get("decode", Coverage()),
            coverage["prefill"],
            self.speculator.accepted - drafted if self.speculator and drafted else None,
            {name: coverage[name] for name in coverages(drafting)},
        )  # fmt: skip
