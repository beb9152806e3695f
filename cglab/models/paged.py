"""Attention of a decode step by one kernel over the paged cache, as an ``attend`` callable: what ``compiled`` uses.

It reads pages by the page table and as many tokens as a request has, where the portable form gathers the whole padded
context first. The buffers that the parts of a context are joined from are made once a step and shared by its layers.
As in the portable form, storing is recorded and attending is an eager break.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cglab.graphs.breaks import eager_break
from cglab.models.attention import LiveRows, require_step
from cglab.models.kv import CacheAttention, LayerCache, LayerPool, PagedKV


class PagedDecodeAttention(CacheAttention):
    """As ``attention.DecodeAttention``, with the same arguments."""

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
        """Takes a step's tensors; see ``attention.DecodeAttention``.

        Raises:
            InputError: if the sizes do not fit each other, or slots are missing for a pool or given for none.
        """
        self.kv, self.width, self.live = kv, width, live or LiveRows()
        self.request_rows, self.seq_lens = request_rows, seq_lens
        self.out_slots = kv.by_pool(out_slots, window_out_slots)
        for slots in self.out_slots.values():
            require_step(request_rows, seq_lens, slots, width)

    def cache(self, layer_index: int) -> LayerCache:
        """See ``CacheAttention``."""
        pool = self.kv.pool(layer_index)
        return pool.cache(layer_index, self.out_slots[pool])

    def attend(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See ``CacheAttention``; new keys and values are read from the cache, like those before them."""
        pool = self.kv.pool(layer_index)
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        _attend(
            pool,
            pool.cache(layer_index, self.out_slots[pool]),
            query=query,
            out=out.view_as(query),
            request_rows=self.request_rows,
            seq_lens=self.seq_lens,
            width=self.width,
            live=self.live,
        )
        return out


@eager_break
def _attend(
    pool: LayerPool,
    cache: LayerCache,
    *,
    query: Tensor,
    out: Tensor,
    request_rows: Tensor,
    seq_lens: Tensor,
    width: int,
    live: LiveRows,
) -> None:
    """Attends; padded rows of ``out`` become zero (P53, P54)."""
    from cglab.models.kernels.attention import paged_attention, parts_for  # Triton is only where a GPU is

    # Of the padded step: a part's sums must not depend on how many requests are live.
    context = len(pool.context_positions)
    parts = parts_for(len(seq_lens), cache.keys.shape[1], processors(query.get_device()), context)
    if live.rows is not None and live.rows < len(seq_lens):
        tokens = live.rows * width
        out[tokens:].zero_()
        if live.rows == 0:
            return
        query, out, request_rows, seq_lens = (
            query[:tokens], out[:tokens], request_rows[: live.rows], seq_lens[: live.rows]
        )  # fmt: skip
    paged_attention(
        query, cache.keys, cache.values, pool.page_table, request_rows, seq_lens, out,
        parts=parts, page_size=pool.page_size, width=width, window=pool.window,
    )  # fmt: skip


@functools.cache
def processors(index: int) -> int:
    """Multiprocessors of a device; 1 where there is none."""
    return torch.cuda.get_device_properties(index).multi_processor_count if index >= 0 else 1
