"""What an assistant sees and drafts at every position of whole texts at once: for training and measuring it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from draft_texts import Texts
from pico_continuations import WindowCache
from torch import Tensor

from cglab.models.assistant import Assistant, FrozenAttention
from cglab.models.decoder import Decoder

STEPS = 3


@dataclass(frozen=True)
class FrozenTexts(Texts):
    """Texts, and what an assistant sees of them.

    Attributes:
        hidden: [texts, length, backbone_size], the target's normed final hidden states.
        keys: [texts, kv_heads, length, head_dim] of the layer that the assistant asks, turned to their positions.
        values: likewise.
    """

    hidden: Tensor
    keys: Tensor
    values: Tensor


class FrozenWindows(FrozenAttention):
    """A frozen step at many positions of whole texts at once, without a cache.

    Args:
        texts: whose keys and values are seen.
        first: the first position that asks.
        last: the last one; each sees the positions up to its own.
    """

    def __init__(self, texts: FrozenTexts, first: int, last: int) -> None:
        self.keys, self.values = (part[:, :, : last + 1] for part in (texts.keys, texts.values))
        positions = torch.arange(last + 1, device=self.keys.device)
        seen = positions <= positions[first:].unsqueeze(1)
        self.mask = torch.zeros(seen.shape, device=seen.device, dtype=self.keys.dtype)
        self.mask.masked_fill_(~seen, -math.inf)

    def attend(self, layer_index: int, query: Tensor) -> Tensor:
        """See ``FrozenAttention``; the query's rows are those of one text after the other."""
        texts, kv_heads, _, head_dim = self.keys.shape
        heads = query.unflatten(0, (texts, -1)).transpose(1, 2)
        asked = heads.shape[2]
        # Query heads of a group one after the other: keys and values are read once.
        grouped = heads.reshape(texts, kv_heads, -1, head_dim)
        mask = self.mask.to(query.dtype).repeat(grouped.shape[2] // asked, 1)
        keys, values = self.keys.to(query.dtype), self.values.to(query.dtype)
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return attended.view_as(heads).transpose(1, 2).flatten(0, 1).flatten(1)


@torch.no_grad()
def observe(target: Decoder, tokens: Tensor, counted: Tensor, *, layer: int) -> FrozenTexts:
    """Runs the target over texts [texts, length] int64 and keeps what an assistant bound to ``layer`` sees."""
    texts, length = tokens.shape
    cache = WindowCache(target.config, texts, length, target.norm.weight)
    hidden = target(tokens.flatten(), torch.arange(length, device=tokens.device).repeat(texts), cache)
    keys, values = cache.keys[layer].clone(), cache.values[layer].clone()
    return FrozenTexts(tokens, counted, hidden.unflatten(0, (texts, length)), keys, values)


def unroll(
    assistant: Assistant, texts: FrozenTexts, first: int, last: int, *, taught: bool
) -> list[tuple[Tensor, Tensor]]:
    """Drafts from every position between two, as a decode step would from each.

    Args:
        assistant: bound to the target.
        texts: at least ``last + STEPS`` tokens long if taught, else ``last + 2``.
        first: the first position t; token t + 1 is the bonus token there.
        last: the last one.
        taught: later steps take the text's tokens, not the assistant's own.

    Returns:
        Of each step logits [texts * positions, vocabulary] and hidden states [texts * positions, backbone_size].
    """
    positions = torch.arange(first, last + 1, device=texts.tokens.device).repeat(len(texts.tokens))
    attend = FrozenWindows(texts, first, last)
    inputs, hidden = (
        texts.tokens[:, first + 1 : last + 2].flatten(),
        texts.hidden[:, first : last + 1].flatten(0, 1),
    )
    results: list[tuple[Tensor, Tensor]] = []
    for step in range(1, STEPS + 1):
        logits, hidden = assistant(inputs, hidden, positions, attend)
        results.append((logits, hidden))
        if step < STEPS:
            ahead = texts.tokens[:, first + 1 + step : last + 2 + step]
            inputs = ahead.flatten() if taught else logits.argmax(-1)
    return results
