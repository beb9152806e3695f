"""What each technique needs of a lab, and why one cannot be toggled in it: policy, no device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

from cglab.lab.steps import SIZES
from cglab.lab.techniques import DRAFTING, technique

Draft = Literal["assistant", "block"]

ASSISTANT: Final = 'an assistant as draft, such as cglab.open("pico-gqa", draft="pico-gqa-assistant")'
BLOCK: Final = 'a block draft, such as cglab.open("pico-gqa", draft="pico-gqa-dflash")'

NEEDS: Final[Mapping[str, str]] = MappingProxyType({
    "decode": "any model",
    "verify": f"{ASSISTANT}, or {BLOCK}",
    "draft_loop": ASSISTANT,
    "seed_step": ASSISTANT,
    "draft_sampler": BLOCK,
    "prefill": "any model",
    "pp_prefill": "two processes, one a stage: cglab bench pipeline",
    "dsa_attention": "a model with sparse latent attention",
    "dsa_indexer_prep": "a model with sparse latent attention",
    "draft_extend": "a model with sparse latent attention and its NextN layer",
})  # fmt: skip
"""What a technique needs, by its toggle."""


def unavailable(name: str, draft: Draft | None) -> str | None:
    """Why a technique cannot be toggled in a lab; None where it can.

    Args:
        name: the toggle.
        draft: the kind of the lab's draft model; None without one.

    Raises:
        ToggleError: for an unknown technique.
    """
    found = technique(name)
    if not found.available:
        return f"{found.reason}; needs {NEEDS[found.name]}"
    drafts: dict[str, tuple[Draft, ...]] = {
        "verify": ("assistant", "block"), "draft_loop": ("assistant",), "seed_step": ("assistant",),
        "draft_sampler": ("block",),
    }  # fmt: skip
    fits = draft in drafts[found.name] if found.name in drafts else found.name in SIZES
    return None if fits else f"needs {NEEDS[found.name]}"


def in_load(name: str, draft: Draft | None) -> str | None:
    """Why a technique's steps are no part of a load; None where they are.

    Args:
        name: a toggle that is available.
        draft: as in :func:`unavailable`.
    """
    if name == "decode" and draft is not None:
        return (
            "With a draft, requests get longer by draft and verify passes, and no decode step runs under load"
        )
    if name in ("decode", "prefill", *DRAFTING):
        return None
    return f"{name} is no part of a load in one process"
