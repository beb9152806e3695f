"""Trains pico-gqa-dflash, the shipped block draft, on what ``pico_continuations.py`` wrote.

    PYTHONPATH=. python scripts/train_block_draft.py [--minutes 30 | --steps N] [--out data/drafts/pico-gqa-dflash]

Trains ``cglab.models.BlockDraft`` itself, as it drafts: from positions t all along the continuation a block of token
t + 1 and masks, whose tokens see each other, and keys and values that ``materialise`` projects from the target's
features of positions up to t (S4). It learns the tokens after t + 1, each as much as the accept length hangs on it.
What is written, and when, is in ``draft_training.py``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from block_windows import BlockTexts, draft_blocks
from draft_training import parser_of, train
from pico_continuations import CONTINUED
from torch import Tensor

from cglab.models.block_draft import BlockDraft, BlockDraftConfig
from cglab.models.decoder import Decoder

SHAPE = BlockDraftConfig(
    vocab_size=4096,
    backbone_size=256,
    intermediate_size=384,
    num_layers=5,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    block_size=8,
    mask_token_id=188,  # the byte 0xFF, which no text in UTF-8 has
    context_layers=(0, 1, 2, 3, 4, 5),
)


def anchors_every(texts: BlockTexts, stride: int) -> Tensor:
    """Positions to draft from, all along the continuation as long as any text counts.

    Args:
        texts: what the target made of prompts and continuations.
        stride: tokens from one to the next; the first is random.

    Returns:
        [texts, blocks] int64. Those behind a text's own end have nothing to learn.
    """
    length, device = texts.tokens.shape[1], texts.tokens.device
    prompt = length - CONTINUED
    every = torch.arange(prompt - 1, int(texts.counted.max()) - 2, stride, device=device)
    first = torch.randint(stride, (len(texts.tokens), 1), device=device)
    return (every + first).clamp(max=length - 2)


def reach_weights(entropy: Tensor, counted: Tensor, smoothing: float) -> Tensor:
    """What each drafted token weighs: how much of the expected accept length hangs on it, as far as the draft has come.

    A token counts if all before it are right, and opens those after it. Without smoothing the loss has the gradient of
    the expected accept length itself, which teaches nothing behind a token that is not learnt yet (D-PACE,
    arXiv:2605.18810).

    Args:
        entropy: [..., drafted] of each token, in nats.
        counted: [..., drafted] bool, whether it is learnt; none after one that is not.
        smoothing: from 0 to 1, what every token is trusted with at least.

    Returns:
        [..., drafted], at most as many as tokens follow, this one included.
    """
    trusted = smoothing + (1 - smoothing) * torch.exp(-entropy)
    reached = (trusted * counted).cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1)


def likely_tokens(texts: BlockTexts, target: Decoder, place: Tensor) -> Tensor:
    """The target's distribution of the tokens at ``place`` [texts, ...] of texts: [tokens, vocab_size] float32.

    Read off the last of the layers that the draft sees, which is why that must be the target's last one.
    """
    last = texts.features[..., -target.config.hidden_size :]
    rows = torch.arange(len(last), device=place.device).unsqueeze(1)
    before = last[rows, place.flatten(1) - 1].flatten(0, 1)
    return target.logits(target.norm(before)).float().softmax(-1)


def block_loss(
    draft: BlockDraft, texts: BlockTexts, anchors: Tensor, smoothing: float, softness: float = 0.0
) -> Tensor:
    """The loss of blocks at these positions.

    Args:
        draft: bound to the target.
        texts: what the target made of prompts and continuations.
        anchors: [texts, blocks] int64, as ``draft_blocks`` takes them.
        smoothing: see ``reach_weights``.
        softness: from 0, cross-entropy to the target's own tokens, to 1, to its distribution after those before.

    Returns:
        Cross-entropy in nats, weighted, the sum of a block; a scalar, the mean.
    """
    ahead = torch.arange(1, draft.config.block_size, device=anchors.device)
    place = anchors.unsqueeze(-1) + 1 + ahead  # [texts, blocks, block_size - 1]
    counted = place < texts.counted[:, None, None]
    within = place.clamp(max=texts.tokens.shape[1] - 1)
    wanted = texts.tokens.gather(1, within.flatten(1)).flatten()
    hidden = draft_blocks(draft, texts, anchors)[..., 1:, :]
    logits = draft.target.logits(hidden.flatten(0, -2)).float()
    entropy = F.cross_entropy(logits, wanted, reduction="none")
    weights = reach_weights(entropy.detach().view_as(place), counted, smoothing)
    if softness:
        with torch.no_grad():
            likely = likely_tokens(texts, draft.target, within)
        entropy = entropy.lerp(F.cross_entropy(logits, likely, reduction="none"), softness)
    return (entropy.view_as(place) * weights).sum() / anchors.numel()


def main() -> None:
    """Reads the command line and trains."""
    parser = parser_of(__doc__.splitlines()[0], "data/drafts/pico-gqa-dflash")
    parser.add_argument("--layers", type=int, default=SHAPE.num_layers, help="of the draft")
    parser.add_argument("--stride", type=int, default=2, help="tokens from one block of a text to the next")
    parser.add_argument(
        "--smoothing", type=float, default=0.5, help="of the weights of the tokens of a block"
    )
    parser.add_argument(
        "--softness", type=float, default=0.5, help="share of the target's distribution in the loss"
    )
    options = parser.parse_args()
    shape = replace(SHAPE, num_layers=options.layers)
    draft = BlockDraft(shape, device=options.device, dtype=torch.float32)

    def loss_of(texts: BlockTexts) -> Tensor:
        # A batch of short texts has few blocks, as it would have few passes: it counts that much less.
        anchors = anchors_every(texts, options.stride)
        share = anchors.shape[1] * options.stride / CONTINUED
        return share * block_loss(draft, texts, anchors, options.smoothing, options.softness)

    facts = {"stride": options.stride, "smoothing": options.smoothing, "softness": options.softness}
    train(draft, loss_of, options, facts)


if __name__ == "__main__":
    main()
