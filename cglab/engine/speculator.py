"""Speculative decoding with a frozen-KV assistant: a seed step, a draft loop and a verify pass in each step (S0).

The assistant drafts from two things: the newest token of a request, which is not in the cache, and the target's hidden
state before it, which is kept here by request row, outside of every pool that a replay writes (B40). The target then
computes the newest token and all drafted ones at once. The host reads its choices in one copy, decides what to accept,
and what was accepted stays in the cache as if it had been decoded token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from cglab.engine.acceptance import AcceptLengths, committed, countable, greedy_path, pinned_path
from cglab.engine.batches import Chunk, DecodeBatch
from cglab.engine.inputs import on_device, step_inputs
from cglab.engine.phases import DraftPhases
from cglab.engine.requests import Request
from cglab.engine.segments import ForwardSegments
from cglab.engine.speculation import Speculation
from cglab.errors import InputError, ModelError
from cglab.models.assistant import Assistant
from cglab.models.decoder import Decoder
from cglab.models.draft_tree import Draft, parents, verify_inputs
from cglab.models.kv import PagedKV
from cglab.runners.base import Runner, window_inputs
from cglab.runners.seed_step import Drafted
from cglab.runners.verify import Verified


class Speculator:
    """Drafts, verifies and accepts for the requests of one engine.

    Args:
        model: the target.
        assistant: bound to it.
        kv: the target's cache, with a page table of ``speculation.lookahead`` positions beyond every request.
        phases: runners over all of them.
        speculation: sizes of a draft.

    Attributes:
        hidden: [rows, hidden_size], the target's normed hidden state at each request's last token in the cache.
        accepted: what became of all drafts so far.

    Raises:
        ModelError: if the assistant is not bound to this target.
    """

    def __init__(
        self, model: Decoder, assistant: Assistant, kv: PagedKV, phases: DraftPhases, speculation: Speculation
    ) -> None:
        if assistant.target is not model:
            raise ModelError("the assistant is bound to another target; bind it to the model that verifies")
        self.kv, self.phases, self.speculation = kv, phases, speculation
        rows, size = len(kv.full.page_table), model.config.hidden_size
        self.hidden = torch.zeros(rows, size, device=kv.device, dtype=model.rotary.dtype)
        self.accepted = AcceptLengths(speculation.pinned)
        self._draft_count = speculation.steps
        self._chain = list(range(-1, speculation.width - 1))

    @property
    def draft_count(self) -> int:
        """Drafted tokens of a path that count from now on, 0 to ``steps``; at 0 nothing is drafted."""
        return self._draft_count

    @draft_count.setter
    def draft_count(self, count: int) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= self.speculation.steps:
            raise InputError(f"draft_count is 0 to {self.speculation.steps}, got {count!r}")
        self._draft_count = count

    @property
    def runners(self) -> dict[str, Runner[int]]:
        """The runners in use, by technique."""
        seed = self.phases.seed_step()
        others: dict[str, Runner[int]] = {
            "draft_loop": self.phases.draft_loop(),
            "verify": self.phases.verify(),
        }
        return others if seed is None else {"seed_step": seed, **others}

    def prefilled(self, chunks: Sequence[Chunk], hidden: Tensor) -> None:
        """Keeps the hidden states that the next drafts start from: those of chunks that end their request.

        Args:
            chunks: what was computed, requests that ride along included.
            hidden: [tokens, hidden_size], the target's normed hidden states.
        """
        stops = accumulate(chunk.length for chunk in chunks)
        kept = [
            (stop - 1, chunk.request.row) for chunk, stop in zip(chunks, stops, strict=True) if chunk.last
        ]
        if kept:
            ends, rows = np.array(kept, np.int64).T
            self._keep(hidden, *on_device({"ends": ends, "rows": rows}, self.kv.device).values())

    def ended(self, requests: Sequence[Request]) -> None:
        """Notes which of a batch's requests have come to their end."""
        for request in requests:
            if request.finish in ("length", "stop"):
                self.accepted.completed(len(request.output), request.passes)

    @torch.no_grad()
    def step(self, batch: DecodeBatch, segments: ForwardSegments) -> list[list[int]]:
        """Drafts for every request, verifies, and accepts.

        Args:
            batch: its requests have pages for ``lookahead`` positions after their newest token, and page tables that
                say so.
            segments: where the device time of each forward is noted.

        Returns:
            The new tokens of each request, at least one; all but the last are in the cache.
        """
        requests, width = batch.requests, self.speculation.width
        chunks = [Chunk(request, request.computed, width, last=True) for request in requests]
        newest = {
            "newest": np.array([request.output[-1] for request in requests], np.int64),
            "cached": np.array([request.computed for request in requests], np.int64),
        }
        names = ("request_rows", "seq_lens", "out_slots", *window_inputs(self.kv))
        inputs = step_inputs(chunks, names, self.kv, newest)
        bonus, cached = inputs.pop("newest"), inputs.pop("cached")
        deepest = [self._deepest(request) for request in requests]
        if any(deepest):
            draft = self._draft(bonus, inputs["request_rows"], cached, segments)
        else:
            draft = self._nothing_drafted(bonus)
        told, hidden = self._verify(bonus, draft, inputs, segments)
        chosen, tokens = told[:2]
        followed = told[2] if len(told) > 2 else [self._chain] * len(requests)
        paths = [
            self._accept(*each) for each in zip(requests, deepest, chosen, tokens, followed, strict=True)
        ]
        self._settle(requests, paths, hidden)
        return [committed(*each) for each in zip(paths, chosen, tokens, strict=True)]

    def _deepest(self, request: Request) -> int:
        return self.draft_count if request.drafts is None else min(self.draft_count, request.drafts)

    def _draft(self, bonus: Tensor, rows: Tensor, cached: Tensor, segments: ForwardSegments) -> Draft:
        """Seed and loop; the assistant sees the tokens that are in the cache, the newest one not among them."""
        live, where = len(rows), {"request_rows": rows, "seq_lens": cached}
        start = {"input_ids": bonus, "hidden": self.hidden.index_select(0, rows)}
        seed = self.phases.seed_step()
        if seed is not None:
            with segments.timed("seed_step"):
                drafted: Drafted = seed.run(live, **start, **where)
            start = drafted._asdict()
        with segments.timed("draft_loop"):
            draft: Draft = self.phases.draft_loop().run(live, **start, **where)
            return draft

    def _nothing_drafted(self, bonus: Tensor) -> Draft:
        """A draft of placeholders: tokens 0, each candidate following an earlier one."""
        live, speculation, device = len(bonus), self.speculation, self.kv.device
        parent_list = torch.arange(-1, (speculation.steps - 1) * speculation.topk, device=device)
        nodes = torch.arange(speculation.lookahead, device=device)
        return Draft(*(row.expand(live, -1) for row in (parent_list, nodes, torch.zeros_like(nodes))))

    def _verify(
        self, bonus: Tensor, draft: Draft, inputs: dict[str, Tensor], segments: ForwardSegments
    ) -> tuple[list[list[list[int]]], Tensor]:
        """The target's pass, and the step's only copy to the host.

        Returns:
            For every request and node the target's choice, the token, and for trees the node that it follows; and
            hidden states [requests * width, hidden_size], which the next replay may overwrite.
        """
        live, topk = len(bonus), self.speculation.topk
        with segments.timed("verify"):
            # What the draft's runners hold may be overwritten by the replay; what is read after it is copied now.
            drafted = verify_inputs(bonus, draft, topk)
            followed = (
                [parents(draft.parent_list, draft.top_scores_index, topk).flatten()] if topk > 1 else []
            )
            verified: Verified = self.phases.verify().run(live, **drafted, **inputs)
            packed = torch.cat((verified.tokens, drafted["input_ids"], *followed))
        return packed.view(-1, live, self.speculation.width).tolist(), verified.hidden

    def _accept(
        self, request: Request, deepest: int, chosen: list[int], tokens: list[int], followed: list[int]
    ) -> list[int]:
        """The accepted nodes of one request, noted."""
        pinned, lookahead = self.speculation.pinned, self.speculation.lookahead
        if pinned is None:
            path = greedy_path(chosen, tokens, followed, deepest)
        else:
            path = pinned_path(pinned, request.passes, deepest)
        request.passes += 1
        proposed = lookahead if deepest == self.speculation.steps else countable(followed, deepest)
        self.accepted.verified(len(path), proposed, lookahead - proposed)
        return path

    def _settle(self, requests: Sequence[Request], paths: Sequence[list[int]], hidden: Tensor) -> None:
        """Keeps the hidden state of each last accepted node, and moves accepted tokens to their positions."""
        width, size = self.speculation.width, self.kv.page_size
        ends = [number * width + path[-1] for number, path in enumerate(paths)]
        columns = {"ends": ends, "rows": [request.row for request in requests]}
        moves = [
            (request, request.computed + node, request.computed + place)
            for request, path in zip(requests, paths, strict=True)
            for place, node in enumerate(path)
            if place != node
        ]
        slot_of = (Request.slot, Request.window_slot)[: len(self.kv.pools)]
        for number, slot in enumerate(slot_of if moves else ()):
            columns[f"from {number}"] = [slot(request, source, size) for request, source, _ in moves]
            columns[f"to {number}"] = [slot(request, target, size) for request, _, target in moves]
        end, row, *slots = on_device(
            {name: np.array(column, np.int64) for name, column in columns.items()}, self.kv.device
        ).values()
        self._keep(hidden, end, row)
        for pool, sources, targets in zip(self.kv.pools, slots[::2], slots[1::2], strict=False):
            pool.move(sources, targets)

    def _keep(self, hidden: Tensor, ends: Tensor, rows: Tensor) -> None:
        self.hidden.index_copy_(0, rows, hidden.index_select(0, ends))
