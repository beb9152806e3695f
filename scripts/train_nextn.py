"""Trains pico-dsa-nextn, the shipped NextN layer, on what ``pico_continuations.py --model data/models/pico-dsa`` wrote.

    PYTHONPATH=. python scripts/train_nextn.py [--minutes 30 | --steps N] [--out data/drafts/pico-dsa-nextn]

Trains ``cglab.models.NextN`` itself, as it drafts: at every position t of a text it takes the target's hidden state
there and token t + 1, attends to what its indexer keeps of its own keys before, and learns what the target says of
token t + 2: half its distribution, half its first choice, which is what greedy acceptance asks for. The layer begins as
the target's last one. Its indexer learns where it attends and its router is balanced as in ``train_pico_dsa.py``. What
is written, and when, is in ``draft_training.py``.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from draft_training import CORPUS_TOKENS, parser_of, train
from nextn_windows import NextNTexts, draft_next
from pico_continuations import CONTINUED
from torch import Tensor
from train_pico_dsa import SHAPE, balance, routers_of

from cglab.models.nextn import NextN, nextn_config

EMBEDDED = 0.3  # of the weights that mix in the next token's embedding: the target's layer knows none


@torch.no_grad()
def begin_as_target(layer: NextN) -> None:
    """Makes the layer the target's last one over its hidden states, with a little of the next token's embedding.

    Args:
        layer: bound to a target whose last layer is routed and selects for itself, as ``nextn_config`` has it.
    """
    (block,) = layer.blocks
    block.load_state_dict(layer.target.blocks[-1].state_dict())
    layer.norm.load_state_dict(layer.target.norm.state_dict())
    embedded, hidden = layer.join.weight.chunk(2, dim=1)
    embedded.mul_(EMBEDDED)
    hidden.copy_(torch.eye(len(hidden)))


def entropy(
    layer: NextN, texts: NextNTexts, after: Tensor, sharpness: float, softness: float = 1.0
) -> Tensor:
    """Cross-entropy to what the target says over the continued part of texts, in nats, a scalar.

    Args:
        layer: bound to the target.
        texts: what the target made of prompts and continuations.
        after: what the layer made of them, as ``draft_next`` returns it.
        sharpness: the target's scores are multiplied by it, as greedy acceptance asks for its first choice alone.
        softness: from 0, to the target's first choice, to 1, to its distribution.
    """
    first = texts.tokens.shape[1] - CONTINUED - CORPUS_TOKENS
    with torch.no_grad():
        scores = layer.target.logits(texts.hidden[:, first + 1 :]).float()
        choice = scores.argmax(-1, keepdim=True)
        likely = (scores * sharpness).softmax(-1) * softness
        likely.scatter_add_(-1, choice, torch.full_like(choice, 1 - softness, dtype=likely.dtype))
    logits = layer.target.logits(after[:, first:]).float()
    each = F.cross_entropy(logits.flatten(0, 1), likely.flatten(0, 1), reduction="none")
    position = torch.arange(first, texts.tokens.shape[1] - 1, device=texts.tokens.device)
    learnt = (position + 1 < texts.counted.unsqueeze(1)).flatten().float()
    return (each * learnt).sum() / learnt.sum()


def draft_loss(layer: NextN, texts: NextNTexts, sharpness: float, softness: float) -> tuple[Tensor, Tensor]:
    """What is learnt from texts; the arguments are those of ``entropy``.

    Returns:
        The entropy plus the indexer's distance, in nats, a scalar; and [1, num_experts] float32, the tokens that each
        expert got.
    """
    after, attend = draft_next(layer, texts, taught=True)
    loss = entropy(layer, texts, after, sharpness, softness) + torch.stack(attend.distances).mean()
    return loss, torch.stack(attend.loads)


def main() -> None:
    """Reads the command line and trains."""
    parser = parser_of(__doc__.splitlines()[0], "data/drafts/pico-dsa-nextn")
    parser.set_defaults(model=Path("data/models/pico-dsa"))
    parser.add_argument("--sharpness", type=float, default=1.0, help="of the target's scores in the loss")
    parser.add_argument(
        "--softness", type=float, default=0.5, help="share of the target's distribution in the loss"
    )
    parser.add_argument(
        "--balance", type=float, default=1e-3, help="how far a step moves the router's biases"
    )
    options = parser.parse_args()
    layer = NextN(nextn_config(SHAPE), device=options.device, dtype=torch.float32)
    routers = routers_of(layer)

    def loss_of(texts: NextNTexts) -> Tensor:
        loss, loads = draft_loss(layer, texts, options.sharpness, options.softness)
        balance(routers, loads, options.balance)
        return loss

    facts = {name: getattr(options, name) for name in ("sharpness", "softness", "balance")}
    train(layer, loss_of, options, facts, begin_as_target)


if __name__ == "__main__":
    main()
