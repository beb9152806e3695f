"""T3, the draft loop: all steps of a draft after the seed step, and the choice of what is verified (S0, S1).

Captured: ``steps - 1`` forwards of the assistant, each on the k best tokens of the one before, and the selection of the
best ``tokens - 1`` candidates, for a fixed number of requests; fused, the seed step as iteration zero. Static: what the
seed step has static, with the number of steps, branches and tokens. Live are requests: the k branches of each are made
inside the step and are in no count (P9). No input is written, so that a recording can be warmed up and replayed
over the same ones (P43).

It cannot: draft with other steps, branches or tokens, for a batch above its largest bucket, or for callers that do not
qualify for the seed step's graph. Each of these runs eager, or is refused, with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cglab.errors import InputError
from cglab.graphs.coverage import Miss
from cglab.graphs.options import Options
from cglab.models import draft_tree
from cglab.models.assistant import Assistant
from cglab.models.attention import LiveRows
from cglab.models.draft_tree import Draft
from cglab.models.kv import PagedKV
from cglab.runners.base import GraphGroup
from cglab.runners.requests import Input, real, whole
from cglab.runners.seed_step import DraftRunner


class DraftLoopRunner(DraftRunner):
    """The draft loop of an assistant over its target's cache.

    Args:
        assistant: bound to its target.
        kv: the target's cache.
        group: pool and shared buffers.
        buckets: batch sizes to capture.
        options: backend, padding and the rest.
        steps: forwards of a draft, the seed step included.
        topk: branches at each step.
        tokens: that are verified of each request, the newest one included.
        fused: whether the seed step is part of it.

    Raises:
        InputError: if a draft of so many steps and branches does not have so many tokens.
    """

    technique, title, tokens_at = "draft_loop", "Frozen-KV MTP draft", 2

    def __init__(
        self,
        assistant: Assistant,
        kv: PagedKV,
        group: GraphGroup,
        buckets: Sequence[int],
        options: Options,
        *,
        steps: int,
        topk: int,
        tokens: int,
        fused: bool,
    ) -> None:
        most = draft_tree.candidate_count(steps, topk) + 1
        if steps < 1 or not 2 <= tokens <= most:
            raise InputError(
                f"{steps} steps with topk {topk} draft no {tokens} tokens; give 2 to {most}, from 1 step on"
            )
        self.steps, self.tokens, self.fused, self.branches = steps, tokens, fused, LiveRows()
        self.variant = "fused" if fused else None
        super().__init__(assistant, kv, group, buckets, options, topk=topk)

    def declare(self) -> dict[str, Input]:
        """What the seed step returns, or, fused, what it reads; and where the requests are."""
        if self.fused:
            return self.seed()
        best = {"topk_p": real(torch.float32, self.topk), "topk_index": whole(0, self.vocabulary, self.topk)}
        return {**best, "hidden": self.hidden(), **self.requests()}

    def ineligible(self, values: Mapping[str, Tensor]) -> Miss | None:
        """See ``DraftRunner``.

        Raises:
            InputError: for another number of branches than the loop's.
        """
        branches = self.topk if self.fused else values["topk_index"].shape[-1]
        if branches != self.topk:
            raise InputError(
                f"{branches} branches come from the seed step, the loop has {self.topk}; give both one topk"
            )
        return super().ineligible(values)

    def set_live(self, live: int | None) -> None:
        """Breaks of the loop read how many branches are live."""
        super().set_live(live)
        self.branches.rows = None if self.live.rows is None else self.live.rows * self.topk

    def step(self, **inputs: Tensor) -> Draft:
        """One draft.

        Args:
            **inputs: ``topk_p`` [requests, k] float32, ``topk_index`` [requests, k] int64 and ``hidden``
                [requests, backbone_size] as the seed step returns them, ``request_rows`` and ``seq_lens`` [requests]
                int64; fused those of ``SeedRunner.step``.
        """
        if self.fused:
            prefix = self.frozen(inputs)
            p, index, hidden = self.draft(
                inputs["input_ids"], inputs["hidden"], prefix, inputs.get("embeddings")
            )
        else:
            p, index, hidden = inputs["topk_p"], inputs["topk_index"], inputs["hidden"]
        levels = [draft_tree.first_candidates(p, index)]
        if self.steps > 1 and not (
            self.fused and self.topk == 1
        ):  # one row of a request sees what the seed sees
            prefix = self.frozen(inputs, repeats=self.topk, live=self.branches)
        for _ in range(1, self.steps):
            p, index, hidden = self.draft(*draft_tree.next_inputs(levels[-1], hidden), prefix)
            levels.append(draft_tree.next_candidates(levels[-1], p, index))
        return draft_tree.organize(levels, self.tokens - 1)
