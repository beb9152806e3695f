"""What a NextN layer sees and drafts at every position of whole texts at once: for training and measuring it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from draft_texts import Texts
from latent_windows import LatentWindows
from torch import Tensor

from cglab.errors import ModelError
from cglab.models.decoder import Decoder
from cglab.models.dsa_config import DsaConfig
from cglab.models.nextn import NextN


@dataclass(frozen=True)
class NextNTexts(Texts):
    """Texts, and what a NextN layer sees of them.

    Attributes:
        hidden: [texts, length, hidden_size], the target's normed final hidden states.
    """

    hidden: Tensor


@torch.no_grad()
def observe_hidden(target: Decoder, tokens: Tensor, counted: Tensor) -> NextNTexts:
    """Runs a target over texts [texts, length] int64, sparse as at inference.

    Raises:
        ModelError: for a target without latent attention.
    """
    if not isinstance(target.config, DsaConfig):
        raise ModelError(f"a NextN layer drafts for no {target.config.architecture}; give its own target")
    texts, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(texts)
    hidden = target(tokens.flatten(), positions, LatentWindows(length, target.config.index_topk))
    return NextNTexts(tokens, counted, hidden.unflatten(0, (texts, length)))


def draft_next(layer: NextN, texts: NextNTexts, *, taught: bool = False) -> tuple[Tensor, LatentWindows]:
    """Drafts from every position of texts but the last, as a decode step would from each.

    Args:
        layer: bound to the target.
        texts: what the target made of them.
        taught: whether the second result is kept track of.

    Returns:
        [texts, length - 1, hidden_size], normed: at position t, where token t + 1 is known, it predicts token t + 2;
        and what the layer asked, with its indexer's distance and its router's load.
    """
    count, length = texts.tokens.shape
    attend = LatentWindows(length - 1, layer.config.index_topk, taught=taught)
    positions = torch.arange(length - 1, device=texts.tokens.device).repeat(count)
    after: Tensor = layer(
        texts.tokens[:, 1:].flatten(), texts.hidden[:, :-1].flatten(0, 1), positions, attend
    )
    return after.unflatten(0, (count, length - 1)), attend
