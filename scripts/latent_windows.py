"""Steps of a model with latent attention over whole texts at once: for training, and for continuing them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from cglab.models.dsa_config import DsaConfig
from cglab.models.experts import RoutedExperts
from cglab.models.indexer import Indexer, best
from cglab.models.mla import LatentAttend, LatentAttention


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
        key = self._index_keys(layer_index, key)
        found = F.relu(torch.einsum("wqhd,wkd->wqhk", query, key))
        self.scores = torch.einsum("wqh,wqhk->wqk", gates.to(found.dtype), found).float()
        width, known = self.scores.shape[1:]
        causal = torch.ones(width, known, device=hidden.device, dtype=torch.bool).tril(known - width)
        sparse = self.kept is not None and self.kept < known
        self.seen = best(self.scores.detach(), causal, self.kept or 0) if sparse else causal

    def attend(
        self, layer_index: int, attention: LatentAttention, query: Tensor, latent: Tensor, turn: Tensor
    ) -> Tensor:
        """See ``LatentAttend``."""
        key, value = (self._windows(part) for part in attention.expanded(attention.stored(latent, turn)))
        asked = self._windows(attention.turned(query, turn))
        likely = self._likely(torch.einsum("wqhd,wkhd->whqk", asked, key), attention)
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

    def _index_keys(self, layer_index: int, new: Tensor) -> Tensor:
        """[windows, keys, index_dim], all that the tokens of ``new`` may see: here these alone."""
        return new

    def _likely(self, products: Tensor, attention: LatentAttention) -> Tensor:
        """Weights of the keys that are seen, float32, from products [windows, heads, width, keys] with queries."""
        unseen = ~self.seen if self.seen.dim() == 2 else ~self.seen.unsqueeze(1)
        likely = (products.float() * attention.scale).masked_fill(unseen, -math.inf).softmax(-1)
        if self.taught and attention.indexer is not None:
            self._teach(likely.detach().mean(1))
        return likely

    def _teach(self, attended: Tensor) -> None:
        """Notes the Kullback-Leibler distance of the scores from ``attended`` [windows, window, window]."""
        # A finite floor: what is not seen weighs nothing, and nothing times infinity is no number.
        told = self.scores.masked_fill(~self.seen, -1e30).log_softmax(-1)
        wanted = torch.special.xlogy(attended, attended) - attended * told
        self.distances.append(wanted.sum(-1).mean())


class LatentCache(LatentWindows):
    """Equally long texts and what they have so far, every text at the same position.

    Attributes:
        stored: positions of each text that every layer holds.
        latents: [layers, texts, length, latent_rank + head_dim].
        index_keys: [layers, texts, length, index_dim].

    Args:
        config: the target's shape.
        texts: how many.
        length: most positions of each.
        like: of the dtype and on the device of the cache.
    """

    def __init__(self, config: DsaConfig, texts: int, length: int, like: Tensor) -> None:
        super().__init__(length, config.index_topk)
        places = (config.num_layers, texts, length)
        self.latents = like.new_zeros(*places, config.latent_rank + config.head_dim)
        self.index_keys = like.new_zeros(*places, config.index_dim)
        self.texts, self.stored = texts, 0

    def attend(
        self, layer_index: int, attention: LatentAttention, query: Tensor, latent: Tensor, turn: Tensor
    ) -> Tensor:
        """See ``LatentAttend``; queries ask the latents themselves, so that none is expanded again at every step."""
        known = self._known(self.latents[layer_index], self._windows(attention.stored(latent, turn)))
        asked = self._windows(attention.absorbed(query, turn))
        likely = self._likely(torch.einsum("wqhd,wkd->whqk", asked, known), attention)
        mixed = torch.einsum("whqk,wkd->wqhd", likely.to(known.dtype), known[..., : attention.rank])
        return attention.values(mixed.flatten(0, 1)).to(query.dtype)

    def _windows(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (self.texts, -1))

    def _index_keys(self, layer_index: int, new: Tensor) -> Tensor:
        return self._known(self.index_keys[layer_index], new)

    def _known(self, cache: Tensor, new: Tensor) -> Tensor:
        """Stores [texts, width, dim] in a layer's cache and returns all that it holds, [texts, stored + width, dim]."""
        end = self.stored + new.shape[1]
        cache[:, self.stored : end] = new
        return cache[:, :end]
