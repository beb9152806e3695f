"""Norm of each head, rotary turn, and the store into the paged cache: one pass over a projection.

A program takes a few heads of one token. Heads of queries and keys are normalised (where the model does that) and
turned; keys and values go to the token's slot of the cache, and both queries and keys are given back packed. All of it
is computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 4
"""Heads of a program: enough to fill its loads, few enough that one token keeps several processors busy."""


@triton.jit
def _turn(qkv, turn, norm, query, key, keys, values, slots, eps, QUERY: tl.constexpr, KV: tl.constexpr,
          DIM: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    place = tl.arange(0, WIDTH)
    there = (head < QUERY + 2 * KV)[:, None] & (place < DIM)[None, :]
    source = qkv + (token * (QUERY + 2 * KV) + head[:, None]) * DIM
    held = tl.load(source + place[None, :], mask=there, other=0.0).to(tl.float32)
    turned = (head < QUERY + KV)[:, None] & there
    half = (place + DIM // 2) % DIM  # its partner in the rotation
    partner = tl.load(source + half[None, :], mask=turned, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(held * held, 1) / DIM + eps)[:, None]
        weight = norm + head[:, None] * DIM
        first = held * scale * tl.load(weight + place[None, :], mask=turned, other=0.0).to(tl.float32)
        partner = partner * scale * tl.load(weight + half[None, :], mask=turned, other=0.0).to(tl.float32)
    else:
        first = held
    cosine = tl.load(turn + token * 2 * DIM + place, mask=place < DIM, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(turn + (token * 2 + 1) * DIM + place, mask=place < DIM, other=0.0).to(tl.float32)[None, :]
    result = tl.where(turned, first * cosine + partner * sine, held).to(query.dtype.element_ty)
    asks = (head < QUERY)[:, None] & there
    tl.store(query + (token * QUERY + head[:, None]) * DIM + place[None, :], result, mask=asks)
    is_key = turned & (head >= QUERY)[:, None]
    own = head - QUERY
    tl.store(key + (token * KV + own[:, None]) * DIM + place[None, :], result, mask=is_key)
    slot = tl.load(slots + token).to(tl.int64)  # a large cache has more elements than 32 bits count
    stored = result.to(keys.dtype.element_ty)
    tl.store(keys + (slot * KV + own[:, None]) * DIM + place[None, :], stored, mask=is_key)
    is_value = (head >= QUERY + KV)[:, None] & there
    tl.store(values + (slot * KV + own[:, None] - KV) * DIM + place[None, :], stored, mask=is_value)


def turn_and_store(
    qkv: Tensor, turn: Tensor, norm: Tensor | None, eps: float, keys: Tensor, values: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys of a projection, normalised and turned; keys and values stored.

    Args:
        qkv: [T, heads + 2 * kv_heads, head_dim], contiguous.
        turn: [T, 2, head_dim], rows of ``rotary.rotary_table``.
        norm: [heads + kv_heads, head_dim], or None for a model without.
        eps: of the norm.
        keys: [slots, kv_heads, head_dim] of one layer's cache, written.
        values: likewise.
        slots: [T] int64, where each token's keys and values go; slot 0 may occur more than once.

    Returns:
        Queries [T, heads, head_dim] and keys [T, kv_heads, head_dim], in the dtype of ``qkv``.
    """
    tokens, heads, dim = qkv.shape
    kv = keys.shape[1]
    query = torch.empty((tokens, heads - 2 * kv, dim), device=qkv.device, dtype=qkv.dtype)
    key = torch.empty((tokens, kv, dim), device=qkv.device, dtype=qkv.dtype)
    _turn[(tokens, triton.cdiv(heads, HEADS))](
        qkv, turn, qkv if norm is None else norm, query, key, keys, values, slots, eps, heads - 2 * kv, kv, dim,
        triton.next_power_of_2(dim), norm is not None, HEADS, num_warps=4,
    )  # fmt: skip
    return query, key
