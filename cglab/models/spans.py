"""Attention of a prefill step: every request brings its own number of tokens, with cached ones before them.

The recording stores this step's keys and values itself, as where they go is a static input. Attending is an eager
break: a breakable capture leaves it out, and it costs the host as little as it can. What the layers share (cumulative
lengths, the slots that packed keys are gathered from) is derived from the live spans by the first break of a step and
dropped with them, so that nothing of one step reaches the next (P39, P45). On a GPU in half precision one varlen
kernel attends for all requests, elsewhere one SDPA for each. The output is allocated before the break and written in
place (P50).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from cglab.errors import InputError
from cglab.graphs.breaks import eager_break
from cglab.models.kv import CacheAttention, LayerCache, LayerPool, PagedKV
from cglab.models.packed import fits_varlen, packed_slots, portable, varlen_kernel


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


def first_key(start: int, window: int | None) -> int:
    """The first position that any token from ``start`` on sees."""
    return 0 if window is None else max(start - window + 1, 0)


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """What all layers of a pool share in one step, on the host and on the device.

    Attributes:
        query_ends: where each span's tokens end among the step's, after a leading 0.
        key_ends: where each span's keys end among the packed ones, after a leading 0.
        cu_seqlens_q: ``query_ends`` as [spans + 1] int32.
        cu_seqlens_k: ``key_ends`` as [spans + 1] int32.
        longest: most new tokens, and most keys, of one span.
        window: positions that a query sees, its own included; None for all before it.
        key_slots: [keys] int64, where the packed keys live; None if no cached token is seen, so that the step's
            own keys are all there is.
    """

    query_ends: list[int]
    key_ends: list[int]
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest: tuple[int, int]
    window: int | None
    key_slots: Tensor | None

    @classmethod
    def of(cls, spans: Sequence[Span], pool: LayerPool) -> SpanPlan:
        """Derives the plan of a step over one pool; one copy to the device."""
        firsts = [first_key(span.start, pool.window) for span in spans]
        keys = [span.end - first for span, first in zip(spans, firsts, strict=True)]
        query_ends = list(accumulate((span.length for span in spans), initial=0))
        key_ends = list(accumulate(keys, initial=0))
        rows = [span.row for span in spans]
        packed = np.array([*query_ends, *key_ends, *rows, *firsts], dtype=np.int32)
        on_device = torch.from_numpy(packed).to(pool.page_table.device, non_blocking=True)
        cu_q, cu_k, *read = on_device.split((len(query_ends), len(key_ends), len(rows), len(firsts)))
        cached = key_ends[-1] > query_ends[-1]
        first = read[1] if pool.window is not None else None
        slots = packed_slots(pool, read[0], cu_k, key_ends[-1], first) if cached else None
        longest = max((span.length for span in spans), default=0), max(keys, default=0)
        return cls(query_ends, key_ends, cu_q, cu_k, longest, pool.window, slots)

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


class PrefillAttention(CacheAttention):
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
        self.kv, self.live = kv, live
        self.out_slots = kv.by_pool(out_slots, window_out_slots)

    def cache(self, layer_index: int) -> LayerCache:
        """See ``CacheAttention``."""
        pool = self.kv.pool(layer_index)
        return pool.cache(layer_index, self.out_slots[pool])

    def attend(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See ``CacheAttention``."""
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        pool = self.kv.pool(layer_index)
        # What is attended to is what the cache holds, so that a prompt in chunks equals the prompt at once.
        key, value = key.to(pool.keys.dtype), value.to(pool.keys.dtype)
        _prefill(pool, layer_index, query=query, key=key, value=value, out=out, live=self.live)
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
    live: LiveSpans,
) -> None:
    """Attends; padded rows of ``out`` become zero (P53, P54)."""
    plan = live.plan(pool)
    tokens = plan.tokens
    if tokens < len(out):
        out[tokens:].zero_()
        if tokens == 0:
            return
        query, key, value, out = query[:tokens], key[:tokens], value[:tokens], out[:tokens]
    if plan.key_slots is not None:
        key, value = pool.gather(layer_index, plan.key_slots)
    if key.dtype != query.dtype:
        key, value = key.to(query.dtype), value.to(query.dtype)
    out = out.view_as(query)
    if fits_varlen(query):
        kernel = varlen_kernel(plan.window)
        out.copy_(kernel(query, key, value, plan.cu_seqlens_q, plan.cu_seqlens_k, *plan.longest))
    else:
        portable(query, key, value, out, plan.query_ends, plan.key_ends, plan.window)
