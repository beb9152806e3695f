"""A short step of latent attention in the expanded form: every token sees all keys before it, and none is scored.

It runs eagerly only, where ``dense_when_short`` says so before a step: a recording cannot choose by length (P37). Index
keys are stored as in every other step, as later ones score them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cglab.models.experts import RoutedExperts
from cglab.models.indexer import Indexer
from cglab.models.kv import LayerCache, PagedKV
from cglab.models.mla import LatentAttend, LatentAttention
from cglab.models.packed import portable
from cglab.models.spans import Span, SpanPlan
from cglab.models.sparse import store_index_keys


class DenseAttention(LatentAttend):
    """The step; tokens after the last span are padding.

    Args:
        kv: the cache, of latents and index keys.
        out_slots: [T] int64, where the tokens go; 0 for padding.
        spans: the requests, in the order of the tokens.
    """

    def __init__(self, kv: PagedKV, *, out_slots: Tensor, spans: Sequence[Span]) -> None:
        self.kv, self.out_slots = kv, out_slots
        self.live = out_slots > 0
        self.plan = SpanPlan.of(spans, kv.full)

    def cache(self, layer_index: int) -> LayerCache:
        """The layer's latents (``keys``) and index keys (``values``) with the slots of this step."""
        return self.kv.pool(layer_index).cache(layer_index, self.out_slots)

    def select(
        self, layer_index: int, indexer: Indexer, hidden: Tensor, query_latent: Tensor, turn: Tensor
    ) -> None:
        """See ``LatentAttend``."""
        store_index_keys(self.cache(layer_index), indexer.key(hidden, turn))

    def attend(
        self, layer_index: int, attention: LatentAttention, query: Tensor, latent: Tensor, turn: Tensor
    ) -> Tensor:
        """See ``LatentAttend``."""
        cache, plan = self.cache(layer_index), self.plan
        attention.store(latent, turn, cache)
        slots = cache.slots[: plan.tokens] if plan.key_slots is None else plan.key_slots
        key, value = attention.expanded(cache.keys.index_select(0, slots).squeeze(1).to(query.dtype))
        out = query.new_zeros(len(query), attention.heads, attention.value_dim)
        portable(attention.turned(query, turn), key, value, out, plan.query_ends, plan.key_ends, None)
        return out.flatten(1)

    def route(self, experts: RoutedExperts, hidden: Tensor) -> Tensor:
        """See ``LatentAttend``."""
        return experts(hidden, self.live)
