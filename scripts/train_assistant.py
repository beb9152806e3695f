"""Trains pico-gqa-assistant, the shipped frozen-KV draft, on what ``pico_continuations.py`` wrote.

    PYTHONPATH=. python scripts/train_assistant.py [--minutes 30 | --steps N] [--out data/drafts/pico-gqa-assistant]

Trains ``cglab.models.Assistant`` itself, as it drafts: at every position t of a text it takes token t + 1 and the
target's hidden state t, asks the target's keys and values of positions up to t, and goes on from its own hidden
state for three steps in which neither the position nor what it sees moves (S0). What is written, and when, is in
``draft_training.py``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from draft_training import CORPUS_TOKENS, parser_of, train
from frozen_windows import STEPS, FrozenTexts, unroll
from pico_continuations import CONTINUED
from torch import Tensor

from cglab.models.assistant import Assistant, AssistantConfig

STEP_WEIGHTS = (1.0, 0.8, 0.64)
SHAPE = AssistantConfig(
    vocab_size=4096,
    backbone_size=256,
    hidden_size=256,
    intermediate_size=512,
    layer_kinds=("full", "full"),
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)


def draft_loss(assistant: Assistant, texts: FrozenTexts, sharpness: float, hidden_weight: float) -> Tensor:
    """The loss of all steps over the continued part of texts, a step further counting less.

    Args:
        assistant: bound to the target.
        texts: what the target made of prompts and continuations.
        sharpness: the target's scores are multiplied by it, as greedy acceptance asks for its first choice alone.
        hidden_weight: of the smooth L1 distance to the hidden state that a step stands in for.

    Returns:
        Cross-entropy to the target's distribution in nats plus the weighted distance, a scalar.
    """
    length = texts.tokens.shape[1]
    first = length - CONTINUED - CORPUS_TOKENS
    last = min(int(texts.counted.max()), length - 1) - STEPS
    wanted = texts.hidden[:, first + 1 : last + 1 + STEPS]
    with torch.no_grad():
        likely = (assistant.target.logits(wanted).float() * sharpness).softmax(-1)
    position = torch.arange(first, last + 1, device=texts.tokens.device)
    total = wanted.new_zeros((), dtype=torch.float32)
    for step, (logits, hidden) in enumerate(unroll(assistant, texts, first, last, taught=True)):
        part = slice(step, step + last + 1 - first)
        learnt = (position + 1 + step < texts.counted.unsqueeze(1)).flatten().float()
        entropy = F.cross_entropy(logits.float(), likely[:, part].flatten(0, 1), reduction="none")
        distance = F.smooth_l1_loss(
            hidden.float(), wanted[:, part].flatten(0, 1).float(), reduction="none"
        ).mean(-1)
        losses = (entropy + hidden_weight * distance) * learnt
        total = total + STEP_WEIGHTS[step] * losses.sum() / learnt.sum()
    return total


def main() -> None:
    """Reads the command line and trains."""
    parser = parser_of(__doc__.splitlines()[0], "data/drafts/pico-gqa-assistant")
    parser.add_argument("--sharpness", type=float, default=1.0, help="of the target's scores in the loss")
    parser.add_argument("--hidden-weight", type=float, default=1.0, help="of the distance to hidden states")
    options = parser.parse_args()
    assistant = Assistant(SHAPE, device=options.device, dtype=torch.float32)

    def loss_of(texts: FrozenTexts) -> Tensor:
        return draft_loss(assistant, texts, options.sharpness, options.hidden_weight)

    facts = {"sharpness": options.sharpness, "hidden_weight": options.hidden_weight}
    train(assistant, loss_of, options, facts)


if __name__ == "__main__":
    main()
