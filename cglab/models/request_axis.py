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

from cglab.models.kv import PagedKV
from cglab.models.spans import fits_varlen, packed_slots, varlen_kernel


class RequestAxisAttention:
    """Attention of a step whose split into requests is data on the device.

    Args:
        kv: the cache.
        out_slots: [T] int64, where this step's keys and values go; 0 for padding.
        request_rows: [R] int32, rows of the page table; 0 for absent requests.
        cu_seqlens_q: [R + 1] int32, where each request's tokens start among the step's; the last is the live count.
        cu_seqlens_k: [R + 1] int32, the same among the packed keys, cached ones included.
        keys: how many packed keys there is room for.
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
    ) -> None:
        self.kv, self.out_slots, self.keys = kv, out_slots, keys
        self.cu_seqlens_q, self.cu_seqlens_k = cu_seqlens_q, cu_seqlens_k
        self.key_slots = packed_slots(kv, request_rows, cu_seqlens_k, keys)
        self.index = torch.arange(len(out_slots), device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)
        self.padded = (self.index >= cu_seqlens_q[-1]).unsqueeze(1)
        self._mask: Tensor | None = None

    def __call__(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends in one layer; see ``decoder.Attend``."""
        kv = self.kv
        kv.write(layer_index, self.out_slots, key.to(kv.keys.dtype), value.to(kv.values.dtype))
        keys = kv.keys[layer_index].index_select(0, self.key_slots).to(query.dtype)
        values = kv.values[layer_index].index_select(0, self.key_slots).to(query.dtype)
        if fits_varlen(query):
            attended = varlen_kernel()(
                query, keys, values, self.cu_seqlens_q, self.cu_seqlens_k, len(query), self.keys
            )
        else:
            attended = self._dense(query, keys, values)
        return attended.flatten(1).masked_fill_(self.padded, 0.0)  # the kernel leaves these rows unset

    def _dense(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[T, heads, head_dim]: every query over all packed keys, under the mask."""
        query, keys, values = (heads.transpose(0, 1).unsqueeze(0) for heads in (query, keys, values))
        mask = self.mask()
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)[
            0
        ].transpose(0, 1)

    def mask(self) -> Tensor:
        """[T, keys] bool: the keys that each token sees; padded tokens see what the last live one does."""
        if self._mask is None:  # by the first layer, for all
            queries, keys = self.cu_seqlens_q, self.cu_seqlens_k
            index = torch.minimum(self.index, queries[-1] - 1)
            owner = torch.searchsorted(queries[1:], index, right=True)
            first = keys.index_select(0, owner)
            # A request's last token sees its last key, the token before it one less, and so on.
            last = keys.index_select(0, owner + 1) - queries.index_select(0, owner + 1) + index
            place = torch.arange(self.keys, device=index.device, dtype=index.dtype)
            self._mask = (place >= first.unsqueeze(1)) & (place <= last.unsqueeze(1))
        return self._mask
