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
from cglab.models.attention import DecodeStep, LiveRows
from cglab.models.kv import LayerCache, LayerPool


class PagedDecodeAttention(DecodeStep):
    """The form with one kernel, over the pages themselves."""

    def attend(
        self, layer_index: int, query: Tensor, key: Tensor | None = None, value: Tensor | None = None
    ) -> Tensor:
        """See ``CacheAttention``; new keys and values are read from the cache, like those before them."""
        pool = self.kv.pool(layer_index)
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        _attend(
            pool,
            self.cache(layer_index),
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


def prepare_attention(pool: LayerPool, heads: int, dtype: torch.dtype) -> None:
    """Compiles the kernels for one pool: for contexts in parts, and for whole ones.

    Args:
        pool: whose reserved slot is read.
        heads: of the queries.
        dtype: of the queries.
    """
    from cglab.models.kernels.attention import paged_attention

    one = torch.ones(1, device=pool.keys.device, dtype=torch.int64)
    cache = pool.cache(pool.layers[0], one)
    query = torch.zeros((1, heads, cache.keys.shape[2]), device=one.device, dtype=dtype)
    for parts in (1, 2):
        paged_attention(
            query, cache.keys, cache.values, pool.page_table, torch.zeros_like(one), one, torch.empty_like(query),
            parts=parts, page_size=pool.page_size, window=pool.window,
        )  # fmt: skip


@functools.cache
def processors(index: int) -> int:
    """Multiprocessors of a device; 1 where there is none."""
    return torch.cuda.get_device_properties(index).multi_processor_count if index >= 0 else 1
