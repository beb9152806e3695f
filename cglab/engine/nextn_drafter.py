"""Who drafts: a NextN layer, one token at the end of every pass of its target (S3).

The layer extends over whatever the target has computed, a chunk of a prompt or what a verify pass has accepted, with
the token that follows each. The last of them is the newest token, so that what comes out is the draft of the next step:
when that begins, nothing is left to compute, and only as many tokens are held as there are rows. A prompt's first token
has left before its extend begins.

What the layer keeps of a token depends on the token after it. So the last token of a page is known by the first of the
next page too (``overlap``); else a page that two requests share would hold what one of them goes on with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cglab.engine.batches import Chunk
from cglab.engine.inputs import on_device, spans_of, step_inputs
from cglab.engine.phases import NextNPhases
from cglab.engine.proposals import Pass, Proposal
from cglab.engine.segments import ForwardSegments
from cglab.engine.speculation import Speculation
from cglab.errors import InputError
from cglab.models.kv import PagedKV
from cglab.models.nextn import NextN
from cglab.runners.base import Runner


def require_one(speculation: Speculation) -> None:
    """Refuses a speculation that asks a NextN layer for more than its one token.

    Raises:
        InputError: saying what it should be.
    """
    if (speculation.steps, speculation.topk) != (1, 1):
        raise InputError(
            f"a NextN layer drafts one token a step, not {speculation.steps} with topk {speculation.topk}; "
            "give Speculation(steps=1)"
        )


class NextNDrafter:
    """Drafts with a NextN layer.

    Args:
        layer: bound to its target.
        kv: the target's cache, on whose page tables the layer's own is.
        phases: its runner.
        speculation: one step of one candidate.

    Attributes:
        drafted: [rows] int64, the draft of each request's next token but one, by request row: outside of every pool
            that a replay writes (B40).

    Raises:
        InputError: for a speculation of another size.
    """

    overlap = 1

    def __init__(self, layer: NextN, kv: PagedKV, phases: NextNPhases, speculation: Speculation) -> None:
        require_one(speculation)
        self.target, self.kv, self.phases = layer.target, kv, phases
        self.drafted = torch.zeros(len(kv.full.page_table), device=kv.device, dtype=torch.int64)

    @property
    def runners(self) -> dict[str, Runner[Any]]:
        """See ``Drafter``."""
        return {"draft_extend": self.phases.draft_extend()}

    @property
    def before_verify(self) -> dict[str, Runner[int]]:
        """See ``Drafter``: none, as the pass before has drafted."""
        return {}

    def prefilled(
        self,
        chunks: Sequence[Chunk],
        hidden: Tensor,
        tokens: Sequence[Sequence[int]],
        segments: ForwardSegments,
    ) -> None:
        """Extends over the chunks."""
        chosen = iter(tokens)
        following = [self._following(chunk, next(chosen) if chunk.last else ()) for chunk in chunks]
        self._extend(chunks, following, hidden, segments)

    @staticmethod
    def _following(chunk: Chunk, chosen: Sequence[int]) -> list[int]:
        """The token after each of a chunk's; after the newest one the one that was chosen now."""
        start = chunk.start + 1
        return [*chunk.request.tokens[start : start + chunk.length], *chosen]

    def passed(self, passed: Pass, segments: ForwardSegments) -> None:
        """Extends over what was accepted: the newest token before the pass, and the draft if it was right."""
        width = 2
        chunks = [
            Chunk(request, request.computed, len(path), last=True)
            for request, path in zip(passed.requests, passed.paths, strict=True)
        ]
        kept = [number * width + node for number, path in enumerate(passed.paths) for node in path]
        rows = on_device({"kept": np.array(kept, np.int64)}, self.kv.device)["kept"]
        self._extend(chunks, passed.tokens, passed.verified.hidden.index_select(0, rows), segments)

    @torch.no_grad()
    def _extend(
        self,
        chunks: Sequence[Chunk],
        following: Sequence[Sequence[int]],
        hidden: Tensor,
        segments: ForwardSegments,
    ) -> None:
        """Runs the layer over chunks and keeps what it drafts for requests that decode next."""
        runner, spans = self.phases.draft_extend(), spans_of(chunks)
        ending = [index for index, chunk in enumerate(chunks) if chunk.decoding_next]
        columns = {
            "input_ids": np.fromiter(chain.from_iterable(following), np.int64),
            "rows": np.array([chunks[index].request.row for index in ending], np.int64),
        }
        inputs = step_inputs(chunks, ("positions", "out_slots"), self.kv, columns)
        rows = inputs.pop("rows")
        with segments.timed("draft_extend"):
            after = runner.run(spans, hidden=hidden, **inputs)
            self.drafted.index_copy_(0, rows, runner.drafts(after, spans, ending))

    def start(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See ``Drafter``."""
        return {"drafted": self.drafted.index_select(0, inputs["request_rows"])}

    def proposal(self, output: Mapping[str, Tensor]) -> Proposal:
        """See ``Drafter``."""
        return Proposal(output["drafted"].unsqueeze(1), {})

    def draft(self, inputs: Mapping[str, Tensor], segments: ForwardSegments) -> Proposal:
        """What was drafted at the end of the pass before: nothing is run."""
        return self.proposal(self.start(inputs))
