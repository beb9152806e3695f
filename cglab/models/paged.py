"""Attention of a decode step by one kernel over the paged cache, as an ``attend`` callable: what ``compiled`` uses.

It reads pages by the page table and as many tokens as a request has, where the portable form gathers the whole padded
context first. The buffers that the parts of a context are joined from are made once a step and shared by its layers.
As in the portable form, storing is recorded and attending is an eager break.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from cglab.graphs.breaks import eager_break
from cglab.models.attention import DecodeStep, LiveRows
from cglab.models.kv import LayerPool


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
            *pool.tensors(layer_index),
            query=query,
            out=out.view_as(query),
            request_rows=self.request_rows,
            seq_lens=self.seq_lens,
            width=self.width,
            live=self.live,
            tree=self.tree,
        )
        return out


@eager_break
def _attend(
    pool: LayerPool,
    keys: Tensor,
    values: Tensor,
    *,
    query: Tensor,
    out: Tensor,
    request_rows: Tensor,
    seq_lens: Tensor,
    width: int,
    live: LiveRows,
    tree: Tensor | None,
) -> None:
    """Attends; padded rows of ``out`` become zero (P53, P54)."""
    from cglab.models.kernels.attention import paged_attention, parts_for  # Triton is only where a GPU is

    # Of the padded step: a part's sums must not depend on how many requests are live.
    context = len(pool.context_positions)
    parts = parts_for(len(seq_lens), keys.shape[1], processors(query.get_device()), context)
    if live.rows is not None and live.rows < len(seq_lens):
        tokens = live.rows * width
        out[tokens:].zero_()
        if live.rows == 0:
            return
        query, out, request_rows, seq_lens = (
            query[:tokens], out[:tokens], request_rows[: live.rows], seq_lens[: live.rows]
        )  # fmt: skip
        tree = None if tree is None else tree[: live.rows]
    paged_attention(
        query, keys, values, pool.page_table, request_rows, seq_lens, out,
        parts=parts, page_size=pool.page_size, width=width, window=pool.window, tree=tree,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What of a step a kernel is compiled for.

    Attributes:
        heads: of the queries.
        width: new tokens of each request.
        tree: whether these are a tree.
    """

    heads: int
    width: int = 1
    tree: bool = False


def prepare_attention(pool: LayerPool, kind: AttentionKind, dtype: torch.dtype) -> None:
    """Compiles the kernels for one pool and kind of step: for contexts in parts, and for whole ones.

    Args:
        pool: whose reserved slot is read.
        kind: of the step.
        dtype: of the queries.
    """
    from cglab.models.kernels.attention import paged_attention

    width, place = kind.width, pool.keys.device
    keys, values = pool.tensors(pool.layers[0])
    query = torch.zeros((width, kind.heads, keys.shape[2]), device=place, dtype=dtype)
    row, length = (torch.full((1,), n, device=place, dtype=torch.int64) for n in (0, width))
    tree = torch.ones((1, width, width), device=place, dtype=torch.bool) if kind.tree else None
    for parts in (1, 2):
        paged_attention(
            query, keys, values, pool.page_table, row, length, torch.empty_like(query), parts=parts,
            page_size=pool.page_size, width=width, window=pool.window, tree=tree,
        )  # fmt: skip


@functools.cache
def processors(index: int) -> int:
    """Multiprocessors of a device; 1 where there is none."""
    return torch.cuda.get_device_properties(index).multi_processor_count if index >= 0 else 1
