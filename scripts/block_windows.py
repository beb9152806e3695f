"""What a block draft sees and drafts at many positions of whole texts at once: for training and measuring it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from draft_texts import Texts
from pico_continuations import WindowCache
from torch import Tensor

from cglab.models.block_draft import BlockDraft
from cglab.models.decoder import Decoder, Taps


@dataclass(frozen=True)
class BlockTexts(Texts):
    """Texts, and what a block draft sees of them.

    Attributes:
        features: [texts, length, context layers * backbone_size], the target's residual stream; see ``decoder.Taps``.
    """

    features: Tensor


class _Kept(list[Tensor]):
    """Keys and values of one draft layer, as ``materialise`` stores them: [texts * length, kv_heads, head_dim]."""

    def store(self, key: Tensor, value: Tensor) -> None:
        self[:] = key, value


class BlockWindows:
    """Attention of blocks at many positions of whole texts, in place of a ``CacheAttention``.

    Each block sees all of itself and the context up to its anchor, and nothing of other blocks.

    Args:
        anchors: [texts, blocks] int64, the last position of the context of each block.
        length: positions of each text.
    """

    def __init__(self, anchors: Tensor, length: int) -> None:
        self.anchors = anchors
        self._layers: dict[int, _Kept] = {}
        positions = torch.arange(length, device=anchors.device)
        self._unseen = (positions > anchors.unsqueeze(-1))[:, None, :, None]  # of every head and row

    def cache(self, layer_index: int) -> _Kept:
        """Where ``materialise`` stores the context of a layer."""
        return self._layers.setdefault(layer_index, _Kept())

    def __call__(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See ``decoder.Attend``; rows are those of one block after the other, text by text."""
        texts, blocks = self.anchors.shape
        group = query.shape[1] // key.shape[1]

        def heads(tensor: Tensor, repeats: int, *rows: int) -> Tensor:
            """[texts, heads, *rows, head_dim]."""
            repeated = tensor.to(query.dtype).repeat_interleave(repeats, 1)
            return repeated.unflatten(0, (texts, *rows)).movedim(-2, 1)

        asked = heads(query, 1, blocks, -1) * query.shape[-1] ** -0.5
        own_keys, own_values = (heads(each, group, blocks, -1) for each in (key, value))
        keys, values = (heads(each, group, -1) for each in self._layers[layer_index])
        context = torch.einsum("thbqd,thkd->thbqk", asked, keys).masked_fill(self._unseen, -math.inf)
        weights = torch.cat((context, asked @ own_keys.mT), -1).softmax(-1)
        before, inside = weights.split((keys.shape[-2], own_keys.shape[-2]), -1)
        attended = torch.einsum("thbqk,thkd->thbqd", before.to(values.dtype), values)
        attended = attended + inside.to(values.dtype) @ own_values
        return attended.movedim(1, -2).flatten(0, 2).flatten(1)


@torch.no_grad()
def observe_blocks(
    target: Decoder, tokens: Tensor, counted: Tensor, *, layers: tuple[int, ...]
) -> BlockTexts:
    """Runs the target over texts [texts, length] int64 and keeps the residual stream after these layers."""
    texts, length = tokens.shape
    cache, taps = WindowCache(target.config, texts, length, target.norm.weight), Taps(layers)
    target(tokens.flatten(), torch.arange(length, device=tokens.device).repeat(texts), cache, taps)
    return BlockTexts(tokens, counted, taps.features().unflatten(0, (texts, length)))


def draft_blocks(draft: BlockDraft, texts: BlockTexts, anchors: Tensor) -> Tensor:
    """Drafts from positions of texts, as a decode step would from each.

    Args:
        draft: bound to the target.
        texts: with at least one token after every anchor.
        anchors: [texts, blocks] int64, positions t up to which the context is seen; token t + 1 is the known one.

    Returns:
        [texts, blocks, block_size, backbone_size], normed; row i of a block predicts token t + 1 + i, for i from 1 on.
    """
    (count, length), width = texts.tokens.shape, draft.config.block_size
    attend: Any = BlockWindows(anchors, length)
    everywhere = torch.arange(length, device=anchors.device).repeat(count)
    draft.materialise(texts.features.flatten(0, 1), everywhere, attend)
    ids = anchors.new_full((*anchors.shape, width), draft.config.mask_token_id)
    ids[..., 0] = texts.tokens.gather(1, anchors + 1)
    positions = anchors.unsqueeze(-1) + 1 + torch.arange(width, device=anchors.device)
    return draft(ids.flatten(), positions.flatten(), attend).view(*anchors.shape, width, -1)
