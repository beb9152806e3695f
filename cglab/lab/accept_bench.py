"""The accept bench: how many tokens a verify pass commits on held-out prompts, beside a draft by n-gram look-up.

Passes count by one rule for both: along the target's own greedy continuation, while all that a pass drafts lies before
the place where the text ends or turns periodic. A draft that is right about repetition is right about nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import mean
from typing import Any

import torch

from cglab.engine.acceptance import AcceptLengths
from cglab.engine.lookup_draft import lookup_draft
from cglab.engine.requests import Request
from cglab.engine.speculation import Speculation
from cglab.errors import InputError
from cglab.lab.drafting import SHIPPED, SHIPPED_BLOCK, SHIPPED_NEXTN, plan_draft
from cglab.lab.facade import Lab
from cglab.lab.opening import open_lab
from cglab.lab.prompts import held_out
from cglab.lab.step_metrics import Progress, model_facts, silent
from cglab.measure.acceptance_rule import counted_length, distinct_ngrams
from cglab.measure.record import Record, make_record, new_run
from cglab.models.loading import find_model

LOOK_UP = "n-gram look-up"
WANTED = {(SHIPPED, 3): 2.5, (SHIPPED_BLOCK, 7): 3.0, (SHIPPED_NEXTN, 1): 1.8}
"""Tokens that a verify pass must commit on average, its own included, by draft and its steps."""


@dataclass(frozen=True)
class Counted:
    """A prompt, and the part of the target's continuation that counts.

    Attributes:
        prompt: token ids.
        continuation: token ids, up to where the text ends or turns periodic.
    """

    prompt: list[int]
    continuation: list[int]


def counted_texts(lab: Lab, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Counted]:
    """Continues prompts greedily, without a draft's help where the lab has none, and keeps what counts.

    Args:
        lab: in float32, so that no ties are rounded away.
        prompts: token ids.
        new_tokens: to continue by.
    """
    found = lab.generate(prompts, new_tokens, stop_at_end=False).tokens
    ends = lab.config.eos_token_ids
    return [
        Counted(list(prompt), tokens[: counted_length(tokens, ends)])
        for prompt, tokens in zip(prompts, found, strict=True)
    ]


def counted_passes(lengths: Sequence[int], counted: int, steps: int) -> list[int]:
    """The passes along a continuation that count.

    Args:
        lengths: tokens that each pass committed, in order; the first starts at the token that prefill gave.
        counted: tokens of the continuation that count.
        steps: drafted tokens of a pass.
    """
    kept, bonus = [], 0
    for length in lengths:
        if bonus + steps >= counted:
            break
        kept.append(length)
        bonus += length
    return kept


def drafted_passes(lab: Lab, texts: Sequence[Counted], steps: int) -> list[list[int]]:
    """Tokens of every pass that counts, by text, as the lab's draft and the target make them together.

    Args:
        lab: with a draft of ``steps`` steps, greedy.
        texts: to be continued.
        steps: drafted tokens of a pass.
    """
    requests = [
        # What the last pass that counts commits may lie a step beyond the part that counts.
        Request(index, text.prompt, len(text.continuation) + steps)
        for index, text in enumerate(texts)
    ]
    list(lab.stream(requests))
    found = []
    for request, text in zip(requests, texts, strict=True):
        # All tokens of a pass come at once; the first is the prefill's.
        lengths = [len(list(tokens)) for _, tokens in groupby(request.token_times[1:])]
        found.append(counted_passes(lengths, len(text.continuation), steps))
    return found


def looked_up_passes(text: Counted, steps: int) -> list[int]:
    """The same with drafts from the text itself, without a model."""
    tokens, wanted, lengths, bonus = text.prompt + text.continuation, text.continuation, list[int](), 0
    while bonus + steps < len(wanted):
        draft = lookup_draft(tokens[: len(text.prompt) + bonus + 1], steps)
        pairs = zip(draft, wanted[bonus + 1 :], strict=False)
        right = next((place for place, (one, other) in enumerate(pairs) if one != other), len(draft))
        lengths.append(1 + right)
        bonus += 1 + right
    return lengths


def told(passes: Sequence[Sequence[int]], steps: int) -> AcceptLengths:
    """The three flavours of accept length, over the passes that count."""
    accepted = AcceptLengths()
    for lengths in passes:
        for length in lengths:
            accepted.verified(length, steps, 0)
        accepted.completed(1 + sum(lengths), len(lengths))
    return accepted


def accept(
    device: torch.device, *, quick: bool = False, progress: Progress = silent, draft: str = SHIPPED,
    model: str = "pico-gqa", steps: int | None = None, new_tokens: int = 200, prompts: int = 72,
) -> Iterator[Record]:  # fmt: skip
    """Accept length of a draft on held-out prompts, by the counting rule, and of an n-gram look-up.

    Args:
        device: where it runs, in float32.
        quick: few prompts and tokens.
        progress: called with a line for every stage.
        draft: of that model, such as a shipped one.
        model: the target, such as ``pico-dsa`` for its NextN layer.
        steps: of a draft, one candidate each; None for the draft's own number.
        new_tokens: that the target continues each prompt by, before the rule cuts.
        prompts: the first so many of the held-out ones.

    Yields:
        A record for each draft: metrics in three flavours, the distribution, and passes and tokens of every prompt.

    Raises:
        InputError: for more prompts than are held out, or fewer than one, or no tokens.
    """
    known = held_out()
    if not 1 <= prompts <= len(known) or new_tokens < 1:
        raise InputError(
            f"prompts={prompts}, new_tokens={new_tokens}: there are {len(known)} held-out prompts; give 1 to "
            f"{len(known)} of them, and 1 new token or more"
        )
    run, texts = new_run(), known[: 6 if quick else prompts]
    new_tokens = 40 if quick else new_tokens
    plan = plan_draft(draft, None if steps is None else Speculation(steps), find_model(model).config)
    if plan is None:
        raise InputError("no draft is named; give one, such as draft=pico-gqa-assistant")
    steps = plan.speculation.steps
    batch = min(24, len(texts))
    sizes: dict[str, Any] = {
        "device": device, "dtype": torch.float32, "max_batch": batch, "buckets": [batch],
        "max_context": max(map(len, texts)) + new_tokens + steps,
    }  # fmt: skip
    progress("continuations of the target alone")
    with open_lab(model, **sizes) as plain:
        counted = counted_texts(plain, texts, new_tokens)
    progress("the same with drafts")
    with open_lab(model, draft=draft, speculation=plan.speculation, **sizes) as lab:
        found = {draft: drafted_passes(lab, counted, steps)}
        facts = model_facts(lab)
    found[LOOK_UP] = [looked_up_passes(text, steps) for text in counted]
    best = {name: told(passes, steps) for name, passes in found.items()}
    for name, passes in found.items():
        length, other = best[name].tokens_per_pass or 0.0, best[LOOK_UP].tokens_per_pass or 0.0
        wanted = None if quick else WANTED.get((name, steps))
        held = {} if wanted is None else {"ok": length >= wanted and length > other}
        yield make_record(
            bench="accept", arm=name, device=device, run=run, **facts,
            workload={"prompts": len(texts), "new_tokens": new_tokens, "draft_steps": steps, "topk": 1},
            metrics=_metrics(best[name], counted, steps) | held,
            samples={
                "passes": [float(len(lengths)) for lengths in passes],
                "committed": [float(sum(lengths)) for lengths in passes],
            },
            notes="Passes of every prompt and the tokens that they committed are the samples. Float32.",
        )  # fmt: skip


def _metrics(accepted: AcceptLengths, texts: Sequence[Counted], steps: int) -> dict[str, Any]:
    shares = accepted.distribution
    return {
        "tokens_per_pass": accepted.tokens_per_pass, "accept_rate": accepted.accept_rate,
        "completion_per_pass": accepted.completion_per_pass, "passes": float(accepted.passes.total()),
        **{f"share_{length}": shares.get(length, 0.0) for length in range(1, steps + 2)},
        "tokens_counted": float(sum(len(text.continuation) for text in texts)),
        "distinct_4grams": mean(distinct_ngrams(text.continuation) for text in texts),
    }  # fmt: skip
