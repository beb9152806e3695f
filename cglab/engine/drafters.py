"""Who drafts: a frozen-KV assistant, step by step (S0), or a block draft, all tokens at once (S4).

A drafter proposes tokens for every request of a step and is told what became of them; the target's pass, acceptance
and what a step leaves in the cache are the speculator's and the same for both. The assistant starts from the target's
hidden state before the newest token, which is kept here by request row, outside of every pool that a replay writes
(B40). The block draft reads keys and values that the target's own steps have stored for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cglab.engine.batches import Chunk
from cglab.engine.inputs import on_device
from cglab.engine.phases import BlockPhases, DraftPhases
from cglab.engine.proposals import Pass, Proposal
from cglab.engine.segments import ForwardSegments
from cglab.engine.speculation import Speculation
from cglab.errors import InputError
from cglab.models.assistant import Assistant
from cglab.models.block_draft import BlockDraft, BlockDraftConfig
from cglab.models.draft_tree import Draft, tree_inputs
from cglab.models.kv import PagedKV
from cglab.runners import seed_step
from cglab.runners.base import Runner
from cglab.runners.block_draft import Drafted


def seeded(output: seed_step.Drafted, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a draft loop is given after a seed step that was ``given`` this."""
    return output._asdict() | {name: given[name] for name in ("request_rows", "seq_lens")}


class AssistantDrafter:
    """Drafts with an assistant: a seed step, and a loop.

    Args:
        assistant: bound to its target.
        kv: the target's cache.
        phases: runners over both.
        speculation: sizes of a draft.

    Attributes:
        hidden: [rows, hidden_size], the target's normed hidden state at each request's last token in the cache.
    """

    overlap = 0

    def __init__(
        self, assistant: Assistant, kv: PagedKV, phases: DraftPhases, speculation: Speculation
    ) -> None:
        self.target, self.kv, self.phases, self.speculation = assistant.target, kv, phases, speculation
        rows, size = len(kv.full.page_table), self.target.config.hidden_size
        self.hidden = torch.zeros(rows, size, device=kv.device, dtype=self.target.rotary.dtype)

    @property
    def runners(self) -> dict[str, Runner[Any]]:
        """See ``Drafter``."""
        seed, loop = self.phases.seed_step(), self.phases.draft_loop()
        return {"draft_loop": loop} if seed is None else {"seed_step": seed, "draft_loop": loop}

    before_verify = runners

    def prefilled(
        self,
        chunks: Sequence[Chunk],
        hidden: Tensor,
        tokens: Sequence[Sequence[int]],
        segments: ForwardSegments,
    ) -> None:
        """Keeps the states of requests that decode next."""
        stops = accumulate(chunk.length for chunk in chunks)
        kept = [
            (stop - 1, chunk.request.row)
            for chunk, stop in zip(chunks, stops, strict=True)
            if chunk.decoding_next
        ]
        self._keep(hidden, kept)

    def passed(self, passed: Pass, segments: ForwardSegments) -> None:
        """Keeps the state of each last accepted token."""
        width, each = self.speculation.width, zip(passed.requests, passed.paths, strict=True)
        self._keep(
            passed.verified.hidden,
            [(i * width + path[-1], request.row) for i, (request, path) in enumerate(each)],
        )

    @torch.no_grad()
    def _keep(self, hidden: Tensor, kept: Sequence[tuple[int, int]]) -> None:
        """Keeps rows of ``hidden``, each for a request row."""
        if kept:
            ends, rows = np.array(kept, np.int64).T
            there = on_device({"ends": ends, "rows": rows}, self.kv.device)
            self.hidden.index_copy_(0, there["rows"], hidden.index_select(0, there["ends"]))

    def start(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See ``Drafter``; the assistant sees the tokens that are in the cache, the newest one not among them."""
        rows = inputs["request_rows"]
        hidden = self.hidden.index_select(0, rows)
        return {
            "input_ids": inputs["newest"], "hidden": hidden, "request_rows": rows, "seq_lens": inputs["cached"]
        }  # fmt: skip

    def proposal(self, output: Draft) -> Proposal:
        """See ``Drafter``."""
        return Proposal(output.draft_tokens, tree_inputs(output, self.speculation.topk))

    def draft(self, inputs: Mapping[str, Tensor], segments: ForwardSegments) -> Proposal:
        """Seed and loop."""
        given, live = self.start(inputs), len(inputs["newest"])
        seed = self.phases.seed_step()
        if seed is not None:
            with segments.timed("seed_step"):
                given = seeded(seed.run(live, **given), given)
        with segments.timed("draft_loop"):
            return self.proposal(self.phases.draft_loop().run(live, **given))


def require_block(draft: BlockDraftConfig, speculation: Speculation) -> None:
    """Refuses a speculation of another size than a draft's blocks.

    Raises:
        InputError: saying what it should be.
    """
    size = draft.block_size
    if speculation.topk > 1 or speculation.width != size:
        raise InputError(
            f"blocks of {size} are no draft of {speculation.width} tokens with topk {speculation.topk}; "
            f"give Speculation(steps={size - 1})"
        )


class BlockDrafter:
    """Drafts with a block draft, whose context the runners of prefill and verify feed.

    Args:
        draft: bound to its target.
        phases: its runner; those of the target have a feeder.
        speculation: a chain as long as the draft's blocks.
        sampler_timed: whether a sampler outside of the draft's graph counts as part of its forward. S4's did not,
            and its time showed as idle.

    Raises:
        InputError: for a speculation of another size.
    """

    overlap = 0

    def __init__(
        self, draft: BlockDraft, phases: BlockPhases, speculation: Speculation, *, sampler_timed: bool = True
    ) -> None:
        require_block(draft.config, speculation)
        self.target, self.phases, self.sampler_timed = draft.target, phases, sampler_timed

    @property
    def runners(self) -> dict[str, Runner[Any]]:
        """See ``Drafter``."""
        return {"block_draft": self.phases.block_draft()}

    before_verify = runners

    def prefilled(
        self,
        chunks: Sequence[Chunk],
        hidden: Tensor,
        tokens: Sequence[Sequence[int]],
        segments: ForwardSegments,
    ) -> None:
        """Does nothing: the context was stored in the prefill itself."""

    def start(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See ``Drafter``; a block goes to the slots that the verify step writes after it."""
        where = {name: inputs[name] for name in ("out_slots", "request_rows", "seq_lens")}
        return {"input_ids": inputs["newest"], **where}

    def proposal(self, output: Drafted) -> Proposal:
        """See ``Drafter``."""
        return Proposal(self.phases.block_draft().tokens(output), {})

    def draft(self, inputs: Mapping[str, Tensor], segments: ForwardSegments) -> Proposal:
        """One block of each request."""
        with ExitStack() as forward:
            forward.enter_context(segments.timed("block_draft"))
            drafted = self.phases.block_draft().run(len(inputs["newest"]), **self.start(inputs))
            if not self.sampler_timed:
                forward.close()
            return self.proposal(drafted)

    def passed(self, passed: Pass, segments: ForwardSegments) -> None:
        """Does nothing: the next block starts from tokens alone."""
