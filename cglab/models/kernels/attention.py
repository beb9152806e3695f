"""Attention of a decode step over the paged cache: split along the context, then joined (flash decoding).

Each program reads a part of one request's context for one key head, and all query heads that share it. How many parts
there are is fixed for a batch size, how long they are follows from the request's length, which is data: one recording
serves every length, and no more of the cache is read than a request has. Weights and sums are in float32.

Where many query heads meet many new tokens, as in a wide tree, the rows are dealt out to several programs, and wide
heads are read in shorter blocks: so a program fits a processor's shared memory, 227 KB on an H100 or H200.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cglab.errors import InputError

LOG2_E = 1.4426950408889634
MOST_PARTS = 64
BLOCK, WARPS, STAGES = 32, 4, 3
"""Tokens that a program reads at a time, its warps, and blocks in flight: the best or within 3 % of it on an H200, at
1, 16 and 64 requests of 512 tokens; where a context is not split, twice the tokens are."""
MOST_DIM = 512
BYTES_IN_FLIGHT = 1 << 17
"""Of keys and values, two blocks of each: beside queries and weights what fits a processor of capability 9.0."""


@triton.jit
def _part(query, keys, values, table, rows, lens, tree, parts_out, parts_log, out, scale, pages, KV: tl.constexpr,
          GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
          NODES: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
          BLOCK: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    request, part = tl.program_id(0), tl.program_id(2)
    head, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
    parts = tl.num_programs(2)
    length = tl.load(lens + request).to(tl.int32)
    page_row = table + tl.load(rows + request) * pages
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - (WINDOW + WIDTH - 1), 0)
    share = tl.cdiv(tl.cdiv(length - begin, parts), BLOCK) * BLOCK
    first = begin + part * share
    last = tl.minimum(first + share, length)
    asks, place = tile * QUERIES + tl.arange(0, QUERIES), tl.arange(0, D)
    # Row ``asks`` is new token ``asks // GROUP`` of the request and query head ``asks % GROUP`` of this key head.
    token, heads = request * WIDTH + asks // GROUP, head * GROUP + asks % GROUP
    real = (asks < GROUP * WIDTH)[:, None] & (place < DIM)[None, :]
    where = (token * (KV * GROUP) + heads)[:, None] * DIM + place[None, :]
    asked = tl.load(query + where, mask=real, other=0.0)
    end = length - WIDTH + 1 + asks // GROUP  # the first position that a row does not see
    if (
        NODES
    ):  # of a tree: what a row sees of the new tokens is told node by node, and how many gives its depth
        node = tl.arange(0, NODES)
        sees = tree + (token * WIDTH)[:, None]
        known = (asks < GROUP * WIDTH)[:, None] & (node < WIDTH)[None, :]
        depths = tl.load(sees + node[None, :], mask=known, other=0).to(tl.int32)
        end = length - WIDTH + tl.sum(depths, 1)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    held = tl.zeros([QUERIES, D], tl.float32)
    for start in range(first, last, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < last
        # A large cache has more elements than 32 bits count.
        page = tl.load(page_row + position // PAGE, mask=inside, other=0).to(tl.int64)
        slot = (page * PAGE + position % PAGE) * KV + head
        cell = slot[:, None] * DIM + place[None, :]
        there = inside[:, None] & (place < DIM)[None, :]
        key = tl.load(keys + cell, mask=there, other=0.0).to(asked.dtype)
        value = tl.load(values + cell, mask=there, other=0.0).to(asked.dtype)
        score = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        seen = inside[None, :] & (position[None, :] < end[:, None])
        if WINDOW:
            seen = seen & (position[None, :] >= end[:, None] - WINDOW)
        if NODES:
            among = position - (length - WIDTH)
            new = (asks < GROUP * WIDTH)[:, None] & ((among >= 0) & inside)[None, :]
            linked = tl.load(sees + among[None, :], mask=new, other=0).to(tl.int32) > 0
            seen = (seen & (among < 0)[None, :]) | linked
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        weight, fade = tl.exp2(score - safe[:, None]), tl.exp2(top - safe)
        total = total * fade + tl.sum(weight, 1)
        held = held * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = higher
    share_of = held / tl.where(total > 0, total, 1.0)[:, None]
    if not SPLIT:
        tl.store(out + where, share_of.to(out.dtype.element_ty), mask=real)
    else:
        line = ((request * KV + head) * parts + part) * (GROUP * WIDTH) + asks
        log = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(parts_log + line, log, mask=asks < GROUP * WIDTH)
        tl.store(parts_out + line[:, None] * DIM + place[None, :], share_of, mask=real)


@triton.jit(do_not_specialize=["parts"])
def _join(parts_out, parts_log, out, parts, KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
          D: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    row = (token % WIDTH) * GROUP + head % GROUP
    part, place = tl.arange(0, MOST), tl.arange(0, D)
    line = (((token // WIDTH) * KV + head // GROUP) * parts + part) * (GROUP * WIDTH) + row
    log = tl.load(parts_log + line, mask=part < parts, other=float("-inf"))
    weight = tl.exp2(log - tl.max(log, 0))
    weight = weight / tl.sum(weight, 0)
    there = (part < parts)[:, None] & (place < DIM)[None, :]
    held = tl.load(parts_out + line[:, None] * DIM + place[None, :], mask=there, other=0.0)
    result = tl.sum(held * weight[:, None], 0).to(out.dtype.element_ty)
    tl.store(out + (token * (KV * GROUP) + head) * DIM + place, result, mask=place < DIM)


def parts_for(requests: int, kv_heads: int, processors: int, context: int) -> int:
    """Into how many parts a context is split: as long as the processors get no more than four programs each.

    Args:
        requests: rows of the padded step; a batch's own number, so that padding changes nobody's sums.
        kv_heads: key heads.
        processors: of the device.
        context: most tokens that a request can have.
    """
    wanted = 4 * processors // (requests * kv_heads)
    return max(1, min(wanted, triton.cdiv(context, BLOCK), MOST_PARTS))


def rows_for(rows: int, element_size: int) -> int:
    """Rows of queries that a program takes, a power of two: at least the 16 of a matrix unit, at most what compiles.

    Args:
        rows: of one request and key head: query heads of the key head times new tokens.
        element_size: bytes of an element. Exact float32 products use no matrix unit: their code grows with
            the rows, and takes minutes to compile for the rows of a wide tree.
    """
    return max(16, min(triton.next_power_of_2(rows), 16 if element_size > 2 else 64))


def block_for(dim: int, element_size: int, *, split: bool) -> int:
    """Tokens that a program reads at a time: fewer where the heads are wide, so that two blocks fit shared memory.

    Args:
        dim: of a head.
        element_size: bytes of an element.
        split: whether the context is in parts.

    Raises:
        InputError: the heads are wider than ``MOST_DIM``.
    """
    if dim > MOST_DIM:
        raise InputError(
            f"a head has {dim} elements; the attention kernel takes at most {MOST_DIM}: use the portable ops"
        )
    fitting = BYTES_IN_FLIGHT // (4 * triton.next_power_of_2(dim) * element_size)
    return min(BLOCK if split else 2 * BLOCK, fitting)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    request_rows: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    parts: int,
    page_size: int,
    width: int = 1,
    window: int | None = None,
    tree: Tensor | None = None,
) -> None:
    """Attends to the paged cache of one layer.

    Args:
        query: [requests * width, heads, head_dim], contiguous.
        keys: [slots, kv_heads, head_dim].
        values: likewise.
        page_table: [rows, pages] int64.
        request_rows: [requests] int64, rows of the table.
        seq_lens: [requests] int64, tokens of each request, its new ones included: at least ``width``.
        out: [requests * width, heads, head_dim], written.
        parts: from :func:`parts_for`.
        page_size: tokens of a page.
        width: new tokens of each request.
        window: positions that a query sees, its own included; None for all before it.
        tree: [requests, width, width] bool, the new tokens that each of them sees; None for those before it.

    Raises:
        InputError: the heads are wider than ``MOST_DIM``.
    """
    tokens, heads, dim = query.shape
    kv, requests = keys.shape[1], tokens // width
    # At least 16 each: a matrix unit adds up no fewer products.
    group, padded_dim = heads // kv, max(16, triton.next_power_of_2(dim))
    lines = requests * kv * parts * group * width if parts > 1 else 0
    parts_out = torch.empty((lines, dim), device=query.device, dtype=torch.float32)
    parts_log = torch.empty((lines,), device=query.device, dtype=torch.float32)
    element = max(query.element_size(), keys.element_size())
    queries, block = rows_for(group * width, element), block_for(dim, element, split=parts > 1)
    tiles = triton.cdiv(group * width, queries)
    nodes = 0 if tree is None else triton.next_power_of_2(width)
    links = (
        request_rows if tree is None else tree.view(torch.uint8)
    )  # without a tree anything: it is not read
    _part[(requests, kv * tiles, parts)](
        query, keys, values, page_table, request_rows, seq_lens, links, parts_out, parts_log, out,
        LOG2_E / dim**0.5, page_table.shape[1], kv, group, queries, dim, padded_dim, width, nodes, page_size,
        window or 0, parts > 1, block, tiles, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if parts > 1:
        _join[(tokens, heads)](
            parts_out, parts_log, out, parts, kv, group, dim, padded_dim, width, MOST_PARTS, num_warps=2,
        )  # fmt: skip
