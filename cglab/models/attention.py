"""Attention of a decode step over the paged cache, as an ``attend`` callable; ``spans`` has that of a prefill.

What only depends on the step (slots and mask) is computed once, when the callable is made, and so is recorded with
the step; so is storing this step's keys and values. Attending is an eager break: a breakable capture leaves it out,
a full one may record it inline. Its output is allocated before it and written in place (P50). The form is portable:
gather by slot, then ``scaled_dot_product_attention`` with the query heads of a group folded into the query axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cglab.errors import InputError
from cglab.graphs.breaks import eager_break
from cglab.models.kv import CacheAttention, LayerCache, LayerPool, PagedKV


@dataclass(slots=True)
class LiveRows:
    """How many requests of a padded decode step are real; changed in place from step to step.

    Attributes:
        rows: live requests, always the first ones; None computes all rows, which is what a full recording
            holds.
    """

    rows: int | None = None


class _PoolStep:
    """What the layers of one pool share in a step.

    Attributes:
        slots: [requests, context] int64, where those that are read live.
        mask: [requests, 1, rows, context], 0 or minus infinity.
    """

    def __init__(self, pool: LayerPool, request_rows: Tensor, seq_lens: Tensor, last: Tensor) -> None:
        """Computes them; ``last`` [requests, width, 1] is the last position that each query sees."""
        width = last.shape[1]
        position = pool.context(seq_lens, width)
        # Padding repeats the last position: whatever a free page or the rest of a page holds is then not even read,
        # as a mask alone would still multiply it by zero, and zero times NaN is NaN.
        self.slots = pool.slots(request_rows, torch.minimum(position, seq_lens.unsqueeze(1) - 1))
        position = position.unsqueeze(-2)
        unseen = position > last
        if pool.window is not None and width > 1:  # a single query's context starts with its window
            unseen = unseen | (position <= last - pool.window)
        # Added to the scores: a boolean mask would be turned into this form again in every layer.
        mask = torch.zeros(unseen.shape, device=unseen.device, dtype=pool.keys.dtype)
        mask = mask.masked_fill_(unseen, float("-inf")).unsqueeze(1)
        # One row serves all queries of a group where there is but one token.
        self.mask = mask if width == 1 else mask.unsqueeze(2).expand(-1, -1, pool.group, -1, -1).flatten(2, 3)


class DecodeStep(CacheAttention):
    """A step with equally many new tokens of each request: decode, or verify of drafted tokens.

    Query i of a request sees its first ``seq_len - width + i + 1`` tokens, itself included; in a layer with a
    window the last ``window`` of these, and no more than they are read.
    """

    def __init__(
        self,
        kv: PagedKV,
        *,
        out_slots: Tensor,
        request_rows: Tensor,
        seq_lens: Tensor,
        width: int = 1,
        live: LiveRows | None = None,
        window_out_slots: Tensor | None = None,
    ) -> None:
        """Takes a step's tensors.

        Args:
            kv: the cache.
            out_slots: [requests * width] int64, where this step's keys and values go; 0 for padding.
            request_rows: [requests] int64, rows of the page tables; 0 for padding.
            seq_lens: [requests] int64, tokens of each request including this step's; at least ``width``, for
                padding too.
            width: new tokens of each request.
            live: which requests are real, read at every call of the break; None computes all of them.
            window_out_slots: [requests * width] int64, as ``out_slots`` in the window pool, if there is one.

        Raises:
            InputError: if the sizes do not fit each other, or slots are missing for a pool or given for none.
        """
        self.kv, self.width, self.live = kv, width, live or LiveRows()
        self.request_rows, self.seq_lens = request_rows, seq_lens
        self.out_slots = kv.by_pool(out_slots, window_out_slots)
        requests = request_rows.shape[0]
        for slots in self.out_slots.values():
            if seq_lens.shape[0] != requests or slots.shape[0] != requests * width:
                raise InputError(
                    f"{requests} request rows, {seq_lens.shape[0]} lengths and {slots.shape[0]} slots do not "
                    f"make a step of width {width}: give one length and {width} slots for each row"
                )

    def cache(self, layer_index: int) -> LayerCache:
        """See ``CacheAttention``."""
        pool = self.kv.pool(layer_index)
        return pool.cache(layer_index, self.out_slots[pool])


class DecodeAttention(DecodeStep):
    """The portable form: what the layers of a pool share is computed when it is made."""

    def __init__(self, kv: PagedKV, **step: Any) -> None:
        """Computes what all layers of a pool share; the arguments are those of ``DecodeStep``."""
        super().__init__(kv, **step)
        last = (self.seq_lens.unsqueeze(1) + (kv.context_positions[: self.width] - self.width)).unsqueeze(-1)
        self._steps = {
            pool: _PoolStep(pool, self.request_rows, self.seq_lens, last)
            for pool in self.out_slots
            if pool.layers
        }

    def attend(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See ``CacheAttention``; new keys and values are read from the cache, like those before them."""
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        pool = self.kv.pool(layer_index)
        step = self._steps[pool]
        _decode(
            pool,
            layer_index,
            query=query,
            out=out,
            slots=step.slots,
            mask=step.mask,
            width=self.width,
            live=self.live,
        )
        return out


@eager_break
def _decode(
    pool: LayerPool,
    layer_index: int,
    *,
    query: Tensor,
    out: Tensor,
    slots: Tensor,
    mask: Tensor,
    width: int,
    live: LiveRows,
) -> None:
    """Attends; padded rows of ``out`` become zero (P53, P54)."""
    if live.rows is not None and live.rows < len(slots):
        tokens = live.rows * width
        out[tokens:].zero_()
        if live.rows == 0:
            return
        query, out, slots, mask = query[:tokens], out[:tokens], slots[: live.rows], mask[: live.rows]
    keys, values = pool.read(layer_index, slots)
    split = (len(slots), width, keys.shape[1], pool.group, keys.shape[3])
    # [requests, kv_heads, group * width, head_dim]: all queries that read the same key head side by side.
    folded = query.view(split).permute(0, 2, 3, 1, 4).flatten(2, 3)
    attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    out.view(split).copy_(attended.unflatten(2, (pool.group, width)).permute(0, 3, 1, 2, 4))
