"""Steps of a model with latent attention over whole texts at once: for training, and for continuing them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from cglab.models.dsa_config import DsaConfig
from cglab.models.experts import RoutedExperts
from cglab.models.indexer import Indexer, KeyRanges, best
from cglab.models.kv import PagedKV
from cglab.models.mla import LatentAttend, LatentAttention
from cglab.models.spans import Span
from cglab.models.sparse import Breaks, LiveKeys, SparseAttention


class LatentWindows(LatentAttend):
    """Whole windows laid end to end, without a cache; everything but the selection can be learnt from.

    Attributes:
        distances: of each indexer, in nats a token: how far its scores are from where its layer attends.
        loads: of each layer of routed experts, [num_experts] float32, tokens that each expert got.

    Args:
        window: tokens of each.
        kept: keys that a token attends to; None for all before it.
        taught: whether ``distances`` and ``loads`` are kept.
    """

    def __init__(self, window: int, kept: int | None, *, taught: bool = False) -> None:
        self.window, self.kept, self.taught = window, kept, taught
        self.distances: list[Tensor] = []
        self.loads: list[Tensor] = []

    def select(
        self, layer_index: int, indexer: Indexer, hidden: Tensor, query_latent: Tensor, turn: Tensor
    ) -> None:
        """See ``LatentAttend``; the indexer learns from ``distances`` alone, its inputs from the text alone."""
        rows = indexer.prepare(hidden.detach(), query_latent.detach(), turn)
        query, gates, key = (self._windows(part) for part in (rows.query, rows.gates, rows.key.squeeze(1)))
        found = F.relu(torch.einsum("wqhd,wkd->wqhk", query, key))
        self.scores = torch.einsum("wqh,wqhk->wqk", gates.to(found.dtype), found).float()
        causal = torch.ones(self.window, self.window, device=hidden.device, dtype=torch.bool).tril()
        sparse = self.kept is not None and self.kept < self.window
        self.seen = best(self.scores.detach(), causal, self.kept or 0) if sparse else causal

    def attend(
        self, layer_index: int, attention: LatentAttention, query: Tensor, latent: Tensor, turn: Tensor
    ) -> Tensor:
        """See ``LatentAttend``."""
        key, value = (self._windows(part) for part in attention.expanded(attention.stored(latent, turn)))
        asked = self._windows(attention.turned(query, turn))
        unseen = ~self.seen if self.seen.dim() == 2 else ~self.seen.unsqueeze(1)
        scores = torch.einsum("wqhd,wkhd->whqk", asked, key).float() * attention.scale
        likely = scores.masked_fill(unseen, -math.inf).softmax(-1)
        if self.taught and attention.indexer is not None:
            self._teach(likely.detach().mean(1))
        mixed = torch.einsum("whqk,wkhd->wqhd", likely.to(value.dtype), value)
        return mixed.flatten(0, 1).flatten(1).to(query.dtype)

    def route(self, experts: RoutedExperts, hidden: Tensor) -> Tensor:
        """See ``LatentAttend``."""
        routing = experts.router(hidden)
        if self.taught:
            chosen = F.one_hot(routing.experts.flatten(), len(experts.router.weight))
            self.loads.append(chosen.sum(0).float())
        return experts.mix(hidden, routing)

    def _windows(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, self.window))

    def _teach(self, attended: Tensor) -> None:
        """Notes the Kullback-Leibler distance of the scores from ``attended`` [windows, window, window]."""
        # A finite floor: what is not seen weighs nothing, and nothing times infinity is no number.
        told = self.scores.masked_fill(~self.seen, -1e30).log_softmax(-1)
        wanted = torch.special.xlogy(attended, attended) - attended * told
        self.distances.append(wanted.sum(-1).mean())


class LatentCache(LatentAttend):
    """Equally long texts and what they have so far, in a paged cache with one page a text.

    Attributes:
        stored: positions of each text that every layer holds.

    Args:
        config: the target's shape.
        texts: how many.
        length: most positions of each.
        like: of the dtype and on the device of the cache.
    """

    def __init__(self, config: DsaConfig, texts: int, length: int, like: Tensor) -> None:
        self.kv = PagedKV(
            config, pages=texts + 1, page_size=length, rows=texts + 1, max_context=length, device=like.device,
            dtype=like.dtype,
        )  # fmt: skip
        self.kv.full.page_table[:, 0] = torch.arange(texts + 1, device=like.device)
        self.texts, self.stored, self.kept = texts, 0, config.index_topk
        self._step: SparseAttention | None = None
        self._of = (-1, 0)

    def select(
        self, layer_index: int, indexer: Indexer, hidden: Tensor, query_latent: Tensor, turn: Tensor
    ) -> None:
        """See ``LatentAttend``."""
        self._at(len(hidden)).select(layer_index, indexer, hidden, query_latent, turn)

    def attend(
        self, layer_index: int, attention: LatentAttention, query: Tensor, latent: Tensor, turn: Tensor
    ) -> Tensor:
        """See ``LatentAttend``."""
        return self._at(len(query)).attend(layer_index, attention, query, latent, turn)

    def route(self, experts: RoutedExperts, hidden: Tensor) -> Tensor:
        """See ``LatentAttend``."""
        return self._at(len(hidden)).route(experts, hidden)

    def _at(self, tokens: int) -> SparseAttention:
        """The step of this many tokens, as many of each text, after those that are stored."""
        if self._step is None or self._of != (self.stored, tokens):
            width = tokens // self.texts
            spans = [Span(text + 1, self.stored, width) for text in range(self.texts)]
            rows = torch.arange(1, self.texts + 1, device=self.kv.device)
            new = self.kv.context_positions[self.stored : self.stored + width]
            slots = self.kv.full.slots(rows, new.expand(self.texts, -1)).flatten()
            keys = LiveKeys(KeyRanges.of(spans, self.kv.full))
            self._step = SparseAttention(
                self.kv, out_slots=slots, keys=keys, breaks=Breaks(), index_topk=self.kept
            )
            self._of = self.stored, tokens
        return self._step
