"""The cache of a block draft beside its target's: the same rows, pages and slots, so that a token has one slot in both.

The draft's keys and values of the context come from the target's residual stream (``block_draft``). A feeder stores
them inside the step that computes that stream, prefill or verify: the features, which are as wide as several layers,
never leave the recording, and a token that is in the target's cache is in the draft's as well. Pages that are shared
between requests, or kept after one has ended, hold both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn

from cglab.errors import InputError, ModelError
from cglab.models.block_draft import BlockDraft
from cglab.models.body import Taps
from cglab.models.config import ModelConfig
from cglab.models.decoder import Decoder
from cglab.models.kv import CacheAttention, LayerCache, PagedKV


def draft_cache(stack: ModelConfig, target: PagedKV, *, dtype: torch.dtype) -> PagedKV:
    """A zeroed cache for a draft's layers, reached by the page tables of its target's full-attention pool.

    Args:
        stack: the draft's layers, all of which see everything before them; ``BlockDraftConfig.stack``.
        target: the target's cache.
        dtype: element type of keys and values.
    """
    size = target.page_size
    kv = PagedKV(
        stack, pages=target.full.keys.shape[1] // size, page_size=size, rows=len(target.full.page_table),
        max_context=len(target.context_positions), device=target.device, dtype=dtype,
    )  # fmt: skip
    kv.full.page_table = target.full.page_table
    return kv


class _ContextStore(CacheAttention):
    """Where tokens of the context go, which ask nothing themselves."""

    def __init__(self, kv: PagedKV, out_slots: Tensor) -> None:
        self.kv, self.out_slots = kv, out_slots

    def cache(self, layer_index: int) -> LayerCache:
        """See ``CacheAttention``."""
        return self.kv.pool(layer_index).cache(layer_index, self.out_slots)

    def attend(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> NoReturn:
        """Refuses: see the class."""
        raise InputError(
            "tokens of a draft's context are stored and ask nothing; run a block over them instead"
        )


@dataclass(frozen=True, slots=True)
class Feeder:
    """Stores what a block draft sees of the tokens that its target computes, as the tail of that step.

    Attributes:
        draft: bound to the target.
        kv: the draft's cache; see ``draft_cache``.
    """

    draft: BlockDraft
    kv: PagedKV

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: CacheAttention, out_slots: Tensor
    ) -> Tensor:
        """The target's forward, after which its tokens are in both caches.

        Args:
            input_ids: [T] int64; this and the next two as ``Decoder.forward`` takes them.
            positions: [T] int64.
            attend: attention over the target's cache.
            out_slots: [T] int64, where the tokens go in both caches; 0 for padding, whose rows thus reach no request
                (P68).

        Returns:
            [T, hidden_size]: the target's normed hidden states.
        """
        taps = Taps(self.draft.config.context_layers)
        hidden: Tensor = self.draft.target(input_ids, positions, attend, taps)
        self.draft.materialise(taps.features(), positions, _ContextStore(self.kv, out_slots))
        return hidden

    def watched(self, target: Decoder, kv: PagedKV) -> dict[str, nn.Module | Callable[[], Tensor]]:
        """Everything that a recording of ``forward`` reads by address beside the target's, for an ``AddressContract``.

        Args:
            target: the model whose step this is.
            kv: its cache.

        Raises:
            ModelError: if the draft is bound to another target.
            InputError: if its cache has page tables of its own.
        """
        if self.draft.target is not target:
            raise ModelError("the draft is bound to another target; bind it to the model that feeds it")
        if self.kv.full.page_table is not kv.full.page_table:
            raise InputError("the draft's cache has page tables of its own; make it with draft_cache")
        return {"draft": self.draft, **{f"draft {name}": get for name, get in self.kv.watched().items()}}
