"""A weight matrix times one row: what a linear layer is at batch 1, where only the bandwidth of the weights counts.

A matrix product made for many rows reads the weights at 60 to 95 % of that bandwidth, least where the matrix is small.
Here every program reads whole rows of the weights, as one contiguous block each; in the gated form it reads the row of
the gate and that of its partner, so that the activation needs no pass of its own. Sums are in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Most elements of a row that a program holds at a time."""


@triton.jit
def _matvec(x, weight, bias, out, rows, COLUMNS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
            TAKES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * TAKES + tl.arange(0, TAKES)
    inside = row < rows
    start = row.to(tl.int64)[:, None] * COLUMNS
    sums = tl.zeros([TAKES, BLOCK], tl.float32)
    gated = tl.zeros([TAKES, BLOCK], tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        column = first + tl.arange(0, BLOCK)
        held = tl.load(x + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
        here = inside[:, None] & (column < COLUMNS)[None, :]
        place = weight + start + column[None, :]
        sums += tl.load(place, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32) * held
        if GATED:
            place += rows.to(tl.int64) * COLUMNS
            gated += tl.load(place, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32) * held
    result = tl.sum(sums, 1)
    if BIAS:
        result += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(gated, 1)
        if BIAS:
            up += tl.load(bias + rows + row, mask=inside, other=0.0).to(tl.float32)
        # Rounded where the layer's own output would be, as in the form with many rows.
        result = result.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        result = (result * tl.sigmoid(result)).to(out.dtype.element_ty).to(tl.float32) * up
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside)


def shape_of_program(columns: int) -> tuple[int, int, int]:
    """Rows that a program takes, elements that it holds of each, and its warps.

    About 4096 elements in flight for each program were the fastest on an H200, at every shape of the published models.
    """
    block = min(BLOCK, triton.next_power_of_2(columns))
    return (1 if block == BLOCK else 2), block, (8 if block >= BLOCK // 2 else 4)


def matvec(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Tensor:
    """``linear(x, weight, bias)`` for one row.

    Args:
        x: [1, columns].
        weight: [rows, columns], contiguous.
        bias: [rows], or None.
        gated: the weight is a gate's rows and then as many partners: gives ``silu(gate) * partner``.

    Returns:
        [1, rows], or half as many when gated, in the dtype of ``x``.
    """
    rows, columns = weight.shape
    rows = rows // 2 if gated else rows
    out = torch.empty((1, rows), device=x.device, dtype=x.dtype)
    takes, block, warps = shape_of_program(columns)
    _matvec[(triton.cdiv(rows, takes),)](
        x, weight, x if bias is None else bias, out, rows, columns, bias is not None, gated, takes, block,
        num_warps=warps,
    )  # fmt: skip
    return out
