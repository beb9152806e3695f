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
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from cglab.engine.batches import Chunk
from cglab.engine.inputs import on_device
from cglab.engine.phases import BlockPhases, DraftPhases
from cglab.engine.segments import ForwardSegments
from cglab.engine.speculation import Speculation
from cglab.errors import InputError
from cglab.models.assistant import Assistant
from cglab.models.block_draft import BlockDraft, BlockDraftConfig
from cglab.models.decoder import Decoder
from cglab.models.draft_tree import Draft, tree_inputs
from cglab.models.kv import PagedKV
from cglab.runners import seed_step
from cglab.runners.base import Runner
from cglab.runners.block_draft import Drafted


class Proposal(NamedTuple):
    """What is to be verified beside each request's newest token.

    Attributes:
        tokens: [requests, lookahead] int64; may be overwritten by the next replay.
        tree: ``parent_list`` and ``top_scores_index`` as ``draft_tree.Draft`` has them; empty for a chain.
    """

    tokens: Tensor
    tree: Mapping[str, Tensor]


class Drafter(Protocol):
    """Proposes tokens for a target.

    Attributes:
        target: whose tokens are drafted.
        carries: whether a draft starts from hidden states of the pass before, which ``keep`` is then given.
    """

    target: Decoder
    carries: bool

    @property
    def runners(self) -> dict[str, Runner[int]]:
        """The runners in use, by technique and in order."""
        ...

    def prefilled(self, chunks: Sequence[Chunk], hidden: Tensor) -> None:
        """Takes note of a prefill.

        Args:
            chunks: what was computed, requests that ride along included.
            hidden: [tokens, hidden_size], the target's normed hidden states.
        """
        ...

    def start(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What its first runner is given; ``inputs`` as ``draft`` takes them."""
        ...

    def proposal(self, output: Any) -> Proposal:
        """What its last runner has drafted."""
        ...

    def draft(self, inputs: Mapping[str, Tensor], segments: ForwardSegments) -> Proposal:
        """Drafts for every request.

        Args:
            inputs: int64: ``newest`` [requests], the tokens that are not in the cache yet; ``cached`` [requests], how
                many are; and what the verify step is given.
            segments: where the device time of each forward is noted.
        """
        ...

    def keep(self, hidden: Tensor, ends: Tensor, rows: Tensor) -> None:
        """Takes the hidden states that the next drafts start from.

        Args:
            hidden: [tokens, hidden_size], of a pass.
            ends: [requests] int64, its row for each request.
            rows: [requests] int64, request rows.
        """
        ...


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

    carries = True

    def __init__(
        self, assistant: Assistant, kv: PagedKV, phases: DraftPhases, speculation: Speculation
    ) -> None:
        self.target, self.kv, self.phases, self.speculation = assistant.target, kv, phases, speculation
        rows, size = len(kv.full.page_table), self.target.config.hidden_size
        self.hidden = torch.zeros(rows, size, device=kv.device, dtype=self.target.rotary.dtype)

    @property
    def runners(self) -> dict[str, Runner[int]]:
        """See ``Drafter``."""
        seed, loop = self.phases.seed_step(), self.phases.draft_loop()
        return {"draft_loop": loop} if seed is None else {"seed_step": seed, "draft_loop": loop}

    def prefilled(self, chunks: Sequence[Chunk], hidden: Tensor) -> None:
        """Keeps the states of chunks that end their request."""
        stops = accumulate(chunk.length for chunk in chunks)
        kept = [
            (stop - 1, chunk.request.row) for chunk, stop in zip(chunks, stops, strict=True) if chunk.last
        ]
        if kept:
            ends, rows = np.array(kept, np.int64).T
            self.keep(hidden, *on_device({"ends": ends, "rows": rows}, self.kv.device).values())

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

    def keep(self, hidden: Tensor, ends: Tensor, rows: Tensor) -> None:
        """See ``Drafter``."""
        self.hidden.index_copy_(0, rows, hidden.index_select(0, ends))


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

    carries = False

    def __init__(
        self, draft: BlockDraft, phases: BlockPhases, speculation: Speculation, *, sampler_timed: bool = True
    ) -> None:
        require_block(draft.config, speculation)
        self.target, self.phases, self.sampler_timed = draft.target, phases, sampler_timed

    @property
    def runners(self) -> dict[str, Runner[int]]:
        """See ``Drafter``."""
        return {"block_draft": self.phases.block_draft()}

    def prefilled(self, chunks: Sequence[Chunk], hidden: Tensor) -> None:
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

    def keep(self, hidden: Tensor, ends: Tensor, rows: Tensor) -> None:
        """Does nothing: the next block starts from tokens alone."""
