"""A linear layer on one row, or on at most 16: where only the bandwidth of the weights counts.

A product made for many rows reads the weights at 60 to 95 % of that bandwidth, least where the matrix is small, and
where it splits the sums it adds them up in a kernel of its own. Here every program reads whole rows of the weights. On
one row it multiplies and adds; on a few it is one matrix unit's tile, so that what a row gets does not depend on how
many others there are. In the gated form a program has the rows of a gate and those of its partner, so that the
activation needs no pass of its own. Sums are in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 16
"""What a matrix unit takes at the least."""
BLOCK = 4096
"""Most elements of a row of the weights that a program for one row holds at a time."""


@triton.jit
def _activated(gate, up, KIND: tl.constexpr):
    """``silu(gate) * up``, rounded where the layer's own outputs would be."""
    gate, up = gate.to(KIND).to(tl.float32), up.to(KIND).to(tl.float32)
    return (gate * tl.sigmoid(gate)).to(KIND).to(tl.float32) * up


@triton.jit
def _one(x, weight, bias, out, features, COLUMNS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
         TAKES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    feature = tl.program_id(0) * TAKES + tl.arange(0, TAKES)
    inside = feature < features
    start = feature.to(tl.int64)[:, None] * COLUMNS
    start_of_partner = (feature + features).to(tl.int64)[:, None] * COLUMNS
    sums, partner_sums = tl.zeros([TAKES, BLOCK], tl.float32), tl.zeros([TAKES, BLOCK], tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        column = first + tl.arange(0, BLOCK)
        held = tl.load(x + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
        here = inside[:, None] & (column < COLUMNS)[None, :]
        place = weight + column[None, :]
        sums += (
            tl.load(place + start, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32) * held
        )
        if GATED:
            partner = tl.load(place + start_of_partner, mask=here, other=0.0, eviction_policy="evict_first")
            partner_sums += partner.to(tl.float32) * held
    result = tl.sum(sums, 1)
    if BIAS:
        result += tl.load(bias + feature, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(partner_sums, 1)
        if BIAS:
            up += tl.load(bias + features + feature, mask=inside, other=0.0).to(tl.float32)
        result = _activated(result, up, out.dtype.element_ty)
    tl.store(out + feature, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _few(x, weight, bias, out, rows, features, COLUMNS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
         ROWS: tl.constexpr, TAKES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row, feature = tl.arange(0, ROWS), tl.program_id(0) * TAKES + tl.arange(0, TAKES)
    real, inside = row < rows, feature < features
    start = feature.to(tl.int64)[None, :] * COLUMNS
    start_of_partner = (feature + features).to(tl.int64)[None, :] * COLUMNS
    sums, partner_sums = tl.zeros([ROWS, TAKES], tl.float32), tl.zeros([ROWS, TAKES], tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        column = first + tl.arange(0, BLOCK)
        there = column < COLUMNS
        held = tl.load(
            x + row[:, None] * COLUMNS + column[None, :], mask=real[:, None] & there[None, :], other=0.0
        )
        here = inside[None, :] & there[:, None]
        place = weight + column[:, None]
        read = tl.load(place + start, mask=here, other=0.0, eviction_policy="evict_first")
        sums = tl.dot(held, read, sums, input_precision="ieee")
        if GATED:
            read = tl.load(place + start_of_partner, mask=here, other=0.0, eviction_policy="evict_first")
            partner_sums = tl.dot(held, read, partner_sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + feature, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            partner_sums += tl.load(bias + features + feature, mask=inside, other=0.0).to(tl.float32)[None, :]
        sums = _activated(sums, partner_sums, out.dtype.element_ty)
    where = out + row[:, None] * features + feature[None, :]
    tl.store(where, sums.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


def shape_for_one(columns: int) -> tuple[int, int, int]:
    """Features that a program for one row takes, elements that it holds of each, and its warps.

    About 4096 elements in flight for each program were the fastest on an H200, at every shape of the published models.
    """
    block = min(BLOCK, triton.next_power_of_2(columns))
    return (1 if block == BLOCK else 2), block, (8 if block >= BLOCK // 2 else 4)


def thin_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Tensor:
    """``linear(x, weight, bias)`` for at most ``MOST_ROWS`` rows.

    Args:
        x: [rows, columns], contiguous.
        weight: [features, columns], contiguous.
        bias: [features], or None.
        gated: the weight is a gate's features and then as many partners: gives ``silu(gate) * partner``.

    Returns:
        [rows, features], or half as many features when gated, in the dtype of ``x``.
    """
    features, columns = weight.shape
    features = features // 2 if gated else features
    out = torch.empty((x.shape[0], features), device=x.device, dtype=x.dtype)
    given, has_bias = x if bias is None else bias, bias is not None
    if x.shape[0] == 1:
        takes, block, warps = shape_for_one(columns)
        _one[(triton.cdiv(features, takes),)](
            x, weight, given, out, features, columns, has_bias, gated, takes, block, num_warps=warps
        )
        return out
    # Found on an H200: many small programs, but for the gated one, whose matrix is the largest.
    takes, warps, stages = (32, 4, 4) if gated else (16, 2, 8)
    wide = x.dtype == torch.float32  # twice the bytes: half the blocks fit beside each other
    _few[(triton.cdiv(features, takes),)](
        x, weight, given, out, x.shape[0], features, columns, has_bias, gated, MOST_ROWS, takes, 64 if wide else 128,
        num_warps=warps, num_stages=stages // 2 if wide else stages,
    )  # fmt: skip
    return out
