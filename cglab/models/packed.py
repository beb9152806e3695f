"""Causal attention over packed sequences, aligned to each one's last key: one function, two forms.

``varlen_kernel`` is one launch for all sequences, FlashAttention's by ``torch.nn.attention.varlen``, on a GPU in half
precision; ``portable`` is one SDPA for each, anywhere. Their keys are gathered from a pool by ``packed_slots``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cglab.models.kv import LayerPool

HALF = (torch.float16, torch.bfloat16)


def packed_slots(
    pool: LayerPool, request_rows: Tensor, cu_seqlens_k: Tensor, count: int, firsts: Tensor | None = None
) -> Tensor:
    """Where the keys of several requests live, one request after the other.

    Keys beyond the last one repeat it, so that whatever else the cache holds is not even read.

    Args:
        pool: where they live.
        request_rows: [requests] int32, rows of the page table.
        cu_seqlens_k: [requests + 1] int32, cumulative numbers of keys.
        count: how many slots to give.
        firsts: [requests] int32, the first position of each request that is read; None for 0.

    Returns:
        [count] int64.
    """
    index = torch.arange(count, device=cu_seqlens_k.device, dtype=cu_seqlens_k.dtype)
    index = torch.minimum(index, cu_seqlens_k[-1] - 1)
    owner = torch.searchsorted(cu_seqlens_k[1:], index, right=True)
    before = cu_seqlens_k if firsts is None else cu_seqlens_k[:-1] - firsts
    position = index - before.index_select(0, owner)
    page = pool.page_table[request_rows.index_select(0, owner), position // pool.page_size]
    return page * pool.page_size + position % pool.page_size


def portable(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    query_ends: Sequence[int],
    key_ends: Sequence[int],
    window: int | None,
) -> None:
    """Causal attention of each sequence over its own keys, one by one; on any device, in any dtype.

    Args:
        query: [tokens, heads, head_dim].
        key: [keys, kv_heads, head_dim], packed.
        value: likewise.
        out: [tokens, heads, head_dim], written.
        query_ends: where each sequence's tokens end, after a leading 0.
        key_ends: where each sequence's keys end, after a leading 0.
        window: positions that a query sees, its own included; None for all before it.
    """
    group = query.shape[1] // key.shape[1]
    sequences = zip(pairwise(query_ends), pairwise(key_ends), strict=True)
    for queries, keys in ((slice(*queries), slice(*keys)) for queries, keys in sequences):
        new, seen = queries.stop - queries.start, keys.stop - keys.start
        mask, reach = None, window or seen
        if (
            new < seen or reach < seen
        ):  # SDPA's own causal mask is aligned to the first key, this one to the last
            mask = torch.ones(new, seen, dtype=torch.bool, device=query.device)
            mask = mask.tril(seen - new).triu(seen - new - reach + 1)
        attended = F.scaled_dot_product_attention(
            query[queries].transpose(0, 1).unsqueeze(0),
            key[keys].transpose(0, 1).unsqueeze(0).repeat_interleave(group, dim=1),
            value[keys].transpose(0, 1).unsqueeze(0).repeat_interleave(group, dim=1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        out[queries].copy_(attended[0].transpose(0, 1))


def fits_varlen(query: Tensor) -> bool:
    """Whether the varlen kernel takes such queries: half precision, heads of 8 to 256, on a GPU from Ampere on."""
    head_dim = query.shape[-1]
    if not query.is_cuda or query.dtype not in HALF or head_dim % 8 or head_dim > 256:
        return False
    return _is_ampere(query.get_device())


@functools.cache
def _is_ampere(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 0)


def varlen_options(parameters: Collection[str], window: int | None = None) -> dict[str, Any]:
    """Arguments that ask ``varlen_attn`` for causal attention with grouped heads, aligned to the last key.

    Its signature has changed between versions. Where it has no ``enable_gqa``, it takes grouped heads as they are.

    Args:
        parameters: names that the installed function takes.
        window: positions that a query sees, its own included; None for all before it.
    """
    before = -1 if window is None else window - 1
    plain = window is None and "is_causal" in parameters
    causal: dict[str, Any] = {"is_causal": True} if plain else {"window_size": (before, 0)}
    return causal | ({"enable_gqa": True} if "enable_gqa" in parameters else {})


@functools.cache
def varlen_kernel(window: int | None = None) -> Callable[..., Any]:
    """The installed ``varlen_attn``, set to causal attention with grouped heads; see ``varlen_options``."""
    from torch.nn.attention.varlen import varlen_attn  # it loads the compiler, so only where it is used

    return functools.partial(varlen_attn, **varlen_options(inspect.signature(varlen_attn).parameters, window))
