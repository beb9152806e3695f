"""Attention of a decode step over the paged cache, as an ``attend`` callable; ``spans`` has that of a prefill.

What only depends on the step (slots and mask) is computed once, when the callable is made, and so is recorded
with the step. The body, which stores this step's keys and values and attends, is an eager break: a breakable
capture leaves it out, a full one may record it inline. Its output is allocated before it and written in place
(P50). The form is portable: gather by slot, then ``scaled_dot_product_attention`` with the query heads of a
group folded into the query axis.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cglab.errors import InputError
from cglab.graphs.breaks import eager_break
from cglab.models.kv import PagedKV


@dataclass(slots=True)
class LiveRows:
    """How many requests of a padded decode step are real; changed in place from step to step.

    Attributes:
        rows: live requests, always the first ones; None computes all rows, which is what a full recording
            holds.
    """

    rows: int | None = None


class DecodeAttention:
    """Attention of a step with equally many new tokens of each request: decode, or verify of drafted tokens.

    Query i of a request sees its first ``seq_len - width + i + 1`` tokens, itself included.
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
    ) -> None:
        """Computes what all layers share.

        Args:
            kv: the cache.
            out_slots: [requests * width] int64, where this step's keys and values go; 0 for padding.
            request_rows: [requests] int64, rows of the page table; 0 for padding.
            seq_lens: [requests] int64, tokens of each request including this step's; at least ``width``, for
                padding too.
            width: new tokens of each request.
            live: which requests are real, read at every call of the break; None computes all of them.

        Raises:
            InputError: if the sizes do not fit each other.
        """
        requests = request_rows.shape[0]
        if seq_lens.shape[0] != requests or out_slots.shape[0] != requests * width:
            raise InputError(
                f"{requests} request rows, {seq_lens.shape[0]} lengths and {out_slots.shape[0]} slots do not "
                f"make a step of width {width}: give one length and {width} slots for each row"
            )
        self.kv, self.out_slots, self.width, self.live = kv, out_slots, width, live or LiveRows()
        self.slots = kv.context_slots(request_rows, seq_lens)
        ahead = kv.context_positions[:width] - width
        unseen = kv.context_positions > (seq_lens.unsqueeze(1) + ahead).unsqueeze(-1)
        # Added to the scores: a boolean mask would be turned into this form again in every layer.
        mask = torch.zeros(unseen.shape, device=unseen.device, dtype=kv.keys.dtype)
        mask = mask.masked_fill_(unseen, float("-inf")).unsqueeze(1)
        # [requests, 1, rows, context]: one row serves all queries of a group where there is but one token.
        self.mask = mask if width == 1 else mask.unsqueeze(2).expand(-1, -1, kv.group, -1, -1).flatten(2, 3)

    def __call__(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends in one layer; see ``decoder.Attend``."""
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        _decode(
            self.kv,
            layer_index,
            query=query,
            key=key,
            value=value,
            out=out,
            out_slots=self.out_slots,
            slots=self.slots,
            mask=self.mask,
            width=self.width,
            live=self.live,
        )
        return out


@eager_break
def _decode(
    kv: PagedKV,
    layer_index: int,
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    out_slots: Tensor,
    slots: Tensor,
    mask: Tensor,
    width: int,
    live: LiveRows,
) -> None:
    """Stores keys and values and attends; zeroes the padded rows of ``out`` (P53, P54)."""
    if live.rows is not None:
        tokens = live.rows * width
        out[tokens:].zero_()
        if live.rows == 0:
            return
        query, key, value, out = query[:tokens], key[:tokens], value[:tokens], out[:tokens]
        out_slots, slots, mask = out_slots[:tokens], slots[: live.rows], mask[: live.rows]
    kv.write(layer_index, out_slots, key, value)
    keys, values = kv.read(layer_index, slots)
    split = (len(slots), width, key.shape[1], kv.group, key.shape[2])
    # [requests, kv_heads, group * width, head_dim]: all queries that read the same key head side by side.
    folded = query.view(split).permute(0, 2, 3, 1, 4).flatten(2, 3)
    attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    out.view(split).copy_(attended.unflatten(2, (kv.group, width)).permute(0, 3, 1, 2, 4))
