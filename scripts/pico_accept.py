"""Accept length of a draft on held-out prompts, along the target's own greedy continuations.

    PYTHONPATH=. python scripts/pico_accept.py [--draft data/drafts/pico-gqa-assistant] [--tokens 200]

A verify pass commits the drafted tokens that the target would have taken and one of its own, the bonus, so that the
accept length is 1 to 4 with three drafted tokens, and 1 to 2 with a NextN layer. Passes count while all that they draft
lies before the place where the target's continuation ends or turns periodic. An n-gram look-up draft is measured on
the same prompts.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, NamedTuple

import torch
from block_windows import BlockTexts, draft_blocks, observe_blocks
from draft_texts import Observe, T
from frozen_windows import STEPS, FrozenTexts, observe, unroll
from nextn_windows import NextNTexts, draft_next, observe_hidden
from pico_continuations import continue_texts

from cglab.engine.lookup_draft import lookup_draft
from cglab.measure.acceptance_rule import counted_length, distinct_ngrams
from cglab.models.assistant import Assistant
from cglab.models.block_draft import BlockDraft
from cglab.models.decoder import Decoder
from cglab.models.drafts import DraftModel, load_draft
from cglab.models.loading import load_model
from cglab.models.nextn import NextN

Draft = Callable[[int], list[int]]


@dataclass(frozen=True)
class HeldOut(Generic[T]):
    """A held-out prompt with the part of the target's greedy continuation that counts.

    Attributes:
        prompt: token ids.
        continuation: token ids up to where the text ends or turns periodic.
        texts: both as one text, with what the target made of it.
    """

    prompt: list[int]
    continuation: list[int]
    texts: T


Continued = list[tuple[list[int], list[int]]]  # prompts, each with what counts of its greedy continuation


def continued(target: Decoder, prompts: Iterable[list[int]], count: int) -> Continued:
    """Continues prompts greedily, each length in one batch.

    Args:
        target: in float32, so that no ties are rounded away.
        prompts: token ids.
        count: tokens to continue by.
    """
    device, found = target.norm.weight.device, []
    for _, equal in groupby(sorted(prompts, key=len), key=len):
        batch = torch.tensor(list(equal), device=device)
        texts = continue_texts(target, batch, count)
        for prompt, tokens in zip(batch.tolist(), texts.tolist(), strict=True):
            found.append((prompt, tokens[: counted_length(tokens, target.config.eos_token_ids)]))
    return found


def observed(target: Decoder, texts: Continued, observe: Observe[T]) -> list[HeldOut[T]]:
    """What a draft sees of prompts and their continuations; ``observe`` keeps it."""
    device, found = target.norm.weight.device, []
    for prompt, kept in texts:
        tokens = torch.tensor([prompt + kept], device=device)
        counted = torch.tensor([tokens.shape[1]], device=device)
        found.append(HeldOut(prompt, kept, observe(target, tokens, counted)))
    return found


def held_out_texts(
    target: Decoder, prompts: Iterable[list[int]], observe: Observe[T], count: int
) -> list[HeldOut[T]]:
    """Both: prompts continued by ``count`` tokens, and what a draft sees of them."""
    return observed(target, continued(target, prompts, count), observe)


def passes(continuation: list[int], draft: Draft, steps: int) -> list[int]:
    """Accept length of every verify pass along a continuation.

    Args:
        continuation: the target's tokens; the first comes from the prefill.
        draft: the drafted tokens after the bonus token at an index of the continuation.
        steps: drafted tokens of a pass.

    Returns:
        1 + accepted drafts of each pass whose ``steps`` drafted tokens all lie within the continuation.
    """
    lengths, bonus = [], 0
    while bonus + steps < len(continuation):
        accepted = 0
        for drafted, wanted in zip(draft(bonus), continuation[bonus + 1 : bonus + 1 + steps], strict=False):
            if drafted != wanted:
                break
            accepted += 1
        lengths.append(1 + accepted)
        bonus += 1 + accepted
    return lengths


@torch.no_grad()
def assistant_passes(assistant: Assistant, held_out: HeldOut[FrozenTexts]) -> list[int]:
    """Accept length of every pass with the assistant's drafts, all computed at once."""
    if len(held_out.continuation) <= STEPS:
        return []
    first = len(held_out.prompt) - 1
    last = first + len(held_out.continuation) - 1 - STEPS
    steps = unroll(assistant, held_out.texts, first, last, taught=False)
    drafted = torch.stack([logits.argmax(-1) for logits, _ in steps], dim=1).tolist()
    return passes(held_out.continuation, drafted.__getitem__, STEPS)


@torch.no_grad()
def block_passes(draft: BlockDraft, held_out: HeldOut[BlockTexts]) -> list[int]:
    """The same with blocks."""
    steps, prompt = draft.config.block_size - 1, len(held_out.prompt)
    starts = len(held_out.continuation) - steps
    if starts <= 0:
        return []
    anchors = torch.arange(prompt - 1, prompt - 1 + starts, device=held_out.texts.tokens.device)
    hidden = draft_blocks(draft, held_out.texts, anchors.unsqueeze(0))
    drafted = draft.target.logits(hidden[0, :, 1:]).argmax(-1).tolist()
    return passes(held_out.continuation, drafted.__getitem__, steps)


@torch.no_grad()
def nextn_passes(layer: NextN, held_out: HeldOut[NextNTexts]) -> list[int]:
    """The same with a NextN layer, which drafts one token."""
    after, _ = draft_next(layer, held_out.texts)
    drafted = layer.target.logits(after[0, len(held_out.prompt) - 1 :]).argmax(-1).unsqueeze(1).tolist()
    return passes(held_out.continuation, drafted.__getitem__, 1)


def lookup_passes(held_out: HeldOut[Any], steps: int) -> list[int]:
    """Accept length of every pass with look-up drafts."""
    text, prompt = held_out.prompt + held_out.continuation, len(held_out.prompt)
    return passes(held_out.continuation, lambda bonus: lookup_draft(text[: prompt + bonus + 1], steps), steps)


def summary(lengths: list[list[int]], held_out: Sequence[HeldOut[Any]], steps: int) -> dict[str, Any]:
    """Mean over all passes, their distribution, and what they were counted on.

    Args:
        lengths: of the passes of each prompt.
        held_out: the prompts.
        steps: drafted tokens of a pass.
    """
    every = Counter(length for prompt in lengths for length in prompt)
    distinct = [distinct_ngrams(text.continuation) for text in held_out]
    return {
        "accept_length": sum(length * count for length, count in every.items()) / every.total(),
        "distribution": {
            str(length): round(every[length] / every.total(), 4) for length in range(1, steps + 2)
        },
        "passes": every.total(),
        "prompts": len(held_out),
        "tokens_counted": sum(len(text.continuation) for text in held_out),
        "distinct_4grams": sum(distinct) / len(distinct),
    }


class Measure(NamedTuple):
    """How drafts of a kind are measured.

    Attributes:
        observe: keeps what the draft sees of a text.
        passes: of a held-out prompt, with a draft of this kind.
        steps: drafted tokens of a pass.
    """

    observe: Observe[Any]
    passes: Callable[[Any, HeldOut[Any]], list[int]]
    steps: int


def measure_of(draft: DraftModel) -> Measure:
    """How this draft is measured."""
    if isinstance(draft, BlockDraft):
        watch = partial(observe_blocks, layers=draft.config.context_layers)
        return Measure(watch, block_passes, draft.config.block_size - 1)
    if isinstance(draft, NextN):
        return Measure(observe_hidden, nextn_passes, 1)
    return Measure(partial(observe, layer=draft.layers[-1]), assistant_passes, STEPS)


def main() -> None:
    """Reads the command line and prints both measures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("data/models/pico-gqa"))
    parser.add_argument("--draft", type=Path, default=Path("data/drafts/pico-gqa-assistant"))
    parser.add_argument("--tokens", type=int, default=200, help="greedy tokens after each prompt")
    options = parser.parse_args()
    target = load_model(options.model, device="cpu", dtype=torch.float32).model
    draft = load_draft(options.draft, target).model
    prompts = [prompt["ids"] for prompt in json.loads((options.model / "prompts.json").read_text())]
    kind = measure_of(draft)
    held_out = held_out_texts(target, prompts, kind.observe, options.tokens)
    found = {
        "draft": [kind.passes(draft, text) for text in held_out],
        "look-up": [lookup_passes(text, kind.steps) for text in held_out],
    }
    print(json.dumps({name: summary(each, held_out, kind.steps) for name, each in found.items()}, indent=1))


if __name__ == "__main__":
    main()
