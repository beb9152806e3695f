"""Trains pico-gqa-dflash, the shipped block draft, on what ``pico_continuations.py`` wrote.

    PYTHONPATH=. python scripts/train_block_draft.py [--minutes 30 | --steps N] [--out data/drafts/pico-gqa-dflash]

Trains ``cglab.models.BlockDraft`` itself, as it drafts: from random positions t of every text a block of token t + 1
and masks, whose tokens see each other, and keys and values that ``materialise`` projects from the target's features of
positions up to t (S4). It learns the tokens after t + 1, a further one counting less. What is written, and when, is in
``draft_training.py``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from block_windows import BlockTexts, draft_blocks
from draft_training import CORPUS_TOKENS, parser_of, train
from pico_continuations import CONTINUED
from torch import Tensor

from cglab.models.block_draft import BlockDraft, BlockDraftConfig

SHAPE = BlockDraftConfig(
    vocab_size=4096,
    backbone_size=256,
    intermediate_size=448,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    block_size=8,
    mask_token_id=188,  # the byte 0xFF, which no text in UTF-8 has
    context_layers=(1, 2, 3, 4, 5),
)


def random_anchors(texts: BlockTexts, count: int) -> Tensor:
    """[texts, count] int64: from a few tokens before the continuation on, with one to learn after the known one."""
    first = texts.tokens.shape[1] - CONTINUED - CORPUS_TOKENS
    room = (texts.counted - 2 - first).clamp(min=1).unsqueeze(1)
    drawn = torch.rand(len(texts.tokens), count, device=texts.tokens.device)
    return first + (drawn * room).long()


def block_loss(draft: BlockDraft, texts: BlockTexts, anchors: Tensor, decay: float) -> Tensor:
    """The loss of blocks at these positions, the i-th token of a block counting ``exp(-(i - 1) / decay)``.

    Args:
        draft: bound to the target.
        texts: what the target made of prompts and continuations.
        anchors: [texts, blocks] int64, as ``draft_blocks`` takes them.
        decay: tokens after which the weight has fallen to a third.

    Returns:
        Cross-entropy to the target's continuation in nats, a weighted mean; a scalar.
    """
    ahead = torch.arange(1, draft.config.block_size, device=anchors.device)
    place = anchors.unsqueeze(-1) + 1 + ahead  # [texts, blocks, block_size - 1]
    counted = place < texts.counted[:, None, None]
    within = place.clamp(max=texts.tokens.shape[1] - 1)
    wanted = texts.tokens.gather(1, within.flatten(1))
    hidden = draft_blocks(draft, texts, anchors)[..., 1:, :]
    logits = draft.target.logits(hidden.flatten(0, -2)).float()
    losses = F.cross_entropy(logits, wanted.flatten(), reduction="none").view_as(place)
    weights = torch.exp((1 - ahead) / decay) * counted
    return (losses * weights).sum() / weights.sum()


def main() -> None:
    """Reads the command line and trains."""
    parser = parser_of(__doc__.splitlines()[0], "data/drafts/pico-gqa-dflash")
    parser.add_argument("--blocks", type=int, default=32, help="of each text in a step")
    parser.add_argument("--decay", type=float, default=4.0, help="tokens after which one counts a third")
    options = parser.parse_args()
    draft = BlockDraft(SHAPE, device=options.device, dtype=torch.float32)

    def loss_of(texts: BlockTexts) -> Tensor:
        return block_loss(draft, texts, random_anchors(texts, options.blocks), options.decay)

    train(draft, loss_of, options, {"blocks": options.blocks, "decay": options.decay})


if __name__ == "__main__":
    main()
