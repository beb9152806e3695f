"""Attention of a prefill step: every request brings its own number of tokens, with cached ones before them.

The body, which stores this step's keys and values and attends, is an eager break: a breakable capture leaves it
out. What the layers of a pool share (cumulative lengths, the slots that packed keys are gathered from) is derived from
the live spans by the first break of a step and dropped with them, so that nothing of one step reaches the next (P39,
P45). A layer with a window gathers what some query of a span sees, and no more: older pages may have been given back.
One function, two forms: ``varlen`` is one kernel for all requests, on a GPU in half precision; ``portable`` is one
SDPA a request, anywhere. The output is allocated before the break and written in place (P50).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cglab.errors import InputError
from cglab.graphs.breaks import eager_break
from cglab.models.kv import LayerPool, PagedKV
from cglab.models.varlen import fits_varlen, varlen_kernel


@dataclass(frozen=True, slots=True)
class Span:
    """One request's part of a prefill step.

    Attributes:
        row: its row of the page table.
        start: tokens of it that are cached already.
        length: tokens of it in this step, at least 1.

    Raises:
        InputError: for a span without tokens, or a negative row or start.
    """

    row: int
    start: int
    length: int

    def __post_init__(self) -> None:
        if self.row < 0 or self.start < 0 or self.length < 1:
            raise InputError(f"{self}: a span has at least 1 token, and its row and start are not negative")

    @property
    def end(self) -> int:
        """Tokens of the request that are cached after this step."""
        return self.start + self.length

    def cached(self, window: int | None) -> int:
        """Cached tokens that some of its queries see: all, or with a window those that its first one does."""
        return self.start if window is None else min(self.start, window - 1)


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """What the layers of one pool share in a step, on the host and on the device.

    Attributes:
        window: positions that a query sees, its own included; None for all before it.
        query_ends: where each span's tokens end among the step's, after a leading 0.
        key_ends: where each span's keys end among the packed ones, after a leading 0.
        cu_seqlens_q: ``query_ends`` as [spans + 1] int32.
        cu_seqlens_k: ``key_ends`` as [spans + 1] int32.
        longest: most new tokens, and most keys, of one span.
        key_slots: [keys] int64, where the packed keys live; None if no cached token is seen, so that the step's
            own keys are all there is.
    """

    window: int | None
    query_ends: list[int]
    key_ends: list[int]
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest: tuple[int, int]
    key_slots: Tensor | None

    @classmethod
    def of(cls, spans: Sequence[Span], pool: LayerPool) -> SpanPlan:
        """Derives the plan of a step over one pool; one copy to the device."""
        seen = [span.cached(pool.window) + span.length for span in spans]
        query_ends = list(accumulate((span.length for span in spans), initial=0))
        key_ends = list(accumulate(seen, initial=0))
        firsts = [span.end - keys for span, keys in zip(spans, seen, strict=True)]
        packed = np.array([*query_ends, *key_ends, *(span.row for span in spans), *firsts], dtype=np.int32)
        on_device = torch.from_numpy(packed).to(pool.page_table.device, non_blocking=True)
        ends, count = len(query_ends), len(spans)
        queries, keys, rows, first = on_device.split((ends, ends, count, count))
        longest = max((span.length for span in spans), default=0), max(seen, default=0)
        slots = None
        if key_ends[-1] > query_ends[-1]:
            slots = packed_slots(pool, rows, keys, key_ends[-1], None if pool.window is None else first)
        return cls(pool.window, query_ends, key_ends, queries, keys, longest, slots)

    @property
    def tokens(self) -> int:
        """New tokens of the step, its padding not counted."""
        return self.query_ends[-1]


class LiveSpans:
    """The requests of a prefill step, in the order of its tokens; changed in place from step to step.

    Tokens after the last span are padding.

    Args:
        spans: one span a request.
    """

    def __init__(self, spans: Sequence[Span] = ()) -> None:
        self._spans = tuple(spans)
        self._plans: dict[LayerPool, SpanPlan] = {}

    @property
    def spans(self) -> tuple[Span, ...]:
        """One span a request. Setting them, equal ones too, drops what was derived from those before (P45)."""
        return self._spans

    @spans.setter
    def spans(self, spans: Sequence[Span]) -> None:
        self._spans, self._plans = tuple(spans), {}

    def plan(self, pool: LayerPool) -> SpanPlan:
        """What the layers of ``pool`` share in this step; made when it is first asked for."""
        if pool not in self._plans:
            self._plans[pool] = SpanPlan.of(self._spans, pool)
        return self._plans[pool]


def packed_slots(
    pool: LayerPool, request_rows: Tensor, cu_seqlens_k: Tensor, count: int, first: Tensor | None = None
) -> Tensor:
    """Where the keys of several requests live, one request after the other.

    Keys beyond the last one repeat it, so that whatever else the cache holds is not even read.

    Args:
        pool: where they live.
        request_rows: [requests] integers, rows of the page table.
        cu_seqlens_k: [requests + 1] integers of the same type, cumulative keys of the requests.
        count: how many slots to give.
        first: [requests] integers of the same type, position of each request's first key; None for 0.

    Returns:
        [count] int64.
    """
    index = torch.arange(count, device=cu_seqlens_k.device, dtype=cu_seqlens_k.dtype)
    index = torch.minimum(index, cu_seqlens_k[-1] - 1)
    owner = torch.searchsorted(cu_seqlens_k[1:], index, right=True)
    position = index - cu_seqlens_k.index_select(0, owner)
    if first is not None:
        position = position + first.index_select(0, owner)
    page = pool.page_table[request_rows.index_select(0, owner), position // pool.page_size]
    return page * pool.page_size + position % pool.page_size


class PrefillAttention:
    """Attention of a step in which each request brings its own number of tokens, cached ones before them."""

    def __init__(
        self, kv: PagedKV, *, out_slots: Tensor, live: LiveSpans, window_out_slots: Tensor | None = None
    ) -> None:
        """Takes the step's tensors; nothing is computed ahead, as the break reads the lengths on the host.

        Args:
            kv: the cache.
            out_slots: [T] int64, where this step's keys and values go; 0 for padding.
            live: the requests, read at every call of the break.
            window_out_slots: [T] int64, as ``out_slots`` in the window pool, if there is one.

        Raises:
            InputError: if slots are missing for a pool, or given for none.
        """
        self.kv, self.out_slots, self.live = kv, kv.by_pool(out_slots, window_out_slots), live

    def __call__(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends in one layer; see ``decoder.Attend``."""
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        pool = self.kv.pool(layer_index)
        _prefill(
            pool, layer_index, query=query, key=key, value=value, out=out,
            out_slots=self.out_slots[pool], live=self.live,
        )  # fmt: skip
        return out


@eager_break
def _prefill(
    pool: LayerPool,
    layer_index: int,
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    out_slots: Tensor,
    live: LiveSpans,
) -> None:
    """Stores keys and values and attends; padded rows of ``out`` become zero (P53, P54)."""
    plan = live.plan(pool)
    tokens = plan.tokens
    if tokens < len(out):
        out[tokens:].zero_()
    if tokens == 0:
        return
    # What is attended to is what the cache holds, so that a prompt in chunks equals the prompt at once.
    key, value = (new[:tokens].to(pool.keys.dtype) for new in (key, value))
    pool.write(layer_index, out_slots[:tokens], key, value)
    if plan.key_slots is not None:
        key, value = pool.gather(layer_index, plan.key_slots)
    attend = varlen if fits_varlen(query, pool.window) else portable
    attended = out[:tokens].view(tokens, query.shape[1], query.shape[2])
    attend(query[:tokens], key.to(query.dtype), value.to(query.dtype), attended, plan)


def portable(query: Tensor, key: Tensor, value: Tensor, out: Tensor, plan: SpanPlan) -> None:
    """Causal attention of each span over the keys that it sees, span by span; on any device, in any dtype.

    Args:
        query: [tokens, heads, head_dim].
        key: [keys, kv_heads, head_dim], packed.
        value: likewise.
        out: [tokens, heads, head_dim], written.
        plan: how tokens and keys are split into spans.
    """
    group = query.shape[1] // key.shape[1]
    spans = zip(pairwise(plan.query_ends), pairwise(plan.key_ends), strict=True)
    for queries, keys in ((slice(*queries), slice(*keys)) for queries, keys in spans):
        new, seen = queries.stop - queries.start, keys.stop - keys.start
        mask, window = None, plan.window or seen
        if (
            new < seen or window < seen
        ):  # the last query sees the last keys: SDPA's causal mask starts at the first
            mask = torch.ones(new, seen, dtype=torch.bool, device=query.device).tril(seen - new)
            mask = mask.triu(seen - new - window + 1) if window < seen else mask
        attended = F.scaled_dot_product_attention(
            query[queries].transpose(0, 1).unsqueeze(0),
            key[keys].transpose(0, 1).unsqueeze(0).repeat_interleave(group, dim=1),
            value[keys].transpose(0, 1).unsqueeze(0).repeat_interleave(group, dim=1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        out[queries].copy_(attended[0].transpose(0, 1))


def varlen(query: Tensor, key: Tensor, value: Tensor, out: Tensor, plan: SpanPlan) -> None:
    """``portable`` as one kernel for all spans (FlashAttention's, by ``torch.nn.attention.varlen``)."""
    kernel = varlen_kernel(plan.window)
    out.copy_(kernel(query, key, value, plan.cu_seqlens_q, plan.cu_seqlens_k, *plan.longest))
