"""Up to which size prefill steps are captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cglab.graphs.buckets import bucket_list, sglang_prefill

PREFILL_LIMIT: Final = 512
"""Tokens up to which prefill steps are captured by default: beyond it a graph wins nothing, and padding costs.

It is the crossover of one request at a time, ``qwen3-8b`` on an H200: the record of ``cglab bench ttft`` (arm
``breakable``, metric ``limit``). A smaller model wins further up; ``prefill_buckets`` says so for a lab.
"""


def prefill_sizes(token_budget: int, explicit: Sequence[int] | None = None) -> list[int]:
    """Token counts of prefill steps to capture: the user's own, or SGLang's list.

    Args:
        token_budget: most tokens of one step.
        explicit: the user's; None takes SGLang's list up to the budget, or to ``PREFILL_LIMIT`` if that is lower.

    Raises:
        BucketError: as ``bucket_list``.
    """
    if explicit is not None:
        return bucket_list(token_budget, explicit=explicit)
    return bucket_list(min(token_budget, PREFILL_LIMIT), sglang_prefill)
