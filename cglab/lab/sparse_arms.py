"""Requests through every arm of a sparse prefill: logits to the bit and greedy tokens, captured and padded alike (S3).

Requests come fresh, after a cached prefix, in chunks and side by side, with lengths around the edge of every bucket and
around the keys that are kept. The schedule is the same in every arm, since it follows from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch

from cglab.engine.requests import Request
from cglab.graphs.coverage import Coverage
from cglab.graphs.out_forms import same_bits
from cglab.lab.facade import Lab
from cglab.lab.sparse_prefill import SparseArm, require_latent
from cglab.lab.techniques import SPARSE
from cglab.lab.watched import Watched, WatchedEngine

ARMS: Final = (
    SparseArm("breakable", attention="eager", preparation="eager"),
    SparseArm("breakable", preparation="eager"),
    SparseArm("breakable"),
    SparseArm("full"),
)
"""The whole indexer and attention as breaks, T8, T9, and T9b; the first is what the others are compared with."""
NEW_TOKENS = 4


@dataclass(frozen=True)
class ArmParity:
    """One arm against the first.

    Attributes:
        arm: its name.
        requests: how many were compared.
        differing: requests with a token whose logits differ in bits.
        tokens_equal: whether all greedy tokens are equal.
        coverage: of the prefill and of each part that is a technique.
    """

    arm: str
    requests: int
    differing: tuple[int, ...]
    tokens_equal: bool
    coverage: dict[str, Coverage]

    @property
    def ok(self) -> bool:
        """Whether nothing differs, and steps were captured at all."""
        return not self.differing and self.tokens_equal and self.coverage["prefill"].captured > 0


def mixed_prompts(lab: Lab, *, seed: int = 0) -> list[list[list[int]]]:
    """Prompts in rounds; those of a round are in flight together, and a round begins when the one before has ended.

    First each alone: a fresh one at either side of every bucket's edge and of the number of keys that are kept. Then
    all that fit side by side, longer than a step so that they come in chunks, and these again with other ends, so that
    most of each is in the cache.

    Args:
        lab: of a model with latent attention.
        seed: of the tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    context, budget = lab.max_context - NEW_TOKENS, lab.engine.scheduler.options.token_budget
    topk = require_latent(lab.config, "an arm of sparse prefill").index_topk
    edges = {edge + more for edge in (*lab.prefill_buckets, topk) for more in (-1, 0, 1)}

    def draw(length: int) -> list[int]:
        return torch.randint(0, lab.config.vocab_size, (length,), generator=generator).tolist()

    alone = [[draw(length)] for length in sorted(edges) if 1 < length <= context]
    lengths = [
        min(context, max(2, budget * (1 + place) // 2 + place)) for place in range(lab.engine.largest_batch)
    ]
    together = [draw(length) for length in lengths]
    again = [
        prompt[: max(1, len(prompt) * 3 // 4)] + draw(3 + 2 * place) for place, prompt in enumerate(together)
    ]
    return [*alone, together, [prompt[:context] for prompt in again]]


def check_arms(lab: Lab, arms: Sequence[SparseArm] = ARMS, *, seed: int = 0) -> list[ArmParity]:
    """Every arm on the same requests.

    A full arm has room for as many cached tokens as requests can have, unless it says for how many: a step beyond runs
    eager at its live size, where matrix products may round otherwise than at the padded one.

    Args:
        lab: of a model with latent attention, with no requests in flight.
        arms: the first is the reference.
        seed: of the requests.

    Raises:
        ToggleError: for a model without latent attention.
    """
    rounds, verdicts = mixed_prompts(lab, seed=seed), []
    wanted: Watched | None = None
    cache = lab.max_context * lab.engine.largest_batch
    for arm in arms:
        with toggled(lab, replace(arm, max_cached=arm.max_cached or cache)):
            runner = lab.phases.prefill()
            before = {name: counts.copy() for name, counts in runner.coverages().items()}
            found = _served(lab, rounds)
            coverage = {name: counts - before[name] for name, counts in runner.coverages().items()}
        wanted = wanted or found
        keys = sorted(wanted.logits.keys() | found.logits.keys())
        differing = {
            key[0] for key in keys
            if not (key in wanted.logits and key in found.logits and same_bits(wanted.logits[key], found.logits[key]))
        }  # fmt: skip
        outputs = [[request.output for request in run.requests] for run in (wanted, found)]
        verdicts.append(
            ArmParity(
                arm.name, len(found.requests), tuple(sorted(differing)), outputs[0] == outputs[1], coverage
            )
        )
    return verdicts


def choose(lab: Lab, arm: SparseArm) -> None:
    """Sets the lab's toggles, and the extent of a full prefill, to the arm's."""
    lab.captures.prefill = arm.prefill
    lab.captures.dsa_attention, lab.captures.dsa_indexer_prep = arm.attention, arm.preparation
    lab.phases.max_cached = arm.max_cached


@contextmanager
def toggled(lab: Lab, arm: SparseArm) -> Iterator[None]:
    """Within, the lab's toggles are the arm's."""
    prefill, attention, preparation = (getattr(lab.captures, name) for name in ("prefill", *SPARSE))
    kept = SparseArm(prefill, attention, preparation, lab.phases.max_cached)
    try:
        choose(lab, arm)
        yield
    finally:
        choose(lab, kept)


def _served(lab: Lab, rounds: Sequence[Sequence[Sequence[int]]]) -> Watched:
    found = Watched()
    engine = WatchedEngine(found, lab.model, lab.engine.kv, lab.phases, lab.engine.scheduler.options)
    for prompts in rounds:
        first = len(found.requests)
        list(
            engine.stream([Request(first + i, list(prompt), NEW_TOKENS) for i, prompt in enumerate(prompts)])
        )
    return found
