"""Causal attention over packed sequences, aligned to each one's last key: one function, two forms.

``varlen_kernel`` is one launch for all sequences, that of ``torch.nn.attention.varlen``, on a GPU in half precision;
``portable`` is one SDPA for each, anywhere. Their keys are gathered from a pool by ``packed_slots``.
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


OPERATOR = (
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
)  # fmt: skip
"""Leading arguments of the operator behind ``varlen_attn``, as they are known here."""


def flash_operator() -> Callable[..., Any] | None:
    """The operator behind ``varlen_attn``; None where it is not there, or takes other arguments than are known.

    ``varlen_attn`` reaches it through an operator written in Python, which takes the host longer than the launch does:
    a break, which runs once a layer, is made of little else.
    """
    packet = getattr(torch.ops.aten, "_flash_attention_forward", None)
    if packet is None:
        return None
    names = [argument.name for argument in packet.default._schema.arguments]  # noqa: SLF001 (told nowhere else)
    fits = tuple(names[: len(OPERATOR)]) == OPERATOR and {"window_size_left", "window_size_right"} <= {*names}
    return packet.default if fits else None


@functools.cache
def varlen_kernel(window: int | None = None) -> Callable[..., Any]:
    """Causal attention with grouped heads over packed sequences, as one kernel.

    Args:
        window: positions that a query sees, its own included; None for all before it.

    Returns:
        A function of query, key, value, cu_seqlens_q, cu_seqlens_k (int32), and the longest of each, two numbers.
    """
    operator = flash_operator()
    if operator is None:
        from torch.nn.attention.varlen import varlen_attn  # it loads the compiler, so only where it is used

        options = varlen_options(inspect.signature(varlen_attn).parameters, window)
        return functools.partial(varlen_attn, **options)
    no_dropout_causal_no_mask = 0.0, window is None, False
    sides = {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}

    def kernel(*packed: Any) -> Any:
        return operator(*packed, *no_dropout_causal_no_mask, **sides)[0]

    return kernel
