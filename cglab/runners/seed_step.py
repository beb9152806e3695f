"""T4, the seed step: the assistant's first forward of a draft, on the target's own hidden state (S0).

Captured: the target's embedding of the newest token, the assistant's layers over the target's cache, the head, and the
choice of the k most likely tokens, for a fixed number of requests. Static: the assistant's weights; of the target the
embedding, the head if it is borrowed, the rotary table and the cache, which all lie where they lay at capture (P85);
and the input slots. The step is frozen: it stores nothing, and sees the tokens in the cache and not one more (P41).

It cannot: take embeddings instead of tokens, or rotary positions on several axes. Such callers run the same step
eager, as do batches above the largest bucket, each with its reason; so does everything where the capture failed or
was switched off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from cglab.graphs.coverage import Miss, Reason
from cglab.graphs.options import Options
from cglab.models.assistant import Assistant, FrozenAttention
from cglab.models.attention import LiveRows
from cglab.models.draft_tree import check_branches
from cglab.models.kv import PagedKV
from cglab.runners.base import GraphGroup
from cglab.runners.requests import Input, RequestRunner, real, whole


class Prefix(NamedTuple):
    """What all steps of a draft ask the cache with: it does not move while a draft is made.

    Attributes:
        attend: over the tokens in the cache.
        positions: [rows] or [axes, rows] int64, of the last of them.
    """

    attend: FrozenAttention
    positions: Tensor


class Drafted(NamedTuple):
    """What a step of a draft hands to the next one, under the names of the loop's inputs.

    Attributes:
        topk_p: [rows, k] float32, the most likely tokens' probabilities, descending.
        topk_index: [rows, k] int64, these tokens.
        hidden: [rows, backbone_size], hidden states.
    """

    topk_p: Tensor
    topk_index: Tensor
    hidden: Tensor


class DraftRunner(RequestRunner[Assistant]):
    """Steps of an assistant over its target's cache.

    Args:
        assistant: bound to its target.
        kv: the target's cache.
        group: pool and shared buffers.
        buckets: batch sizes to capture.
        options: backend, padding and the rest.
        topk: most likely tokens that a step goes on with.

    Raises:
        InputError: if ``topk`` is not from 1 to the size of the vocabulary.
        ModelError: if the assistant is bound to no target.
    """

    tokens_at = 1

    def __init__(
        self,
        assistant: Assistant,
        kv: PagedKV,
        group: GraphGroup,
        buckets: Sequence[int],
        options: Options,
        *,
        topk: int,
    ) -> None:
        check_branches(1, topk, vocabulary=assistant.config.vocab_size)
        self.topk = topk
        borrowed = ["target.embedding", "target.rotary"] + ["target.head"] * (assistant.head is None)
        watched = {name: partial(attrgetter(name), assistant) for name in borrowed}
        super().__init__(assistant, kv, group, buckets, options, {"assistant": assistant, **watched})

    def hidden(self) -> Input:
        """A hidden state of the target's width for each request."""
        return real(self.model.pre.weight.dtype, self.model.config.backbone_size)

    def seed(self) -> dict[str, Input]:
        """What the first step reads: the newest token, and the target's hidden state before it."""
        return {"input_ids": whole(0, self.vocabulary), "hidden": self.hidden(), **self.requests()}

    def ineligible(self, values: Mapping[str, Tensor]) -> Miss | None:
        """Callers with embeddings or several axes of positions do not qualify for a recording."""
        embeddings, positions = values.get("embeddings"), values.get("positions")
        if embeddings is not None and "input_ids" in self.inputs:
            return Miss(Reason.EMBEDDINGS, f"embeddings {tuple(embeddings.shape)}")
        if positions is not None and positions.dim() > 1:
            return Miss(Reason.POSITION_AXES, f"{positions.shape[0]} axes")
        return None

    def frozen(
        self, inputs: Mapping[str, Tensor], *, repeats: int = 1, live: LiveRows | None = None
    ) -> Prefix:
        """The cache as each row of a step sees it.

        Args:
            inputs: of the step; ``positions`` where the caller has its own.
            repeats: rows of each request.
            live: how many of all rows attention's breaks see, where these are no requests.
        """
        rows = {name: inputs[name] for name in ("request_rows", "seq_lens")}
        positions = inputs.get("positions")
        rows["positions"] = (rows["seq_lens"] - 1).clamp_min(0) if positions is None else positions
        if repeats > 1:
            rows = {name: value.repeat_interleave(repeats, dim=-1) for name, value in rows.items()}
        return Prefix(FrozenAttention(self.attend(rows, live=live), self.model.layers), rows["positions"])

    def draft(
        self, input_ids: Tensor, hidden: Tensor, prefix: Prefix, embeddings: Tensor | None = None
    ) -> Drafted:
        """One forward and its most likely tokens: the seed step, and every step of the loop.

        Args:
            input_ids: [rows] int64.
            hidden: [rows, backbone_size].
            prefix: of these rows.
            embeddings: [rows, backbone_size], instead of those of ``input_ids``.
        """
        logits, hidden = self.model(input_ids, hidden, prefix.positions, prefix.attend, embeddings=embeddings)
        probabilities = logits.softmax(-1, dtype=torch.float32)
        best = probabilities.max(-1, keepdim=True) if self.topk == 1 else probabilities.topk(self.topk)
        return Drafted(best[0], best[1], hidden)


class SeedRunner(DraftRunner):
    """The seed step in a graph of its own; see ``DraftRunner``."""

    technique, title = "seed_step", "Frozen-KV MTP seed"

    def declare(self) -> dict[str, Input]:
        """See ``seed``."""
        return self.seed()

    def step(self, **inputs: Tensor) -> Drafted:
        """The seed step.

        Args:
            **inputs: ``input_ids`` [requests] int64, ``hidden`` [requests, backbone_size], ``request_rows`` and
                ``seq_lens`` [requests] int64, the tokens in the cache; eager also ``embeddings``
                [requests, backbone_size] and ``positions`` [axes, requests].
        """
        return self.draft(
            inputs["input_ids"], inputs["hidden"], self.frozen(inputs), inputs.get("embeddings")
        )
