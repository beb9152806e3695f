"""Attention of a prefill step over a fixed request axis: the form that a ``full`` recording holds.

Everything that changes from step to step comes as device tensors with a place for each of a fixed number of
requests. Absent requests have length 0 and start at the end (P27), so nothing is read on the host and no shape
depends on the batch. The keys of all requests are gathered packed into a fixed number of places; in a layer with a
window these are what a window holds of each, and which they are is derived on the device. On a GPU in half precision
one varlen kernel attends, told the longest span that could be; elsewhere a dense mask over the packed keys says who
sees whom. Padded rows of the result are zero (P53).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cglab.models.kv import LayerPool, PagedKV
from cglab.models.spans import packed_slots
from cglab.models.varlen import fits_varlen, varlen_kernel


class RequestAxisAttention:
    """Attention of a step whose split into requests is data on the device.

    Args:
        kv: the cache.
        out_slots: [T] int64, where this step's keys and values go; 0 for padding.
        request_rows: [R] int32, rows of the page tables; 0 for absent requests.
        cu_seqlens_q: [R + 1] int32, where each request's tokens start among the step's; the last is the live count.
        cu_seqlens_k: [R + 1] int32, the same among their keys, cached ones included.
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
        self.kv, self.out_slots = kv, kv.by_pool(out_slots, window_out_slots)
        self._keys = {
            pool: _PoolKeys(pool, len(out_slots), request_rows, cu_seqlens_q, cu_seqlens_k, keys)
            for pool in kv.pools
            if pool.layers
        }
        self.index = torch.arange(len(out_slots), device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)
        self.padded = (self.index >= cu_seqlens_q[-1]).unsqueeze(1)

    def __call__(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends in one layer; see ``decoder.Attend``."""
        pool = self.kv.pool(layer_index)
        dtype, packed = pool.keys.dtype, self._keys[pool]
        pool.write(layer_index, self.out_slots[pool], key.to(dtype), value.to(dtype))
        keys, values = (part.to(query.dtype) for part in pool.gather(layer_index, packed.slots))
        if fits_varlen(query, pool.window):
            ends = packed.cu_seqlens_q, packed.cu_seqlens_k
            attended = varlen_kernel(pool.window)(query, keys, values, *ends, len(query), packed.room)
        else:
            attended = _dense(query, keys, values, packed.mask(self.index))
        return attended.flatten(1).masked_fill_(self.padded, 0.0)  # the kernel leaves these rows unset


class _PoolKeys:
    """The packed keys of one pool.

    Attributes:
        room: how many there are, unused ones included.
        slots: [room] int64, where they live.
        cu_seqlens_q: [R + 1] int32, as above.
        cu_seqlens_k: [R + 1] int32, the same among the packed keys.
    """

    def __init__(
        self, pool: LayerPool, tokens: int, request_rows: Tensor, queries: Tensor, keys: Tensor, room: int
    ) -> None:
        self.window, self.room, first = pool.window, room, None
        if (
            pool.window is not None
        ):  # older keys may be gone: pack those that a request's first token sees, and later
            self.room = min(room, tokens + len(request_rows) * (pool.window - 1))
            lengths, ends = queries.diff(), keys.diff()
            first = (ends - lengths - (pool.window - 1)).clamp_min(0)
            keys = F.pad((ends - first).cumsum(0, dtype=keys.dtype), (1, 0))
        self.cu_seqlens_q, self.cu_seqlens_k = queries, keys
        self.slots = packed_slots(pool, request_rows, keys, self.room, first)
        self._mask: Tensor | None = None

    def mask(self, index: Tensor) -> Tensor:
        """[T, room] bool: the keys that each token sees; padded tokens see what the last live one does.

        Args:
            index: [T] int32, 0, 1, 2, ...
        """
        if self._mask is None:  # by the first layer, for all
            queries, keys = self.cu_seqlens_q, self.cu_seqlens_k
            index = torch.minimum(index, queries[-1] - 1)
            owner = torch.searchsorted(queries[1:], index, right=True)
            first = keys.index_select(0, owner)
            # A request's last token sees its last key, the token before it one less, and so on.
            last = keys.index_select(0, owner + 1) - queries.index_select(0, owner + 1) + index
            if self.window is not None:
                first = torch.maximum(first, last - (self.window - 1))
            place = torch.arange(self.room, device=index.device, dtype=index.dtype)
            self._mask = (place >= first.unsqueeze(1)) & (place <= last.unsqueeze(1))
        return self._mask


def _dense(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """[T, heads, head_dim]: every query over all packed keys, under the mask."""
    query, keys, values = (heads.transpose(0, 1).unsqueeze(0) for heads in (query, keys, values))
    attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    return attended[0].transpose(0, 1)
