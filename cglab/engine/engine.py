"""Greedy generation for a batch of prompts: admit, prefill, decode step by step, let requests go as they end.

Small on purpose: it is the bench for the captures. A request is admitted when a row and all pages that it can ever
need are free, so nothing runs out in mid-flight; the rest wait in order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cglab.engine.allocator import FreeList
from cglab.engine.requests import Generation, Request, Timings
from cglab.errors import InputError
from cglab.models.attention import LiveSpans, PrefillAttention, Span
from cglab.models.decoder import Decoder
from cglab.models.kv import PagedKV
from cglab.runners.decode import INPUTS, DecodeRunner

Step = Callable[[int, dict[str, Tensor]], Tensor]


class Engine:
    """Runs requests of one model over one cache.

    Args:
        model: the decoder.
        kv: its cache; row 0 and page 0 stay reserved.
        device: where they live.
    """

    def __init__(self, model: Decoder, kv: PagedKV, device: torch.device) -> None:
        self.model, self.kv, self.device = model, kv, device
        self.rows = FreeList(kv.page_table.shape[0], "request rows")
        self.pages = FreeList(kv.keys.shape[1] // kv.page_size, "KV pages")
        self.max_context = min(kv.page_table.shape[1] * kv.page_size, model.config.max_position)

    def check(self, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        """Refuses what can never run.

        Args:
            prompts: token ids.
            limits: most new tokens of each.

        Raises:
            InputError: for an empty prompt, unknown token ids, or a request longer than the cache.
        """
        if len(limits) != len(prompts):
            raise InputError(
                f"{len(limits)} limits for {len(prompts)} prompts; give one for each, or one for all"
            )
        vocabulary = self.model.config.vocab_size
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            if not isinstance(limit, int) or limit < 1:
                raise InputError(f"max_new_tokens must be a whole number of at least 1, got {limit!r}")
            if not len(prompt):
                raise InputError(f"prompt {index} is empty; give at least one token")
            if min(prompt) < 0 or max(prompt) >= vocabulary:
                raise InputError(f"prompt {index} has token ids outside of 0 to {vocabulary - 1}")
            total = len(prompt) + limit
            room = min(self.max_context, self.pages.total * self.kv.page_size)
            if total > room:
                raise InputError(
                    f"prompt {index} has {len(prompt)} tokens and may add {limit}: {total} do not fit "
                    f"into a context of {room}; shorten it, or open the lab with a larger max_context"
                )

    def admit(self, request: Request) -> bool:
        """Gives a request its row and pages, if there are enough."""
        needed = -(-(len(request.prompt) + request.limit) // self.kv.page_size)
        if not self.rows.free or self.pages.free < needed:
            return False
        (request.row,) = self.rows.take()
        request.pages = self.pages.take(needed)
        row = torch.zeros(self.kv.page_table.shape[1], dtype=torch.int64)
        row[:needed] = torch.tensor(request.pages)
        self.kv.page_table[request.row].copy_(row)
        return True

    def release(self, request: Request) -> None:
        """Takes row and pages back."""
        if request.row:
            self.kv.page_table[request.row].zero_()
            self.rows.give([request.row])
            self.pages.give(request.pages)
            request.row, request.pages = 0, []

    @torch.no_grad()
    def prefill(self, request: Request) -> Tensor:
        """Computes a prompt, eager; returns the logits after its last token, [vocabulary]."""
        length, size = len(request.prompt), self.kv.page_size
        slots = [request.slot(i, size) for i in range(length)]
        packed = torch.from_numpy(np.array([request.prompt, range(length), slots], dtype=np.int64)).to(
            self.device
        )
        attention = PrefillAttention(
            self.kv, out_slots=packed[2], live=LiveSpans([Span(request.row, 0, length)])
        )
        hidden = self.model(packed[0], packed[1], attention)
        logits: Tensor = self.model.logits(hidden[-1:])[0]
        return logits

    def decode_inputs(self, running: Sequence[Request]) -> dict[str, Tensor]:
        """The inputs of one decode step: the last token of each request, which is not in the cache yet."""
        size = self.kv.page_size
        rows = [
            [r.output[-1] for r in running],
            [r.length - 1 for r in running],
            [r.slot(r.length - 1, size) for r in running],
            [r.row for r in running],
            [r.length for r in running],
        ]
        packed = torch.from_numpy(np.array(rows, dtype=np.int64)).to(self.device)  # one copy to the device
        return dict(zip(INPUTS, packed.unbind(0), strict=True))

    def stream(
        self, requests: Sequence[Request], step: Step, clock: Callable[[], float]
    ) -> Iterator[tuple[float, int]]:
        """Runs requests to their end; yields seconds and live requests of every decode step."""
        waiting = deque(requests)
        running: list[Request] = []
        try:
            while waiting or running:
                while waiting and self.admit(waiting[0]):
                    request = waiting.popleft()
                    running.append(request)
                    request.accept(int(self.prefill(request).argmax()), clock())
                running = self._drop_finished(running)
                if not running:
                    continue
                started = clock()
                tokens = step(len(running), self.decode_inputs(running)).tolist()
                now = clock()
                for request, token in zip(running, tokens, strict=True):
                    request.accept(token, now)
                yield now - started, len(running)
                running = self._drop_finished(running)
        finally:
            for request in requests:
                self.release(request)

    def _drop_finished(self, running: list[Request]) -> list[Request]:
        for request in running:
            if request.finish is not None:
                self.release(request)
        return [request for request in running if request.finish is None]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        runner: DecodeRunner,
        *,
        stops: Sequence[int] = (),
        decode: Callable[[list[int]], str] | None = None,
    ) -> Generation:
        """Greedy continuations of token-id prompts.

        Args:
            prompts: token ids of each prompt.
            max_new_tokens: limit for all, or one for each.
            runner: what a decode step runs on.
            stops: token ids that end a request; the stop token is kept in the output.
            decode: turns token ids into text.

        Raises:
            InputError: for requests that can never run.
        """
        each = isinstance(max_new_tokens, Sequence) and not isinstance(max_new_tokens, str)
        limits: list[Any] = list(max_new_tokens) if each else [max_new_tokens] * len(prompts)  # type: ignore[arg-type]
        self.check(prompts, limits)
        requests = [
            Request(i, list(p), limit, stops=frozenset(stops))
            for i, (p, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        before = runner.coverage().copy()
        started = time.perf_counter()

        def clock() -> float:
            return time.perf_counter() - started

        steps = list(self.stream(requests, lambda live, inputs: runner.run(live, **inputs)[0], clock))
        return Generation(
            [decode(r.output) if decode else "" for r in requests],
            [r.output for r in requests],
            [r.finish or "length" for r in requests],
            Timings(
                clock(), [s for s, _ in steps], [n for _, n in steps],
                [r.first_token_at or 0.0 for r in requests], [r.finished_at or 0.0 for r in requests],
            ),
            runner.coverage() - before,
        )  # fmt: skip
