"""Multi-head latent attention: keys and values of all heads are one latent a token, in a paged cache.

It is computed in two forms. *Absorbed*, the projection from latent to keys is applied to the queries, so that all heads
ask the cached latents themselves: what sparse attention over chosen slots does (S3), and what a recording holds.
*Expanded*, latents become keys and values of each head: fewer products where every key is seen and there are few, but
another order of sums. Which of the two is decided outside of a recording, by ``dense_when_short`` (P37, B81).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from cglab.models.dsa_config import DsaConfig
from cglab.models.experts import RoutedExperts
from cglab.models.indexer import Indexer
from cglab.models.kv import LayerCache
from cglab.models.rotary import rotate_pairs

LATENT_NORM_EPS: Final = 1e-6  # of the norms of the latents, whatever the configuration says of the others
GATHERED_BYTES: Final = 1 << 30
"""Most memory of gathered latents at once; fixed, as a recording cannot ask what is free."""


class LatentAttend(ABC):
    """What a stack with latent attention asks of a step; it selects, attends and routes, each in a break or not.

    Attributes:
        selected: [T, index_topk] int32, the slots that the layer which selected last attends to, then -1; None before
            any has, or where a step keeps every key.
    """

    selected: Tensor | None = None

    @abstractmethod
    def select(
        self, layer_index: int, indexer: Indexer, hidden: Tensor, query_latent: Tensor, turn: Tensor
    ) -> None:
        """Stores the layer's index keys and selects what it and the layers that share with it attend to.

        Args:
            layer_index: which layer asks.
            indexer: the layer's.
            hidden: [T, hidden_size], normed.
            query_latent: [T, query_rank], normed.
            turn: [T, 2, head_dim], rows of the paired rotary table.
        """

    @abstractmethod
    def attend(
        self, layer_index: int, attention: LatentAttention, query: Tensor, latent: Tensor, turn: Tensor
    ) -> Tensor:
        """Stores the layer's latents and attends to what was selected last.

        Args:
            layer_index: which layer asks.
            attention: the layer's, for its projections.
            query: [T, heads, query_dim], not turned yet.
            latent: [T, latent_rank + head_dim], normed, its key part not turned yet.
            turn: [T, 2, head_dim], rows of the paired rotary table.

        Returns:
            [T, heads * value_dim]; zero for padding (P53).
        """

    @abstractmethod
    def route(self, experts: RoutedExperts, hidden: Tensor) -> Tensor:
        """[T, hidden_size] of experts on normed hidden states; padding reaches no expert."""


class LatentAttention(nn.Module):
    """The projections of one layer around a ``LatentAttend``; those that read the same input are one matrix.

    Attributes:
        indexer: None in a layer that attends to what the layer before attends to.

    Args:
        config: the shape.
        shared: whether it is such a layer.
        **place: device and dtype of the parameters.
    """

    def __init__(self, config: DsaConfig, *, shared: bool = False, **place: Any) -> None:
        super().__init__()
        self.heads, self.scale = config.num_heads, config.query_dim**-0.5
        self.rank, self.value_dim = config.latent_rank, config.value_dim
        self.query_parts = config.nope_dim, config.head_dim
        latent = config.latent_rank + config.head_dim
        self.latents = config.query_rank, latent
        self.latent_down = skip_init(nn.Linear, config.hidden_size, sum(self.latents), bias=False, **place)
        self.query_norm = skip_init(nn.RMSNorm, config.query_rank, eps=LATENT_NORM_EPS, **place)
        width = config.num_heads * config.query_dim
        self.query_up = skip_init(nn.Linear, config.query_rank, width, bias=False, **place)
        self.latent_norm = skip_init(nn.RMSNorm, config.latent_rank, eps=LATENT_NORM_EPS, **place)
        width = config.num_heads * (config.nope_dim + config.value_dim)
        self.latent_up = skip_init(nn.Linear, config.latent_rank, width, bias=False, **place)
        width = config.num_heads * config.value_dim
        self.output = skip_init(nn.Linear, width, config.hidden_size, bias=False, **place)
        self.indexer = None if shared else Indexer(config, **place)

    def forward(self, hidden: Tensor, turn: Tensor, layer_index: int, attend: LatentAttend) -> Tensor:
        """Hidden states [T, hidden_size] from normed ones; ``turn`` holds rows of the paired rotary table."""
        query_latent, latent = self.latent_down(hidden).split(self.latents, dim=-1)
        query_latent = self.query_norm(query_latent)
        if self.indexer is not None:
            attend.select(layer_index, self.indexer, hidden, query_latent, turn)
        query = self.query_up(query_latent).view(len(hidden), self.heads, -1)
        latent = torch.cat((self.latent_norm(latent[:, : self.rank]), latent[:, self.rank :]), dim=-1)
        out: Tensor = self.output(attend.attend(layer_index, self, query, latent, turn))
        return out

    @property
    def up(self) -> tuple[Tensor, Tensor]:
        """Views of ``latent_up``: to keys [heads, nope_dim, latent_rank], to values [heads, value_dim, latent_rank]."""
        weight = self.latent_up.weight.view(self.heads, -1, self.rank)
        to_keys, to_values = weight.split((self.query_parts[0], self.value_dim), dim=1)
        return to_keys, to_values

    def stored(self, latent: Tensor, turn: Tensor) -> Tensor:
        """What the cache holds of latents [T, latent_rank + head_dim]: the same, their key part turned."""
        key = rotate_pairs(latent[:, self.rank :].unsqueeze(1), turn).squeeze(1)
        return torch.cat((latent[:, : self.rank], key), dim=-1)

    def store(self, latent: Tensor, turn: Tensor, cache: LayerCache) -> None:
        """Stores latents [T, latent_rank + head_dim] that are not turned yet."""
        kept = self.stored(latent, turn).unsqueeze(1)
        cache.keys.index_copy_(0, cache.slots, kept.to(cache.keys.dtype))

    def absorbed(self, query: Tensor, turn: Tensor) -> Tensor:
        """Queries as they ask latents: [T, heads, latent_rank + head_dim] from [T, heads, query_dim]."""
        plain, turned = query.split(self.query_parts, dim=-1)
        asked = torch.bmm(plain.transpose(0, 1), self.up[0]).transpose(0, 1)
        return torch.cat((asked, rotate_pairs(turned, turn)), dim=-1)

    def values(self, mixed: Tensor) -> Tensor:
        """[T, heads * value_dim] from mixtures of latents [T, heads, latent_rank]."""
        return torch.bmm(mixed.transpose(0, 1), self.up[1].transpose(1, 2)).transpose(0, 1).flatten(1)

    def turned(self, query: Tensor, turn: Tensor) -> Tensor:
        """Queries [T, heads, query_dim] as they ask expanded keys."""
        plain, turned = query.split(self.query_parts, dim=-1)
        return torch.cat((plain, rotate_pairs(turned, turn)), dim=-1)

    def expanded(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [keys, heads, query_dim] and values [keys, heads, value_dim] from stored latents [keys, ...]."""
        joint = self.latent_up(latent[:, : self.rank]).view(len(latent), self.heads, -1)
        plain, value = joint.split((self.query_parts[0], self.value_dim), dim=-1)
        turned = latent[:, self.rank :].unsqueeze(1).expand(-1, self.heads, -1)
        return torch.cat((plain, turned), dim=-1), value


def dense_when_short(longest: int, index_topk: int) -> bool:
    """Whether an eager step attends in the expanded form: where every key is seen anyway.

    Args:
        longest: keys that the token with the most of them sees.
        index_topk: keys that the indexer keeps.
    """
    return longest <= index_topk


def attend_selected(query: Tensor, latents: Tensor, selected: Tensor, scale: float, rank: int) -> Tensor:
    """Attention of absorbed queries over chosen slots, in pieces of rows that do not depend on how many there are.

    Args:
        query: [T, heads, latent_rank + head_dim].
        latents: [slots, 1, latent_rank + head_dim], a layer's cache.
        selected: [T, index_topk] int32, slots, then -1; a row of nothing but -1 is padding.
        scale: of the scores.
        rank: latent_rank; the mixtures are of this part.

    Returns:
        [T, heads, latent_rank] in the dtype of ``query``; zero for padding.
    """
    tokens, heads, width = query.shape
    kept = selected.shape[1]
    out = query.new_empty(tokens, heads, rank)
    rows = max(1, GATHERED_BYTES // (kept * width * query.element_size()))
    for first in range(0, tokens, rows):
        part = slice(first, first + rows)
        chosen = selected[part]
        unseen = chosen < 0
        # Padding repeats a token's first key, and in a padded row is the reserved slot: a mask alone would still
        # multiply whatever else is read by zero, and zero times NaN is NaN.
        slots = torch.where(unseen, chosen[:, :1].clamp_min(0), chosen).flatten()
        gathered = latents.index_select(0, slots).view(-1, kept, width).to(query.dtype)
        mask = torch.zeros_like(chosen, dtype=query.dtype).masked_fill_(unseen, float("-inf"))
        scores = torch.baddbmm(mask.unsqueeze(1), query[part], gathered.transpose(1, 2), alpha=scale)
        likely = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        mixed = torch.bmm(likely, gathered[..., :rank])
        out[part] = mixed.masked_fill(unseen[:, :1].unsqueeze(-1), 0.0)
    return out
