"""Fixed steps for measuring: one decode or prefill step that can be run over and over.

Repeating a step writes the same KV at the same slots, so every arm does the same work from the same state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cglab.engine.batches import Chunk
from cglab.engine.engine import Engine
from cglab.engine.inputs import spans_of, step_inputs, write_page_tables
from cglab.engine.requests import Request
from cglab.errors import InputError
from cglab.models.spans import Span
from cglab.runners.base import window_inputs
from cglab.runners.decode import INPUTS as DECODE_INPUTS
from cglab.runners.prefill import INPUTS as PREFILL_INPUTS


@dataclass(frozen=True)
class DecodeStep:
    """Inputs of one decode step.

    Attributes:
        live: requests.
        context: tokens of each in the cache, the new one included.
        inputs: tensors by slot name.
    """

    live: int
    context: int
    inputs: dict[str, Tensor]

    @property
    def rows(self) -> int:
        """Live rows along the bucket axis: requests."""
        return self.live

    @property
    def workload(self) -> dict[str, int]:
        """The size, as it is recorded."""
        return {"batch": self.live, "context": self.context}


@dataclass(frozen=True)
class PrefillStep:
    """Inputs of one prefill step.

    Attributes:
        live: the part of each request.
        inputs: tensors by slot name.
    """

    live: Sequence[Span]
    inputs: dict[str, Tensor]

    @property
    def rows(self) -> int:
        """Live rows along the bucket axis: tokens."""
        return sum(span.length for span in self.live)

    @property
    def workload(self) -> dict[str, int]:
        """The size, as it is recorded."""
        return {"tokens": self.rows, "cached": self.live[0].start, "requests": len(self.live)}


Step = DecodeStep | PrefillStep


@contextmanager
def steady_decode(
    engine: Engine, batch: int, context: int, *, seed: int = 0, compute: bool = True
) -> Iterator[DecodeStep]:
    """Admits ``batch`` requests with random prompts of ``context - 1`` tokens, prefills them, holds them.

    Args:
        engine: with enough free rows and pages.
        batch: live requests.
        context: length that attention sees in the step.
        seed: of the prompts.
        compute: compute the prompts; without, the step attends to what the cache held before, which takes as long
            and spares the prefill of long contexts.

    Raises:
        InputError: if they do not fit the cache, there is no request or no token before the new one, or the
            engine has requests of others.
    """
    _require_idle(engine)
    if batch < 1 or context < 2:
        raise InputError(f"a step needs batch >= 1 and context >= 2, got {batch} and {context}")
    if batch > engine.largest_batch:
        raise InputError(f"{batch} requests at once, the engine runs at most {engine.largest_batch}")
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, context - 1)
    prompts = torch.randint(0, engine.model.config.vocab_size, shape, generator=generator).tolist()
    requests = [Request(index, prompt, 1) for index, prompt in enumerate(prompts)]
    policy = engine.scheduler.options
    engine.flush_cache()
    try:
        # Nobody rides along: the first requests would have their next token before the last prompt is computed.
        engine.scheduler.options = replace(policy, mixed=False)
        for request in requests:
            engine.submit(request)
            request.limit = 2  # the step's own token is never kept, so it needs no room
        while not all(request.decoding for request in requests):
            if compute:
                engine.step()
            else:
                _skip(engine)
            if any(request.finish or request.preemptions for request in requests):
                raise InputError(
                    f"{batch} requests of {context} tokens do not fit into the cache together; "
                    "take fewer or shorter ones, or give it more pages"
                )
        names = DECODE_INPUTS + window_inputs(engine.kv)
        yield DecodeStep(batch, context, step_inputs(_planned(engine), names, engine.kv))
    finally:
        engine.scheduler.options = policy
        engine.abandon(requests)
        if not compute:
            engine.flush_cache()  # pages that pass for prefixes and were never computed


def _skip(engine: Engine) -> None:
    """Plans a batch and books it as computed, with token 0."""
    if (planned := engine.plan()) is not None:
        ends = sum(chunk.last for chunk in planned.chunks)
        engine.scheduler.commit(planned, [[0]] * ends, engine.now())


@contextmanager
def steady_prefill(
    engine: Engine, tokens: int, cached: int = 0, requests: int = 1, *, seed: int = 0
) -> Iterator[PrefillStep]:
    """Computes ``cached`` random tokens of each request and holds the step of the next ones.

    Args:
        engine: with enough free rows and pages.
        tokens: new tokens of the step, split evenly over its requests.
        cached: tokens of each request that are in the cache before; whole pages.
        requests: how many share the step.
        seed: of the prompts.

    Raises:
        InputError: if they do not fit the cache or a step, cannot be split so, or the engine has requests of others.
    """
    _require_idle(engine)
    budget, page = engine.scheduler.options.token_budget, engine.kv.page_size
    if requests < 1 or tokens < requests or tokens % requests or cached < 0 or cached % page:
        raise InputError(
            f"{tokens} tokens of {requests} requests after {cached} cached ones: give whole tokens for each "
            f"request, and cached tokens in pages of {page}"
        )
    if tokens > budget:
        raise InputError(f"{tokens} tokens are more than a step's budget of {budget}; open the lab with more")
    generator = torch.Generator().manual_seed(seed)
    shape = (requests, cached + tokens // requests)
    prompts = torch.randint(0, engine.model.config.vocab_size, shape, generator=generator).tolist()
    waiting = [Request(index, prompt, 1) for index, prompt in enumerate(prompts)]
    engine.flush_cache()
    try:
        if cached:
            known = (
                cached + engine.scheduler.memory.layout.overlap
            )  # tokens by which the cached pages are found
            list(engine.stream([Request(r.index, r.prompt[:known], 1) for r in waiting]))
        for request in waiting:
            engine.submit(request)
        chunks = _planned(engine)
        spans = spans_of(chunks)
        if [(span.start, span.length) for span in spans] != [(cached, tokens // requests)] * requests:
            raise InputError(
                f"{requests} requests of {shape[1]} tokens, {cached} of them cached, do not make one step "
                f"({engine.scheduler.prefix_reuse_reason or 'the cache is too small'}); take fewer or shorter ones"
            )
        names = PREFILL_INPUTS + window_inputs(engine.kv)
        yield PrefillStep(spans, step_inputs(chunks, names, engine.kv))
    finally:
        engine.abandon(waiting)


def _require_idle(engine: Engine) -> None:
    """Requests of others would be part of the step, lose their tokens to it, and end with it."""
    if not engine.idle:
        raise InputError("other requests are in flight; let them end before a step is measured")


def _planned(engine: Engine) -> tuple[Chunk, ...]:
    """The next batch's chunks, with their page tables on the device; it stays in flight."""
    batch = engine.plan()
    if batch is None:
        return ()
    write_page_tables(engine.kv, batch.requests)
    return batch.chunks
