"""Attention of a prefill step over a fixed request axis: the form that a ``full`` recording holds.

Everything that changes from step to step comes as device tensors with a place for each of a fixed number of
requests. Absent requests have length 0 and start at the end (P27), so nothing is read on the host and no shape
depends on the batch. The keys of all requests are gathered packed into a fixed number of places. On a GPU in half
precision one varlen kernel attends, told the longest span that could be; elsewhere a dense mask over the packed keys
says who sees whom. Padded rows of the result are zero (P53).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cglab.models.kv import CacheAttention, LayerCache, LayerPool, PagedKV
from cglab.models.packed import fits_varlen, packed_slots, varlen_kernel


class _PoolAxis:
    """What all layers of a pool share in one step.

    Args:
        pool: the pool.
        out_slots: [T] int64, where new keys and values go.
        request_rows, cu_seqlens_q, cu_seqlens_k: of the step; see ``RequestAxisAttention``.
        room: how many packed keys there is room for.
    """

    def __init__(
        self,
        pool: LayerPool,
        out_slots: Tensor,
        request_rows: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        room: int,
    ) -> None:
        self.pool, self.out_slots, self.room, self.cu_seqlens_q = pool, out_slots, room, cu_seqlens_q
        firsts = None
        if (
            pool.window is not None
        ):  # fewer keys than a request has tokens: from the first that a new one sees
            tokens = cu_seqlens_k.diff()
            firsts = (tokens - cu_seqlens_q.diff() - pool.window + 1).clamp_min(0)
            cu_seqlens_k = F.pad((tokens - firsts).cumsum(0, dtype=cu_seqlens_k.dtype), (1, 0))
        self.cu_seqlens_k = cu_seqlens_k
        self.key_slots = packed_slots(pool, request_rows, cu_seqlens_k, room, firsts)
        self._mask: Tensor | None = None

    def attend(self, layer_index: int, query: Tensor) -> Tensor:
        """[T, heads, head_dim]; rows that are no request's are unset."""
        pool = self.pool
        keys, values = (cached.to(query.dtype) for cached in pool.gather(layer_index, self.key_slots))
        if fits_varlen(query):
            kernel, longest = varlen_kernel(pool.window), (len(query), self.room)
            attended: Tensor = kernel(query, keys, values, self.cu_seqlens_q, self.cu_seqlens_k, *longest)
            return attended
        query, keys, values = (heads.transpose(0, 1).unsqueeze(0) for heads in (query, keys, values))
        if self._mask is None:  # by the first layer, for all
            self._mask = self._seen(query.shape[2])
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=self._mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    def _seen(self, tokens: int) -> Tensor:
        """[T, room] bool: the keys that each token sees; padded tokens see what the last live one does."""
        queries, keys, window = self.cu_seqlens_q, self.cu_seqlens_k, self.pool.window
        place = torch.arange(max(tokens, self.room), device=queries.device, dtype=queries.dtype)
        index = torch.minimum(place[:tokens], queries[-1] - 1)
        owner = torch.searchsorted(queries[1:], index, right=True)
        first = keys.index_select(0, owner)
        # A request's last token sees its last key, the token before it one less, and so on.
        last = keys.index_select(0, owner + 1) - queries.index_select(0, owner + 1) + index
        if window is not None:
            first = torch.maximum(first, last - window + 1)
        place = place[: self.room]
        return (place >= first.unsqueeze(1)) & (place <= last.unsqueeze(1))


class RequestAxisAttention(CacheAttention):
    """Attention of a step whose split into requests is data on the device.

    Args:
        kv: the cache.
        out_slots: [T] int64, where this step's keys and values go; 0 for padding.
        request_rows: [R] int32, rows of the page tables; 0 for absent requests.
        cu_seqlens_q: [R + 1] int32, where each request's tokens start among the step's; the last is the live count.
        cu_seqlens_k: [R + 1] int32, the same among all tokens of the requests, cached ones included.
        keys: how many packed keys there is room for.
        window_out_slots: [T] int64, as ``out_slots`` in the window pool, if there is one.

    Raises:
        InputError: if slots are missing for a pool, or given for none.
    """

    def __init__(
        self,
        kv: PagedKV,
        *,
        out_slots: Tensor,
        request_rows: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        keys: int,
        window_out_slots: Tensor | None = None,
    ) -> None:
        tokens, requests = len(out_slots), len(request_rows)
        index = torch.arange(tokens, device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)
        self.kv, self.padded = kv, (index >= cu_seqlens_q[-1]).unsqueeze(1)
        self._axes = {}
        for pool, slots in kv.by_pool(out_slots, window_out_slots).items():
            # A window lets no request read more cached tokens than it has places before the first new one.
            room = keys if pool.window is None else min(keys, tokens + requests * (pool.window - 1))
            if pool.layers:
                self._axes[pool] = _PoolAxis(pool, slots, request_rows, cu_seqlens_q, cu_seqlens_k, room)

    def cache(self, layer_index: int) -> LayerCache:
        """See ``CacheAttention``."""
        pool = self.kv.pool(layer_index)
        return pool.cache(layer_index, self._axes[pool].out_slots)

    def attend(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See ``CacheAttention``; new keys and values are read from the cache, like those before them."""
        attended = self._axes[self.kv.pool(layer_index)].attend(layer_index, query)
        return attended.flatten(1).masked_fill_(self.padded, 0.0)
