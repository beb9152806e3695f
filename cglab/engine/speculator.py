"""Speculative decoding: a draft and a verify pass in each step, whoever drafts (S0, S4).

A drafter proposes tokens after the newest one of each request, which is not in the cache. The target then computes that
one and all drafted ones at once. The host reads its choices in one copy, decides what to accept, and what was accepted
stays in the cache as if it had been decoded token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cglab.engine.acceptance import AcceptLengths, committed, countable, greedy_path, pinned_path
from cglab.engine.batches import Chunk, DecodeBatch
from cglab.engine.inputs import on_device, step_inputs
from cglab.engine.phases import VerifyPhases
from cglab.engine.proposals import Drafter, Pass, Proposal
from cglab.engine.requests import Request
from cglab.engine.segments import ForwardSegments
from cglab.engine.speculation import Speculation
from cglab.errors import InputError, ModelError
from cglab.models.decoder import Decoder
from cglab.models.draft_tree import after_newest, parents
from cglab.models.kv import PagedKV
from cglab.runners.base import Runner, window_inputs
from cglab.runners.verify import Verified


class Speculator:
    """Drafts, verifies and accepts for the requests of one engine.

    Args:
        model: the target.
        drafter: proposes its tokens.
        kv: the target's cache, with a page table of ``speculation.lookahead`` positions beyond every request.
        phases: runners over both.
        speculation: sizes of a draft.

    Attributes:
        accepted: what became of all drafts so far.

    Raises:
        ModelError: if the drafter's model is not bound to this target.
    """

    def __init__(
        self, model: Decoder, drafter: Drafter, kv: PagedKV, phases: VerifyPhases, speculation: Speculation
    ) -> None:
        if drafter.target is not model:
            raise ModelError("the draft is bound to another target; bind it to the model that verifies")
        self.drafter, self.kv, self.phases, self.speculation = drafter, kv, phases, speculation
        self.accepted = AcceptLengths(speculation.pinned)
        self._where = ("request_rows", "seq_lens", "out_slots", *window_inputs(kv))
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
    def runners(self) -> dict[str, Runner[Any]]:
        """The runners in use, by technique."""
        return {**self.drafter.runners, "verify": self.phases.verify()}

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
        requests = batch.requests
        inputs = self.inputs(requests)
        deepest = [self._deepest(request) for request in requests]
        drafted = any(deepest)
        proposal = self.drafter.draft(inputs, segments) if drafted else self._placeholders(len(requests))
        told, verified = self._verify(proposal, inputs, segments)
        chosen, tokens = told[:2]
        followed = told[2] if len(told) > 2 else [self._chain] * len(requests)
        paths = [
            self._accept(*each) for each in zip(requests, deepest, chosen, tokens, followed, strict=True)
        ]
        new = [committed(*each) for each in zip(paths, chosen, tokens, strict=True)]
        self._move(requests, paths)
        self.drafter.passed(Pass(requests, paths, new, verified), segments)
        return new

    def inputs(self, requests: Sequence[Request]) -> dict[str, Tensor]:
        """What a step starts from; see ``Drafter.draft``."""
        chunks = [Chunk(request, request.computed, self.speculation.width, last=True) for request in requests]
        beside = {
            "newest": np.array([request.output[-1] for request in requests], np.int64),
            "cached": np.array([request.computed for request in requests], np.int64),
        }
        return step_inputs(chunks, self._where, self.kv, beside)

    def verify_inputs(self, proposal: Proposal, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the verify runner is given."""
        tokens = after_newest(inputs["newest"], proposal.tokens)
        where = {name: inputs[name] for name in self._where}
        return {"input_ids": tokens, **where, **proposal.tree}

    def _deepest(self, request: Request) -> int:
        return self.draft_count if request.drafts is None else min(self.draft_count, request.drafts)

    def _placeholders(self, live: int) -> Proposal:
        """Tokens 0, each candidate following an earlier one."""
        speculation, device = self.speculation, self.kv.device
        nodes = torch.arange(speculation.lookahead, device=device).expand(live, -1)
        if speculation.topk == 1:
            return Proposal(torch.zeros_like(nodes), {})
        followed = torch.arange(-1, (speculation.steps - 1) * speculation.topk, device=device)
        tree = {"parent_list": followed.expand(live, -1), "top_scores_index": nodes}
        return Proposal(torch.zeros_like(nodes), tree)

    def _verify(
        self, proposal: Proposal, inputs: Mapping[str, Tensor], segments: ForwardSegments
    ) -> tuple[list[list[list[int]]], Verified]:
        """The target's pass, and the step's only copy to the host.

        Returns:
            For every request and node the target's choice, the token, and for trees the node that it follows; and
            what the pass handed out, which the next replay may overwrite.
        """
        live, tree = len(inputs["newest"]), proposal.tree
        with segments.timed("verify"):
            given = self.verify_inputs(proposal, inputs)
            followed = [parents(**tree, topk=self.speculation.topk).flatten()] if tree else []
            verified: Verified = self.phases.verify().run(live, **given)
            packed = torch.cat((verified.tokens, given["input_ids"], *followed))
        return packed.view(-1, live, self.speculation.width).tolist(), verified

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

    def _move(self, requests: Sequence[Request], paths: Sequence[list[int]]) -> None:
        """Moves accepted tokens to their positions: of a tree they may lie apart."""
        size = self.kv.page_size
        moves = [
            (request, request.computed + node, request.computed + place)
            for request, path in zip(requests, paths, strict=True)
            for place, node in enumerate(path)
            if place != node
        ]
        if not moves:
            return
        columns: dict[str, list[int]] = {}
        for number, slot in enumerate((Request.slot, Request.window_slot)[: len(self.kv.pools)]):
            columns[f"from {number}"] = [slot(request, source, size) for request, source, _ in moves]
            columns[f"to {number}"] = [slot(request, target, size) for request, _, target in moves]
        there = on_device(
            {name: np.array(column, np.int64) for name, column in columns.items()}, self.kv.device
        )
        for number, pool in enumerate(self.kv.pools):
            pool.move(there[f"from {number}"], there[f"to {number}"])
