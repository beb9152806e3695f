"""What each technique needs of a lab, and why one cannot be toggled in it: policy, no device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

from cglab.lab.steps import PREFILLS, SIZES
from cglab.lab.techniques import DRAFTING, SPARSE, TECHNIQUES, technique
from cglab.models.assistant import AssistantConfig
from cglab.models.block_draft import BlockDraftConfig
from cglab.models.drafts import DraftConfig

Draft = Literal["assistant", "block", "nextn"]

NEEDS: Final[Mapping[str, str]] = MappingProxyType({
    "decode": "any model",
    "verify": "a draft model",
    "draft_loop": "an assistant as draft",
    "seed_step": "an assistant as draft",
    "draft_sampler": "a block draft",
    "prefill": "any model",
    "pp_prefill": "a process for each of two stages",
    "dsa_attention": "a model with sparse latent attention",
    "dsa_indexer_prep": "a model with sparse latent attention",
    "draft_extend": "a NextN layer as draft, of a model with sparse latent attention",
})  # fmt: skip
"""What a technique needs, by its toggle."""

HOW: Final[Mapping[str, str]] = MappingProxyType({
    **dict.fromkeys(("verify", "draft_loop", "seed_step"), 'cglab.open("pico-gqa", draft="pico-gqa-assistant")'),
    "draft_sampler": 'cglab.open("pico-gqa", draft="pico-gqa-dflash")',
    "pp_prefill": "cglab bench pipeline",
    **dict.fromkeys(SPARSE, 'cglab.open("dsa-tiny")'),
    "draft_extend": 'cglab.open("pico-dsa", draft="pico-dsa-nextn")',
})  # fmt: skip
"""How to get what is missing, where there is a way."""


def draft_kind(config: DraftConfig) -> Draft:
    """The kind of a draft model of this shape."""
    if isinstance(config, AssistantConfig):
        return "assistant"
    return "block" if isinstance(config, BlockDraftConfig) else "nextn"


def unavailable(name: str, draft: Draft | None, *, latent: bool = False) -> str | None:
    """Why a technique cannot be toggled in a lab; None where it can.

    Args:
        name: the toggle.
        draft: the kind of the lab's draft model; None without one.
        latent: whether its model has sparse latent attention.

    Raises:
        ToggleError: for an unknown technique.
    """
    found = technique(name)
    drafts: dict[str, tuple[Draft, ...]] = {
        "verify": ("assistant", "block", "nextn"), "draft_loop": ("assistant",), "seed_step": ("assistant",),
        "draft_sampler": ("block",), "draft_extend": ("nextn",),
    }  # fmt: skip
    if found.name in SPARSE:
        fits = latent
    else:
        fits = draft in drafts[found.name] if found.name in drafts else found.name in SIZES
    how = f"; try {HOW[found.name]}" if found.name in HOW else ""
    return None if fits else f"needs {NEEDS[found.name]}{how}"


def inert(draft: Draft | None, *, latent: bool) -> dict[str, str]:
    """Why a toggle would change nothing in a lab, by its name; arguments as those of :func:`unavailable`.

    Of a block draft the draft loop's toggle says how the draft itself is captured, though it has no loop to compare.
    """
    found = {name: unavailable(name, draft, latent=latent) for name in TECHNIQUES}
    in_use = {"draft_loop"} if draft == "block" else set[str]()
    return {name: why for name, why in found.items() if why is not None and name not in in_use}


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
    if name in ("decode", *PREFILLS, *DRAFTING):
        return None
    return f"{name} is no part of a load in one process"
