"""Which part of a continuation counts when drafts are measured, and how repetitive it is.

A small model that continues greedily sooner or later says the same again and again, and any draft is right about
that: accept length is therefore counted only up to where the target's continuation turns periodic, and the share of
distinct 4-grams is told beside it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

LEAST_REPEATED = 16


def periodic_from(tokens: Sequence[Hashable], least: int = LEAST_REPEATED) -> int:
    """Where a continuation turns periodic: from there to its end every token is the one a period before it.

    Args:
        tokens: token ids, or anything that compares.
        least: tokens that must repeat, and no less than a whole period, before it is no accident.

    Returns:
        Index of the first token that only repeats; the length if none does.
    """
    end = first = len(tokens)
    for period in range(1, end // 2 + 1):
        start = end
        while start > period and tokens[start - 1] == tokens[start - 1 - period]:
            start -= 1
        if end - start >= max(period, least):
            first = min(first, start)
    return first


def counted_length(tokens: Sequence[int], ends: Sequence[int] = ()) -> int:
    """How many tokens of a greedy continuation count: up to its end of text, and to where it turns periodic.

    Args:
        tokens: token ids of the continuation, without the prompt.
        ends: ids that end a text; the first one still counts.
    """
    stop = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
    return periodic_from(tokens[:stop])


def distinct_ngrams(tokens: Sequence[Hashable], size: int = 4) -> float:
    """Share of distinct n-grams among all: 1.0 if none occurs twice, or if the text is shorter than one.

    Args:
        tokens: token ids.
        size: n, at least 1.
    """
    ngrams = [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0
