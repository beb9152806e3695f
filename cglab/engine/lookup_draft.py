"""Drafting by n-gram look-up: what followed when the text last said the same; the least that a draft must beat."""

from __future__ import annotations

from collections.abc import Sequence

from cglab.errors import InputError

LONGEST = 4


def lookup_draft(tokens: Sequence[int], count: int, *, longest: int = LONGEST) -> list[int]:
    """Drafts tokens from the text itself, without a model.

    The longest suffix of up to ``longest`` tokens that occurs earlier decides; of its earlier occurrences the last.

    Args:
        tokens: prompt and output so far.
        count: tokens to draft.
        longest: tokens of the suffix at most.

    Returns:
        Up to ``count`` token ids: fewer where the text ends sooner, none where not even its last token occurs before.

    Raises:
        InputError: if ``count`` or ``longest`` is below 1.
    """
    if count < 1 or longest < 1:
        raise InputError(
            f"a look-up of {count} tokens after a suffix of {longest} is no draft: give 1 or more of both"
        )
    text = list(tokens)
    for size in range(min(longest, len(text) - 1), 0, -1):
        suffix = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == suffix:
                return text[start + size : start + size + count]
    return []
