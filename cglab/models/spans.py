"""Attention of a prefill step: every request brings its own number of tokens, with cached ones before them.

The body, which stores this step's keys and values and attends, is an eager break: a breakable capture leaves it
out. What the layers share (cumulative lengths, the slots that packed keys are gathered from) is derived from the
live spans by the first break of a step and dropped with them, so that nothing of one step reaches the next (P39,
P45). One function, two forms: ``varlen`` is one kernel for all requests, on a GPU in half precision; ``portable``
is one SDPA a request, anywhere. The output is allocated before the break and written in place (P50).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cglab.errors import InputError
from cglab.graphs.breaks import eager_break
from cglab.models.kv import PagedKV

HALF = (torch.float16, torch.bfloat16)


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


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """What all layers of one step share, on the host and on the device.

    Attributes:
        query_ends: where each span's tokens end among the step's, after a leading 0.
        key_ends: where each span's keys end among the packed ones, after a leading 0.
        cu_seqlens_q: ``query_ends`` as [spans + 1] int32.
        cu_seqlens_k: ``key_ends`` as [spans + 1] int32.
        longest: most new tokens, and most keys, of one span.
        key_slots: [keys] int64, where the packed keys live; None if no token was cached before, so that the
            step's own keys are all there is.
    """

    query_ends: list[int]
    key_ends: list[int]
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest: tuple[int, int]
    key_slots: Tensor | None

    @classmethod
    def of(cls, spans: Sequence[Span], kv: PagedKV) -> SpanPlan:
        """Derives the plan of a step over one cache; one copy to the device."""
        query_ends = list(accumulate((span.length for span in spans), initial=0))
        key_ends = list(accumulate((span.end for span in spans), initial=0))
        packed = np.array([*query_ends, *key_ends, *(span.row for span in spans)], dtype=np.int32)
        on_device = torch.from_numpy(packed).to(kv.page_table.device, non_blocking=True)
        queries, keys, rows = on_device.split((len(query_ends), len(key_ends), len(spans)))
        longest = max((s.length for s in spans), default=0), max((s.end for s in spans), default=0)
        cached = key_ends[-1] > query_ends[-1]
        slots = packed_slots(kv, rows, keys, key_ends[-1]) if cached else None
        return cls(query_ends, key_ends, queries, keys, longest, slots)

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
        self._plan: tuple[PagedKV, SpanPlan] | None = None

    @property
    def spans(self) -> tuple[Span, ...]:
        """One span a request. Setting them, equal ones too, drops what was derived from those before (P45)."""
        return self._spans

    @spans.setter
    def spans(self, spans: Sequence[Span]) -> None:
        self._spans, self._plan = tuple(spans), None

    def plan(self, kv: PagedKV) -> SpanPlan:
        """What the layers of this step share over ``kv``; made when it is first asked for."""
        if self._plan is None or self._plan[0] is not kv:
            self._plan = (kv, SpanPlan.of(self._spans, kv))
        return self._plan[1]


def packed_slots(kv: PagedKV, request_rows: Tensor, cu_seqlens_k: Tensor, count: int) -> Tensor:
    """Where the keys of several requests live, one request after the other.

    Keys beyond the last one repeat it, so that whatever else the cache holds is not even read.

    Args:
        kv: the cache.
        request_rows: [requests] integers, rows of the page table.
        cu_seqlens_k: [requests + 1] integers of the same type, cumulative tokens of the requests.
        count: how many slots to give.

    Returns:
        [count] int64.
    """
    index = torch.arange(count, device=cu_seqlens_k.device, dtype=cu_seqlens_k.dtype)
    index = torch.minimum(index, cu_seqlens_k[-1] - 1)
    owner = torch.searchsorted(cu_seqlens_k[1:], index, right=True)
    position = index - cu_seqlens_k.index_select(0, owner)
    page = kv.page_table[request_rows.index_select(0, owner), position // kv.page_size]
    return page * kv.page_size + position % kv.page_size


class PrefillAttention:
    """Attention of a step in which each request brings its own number of tokens, cached ones before them."""

    def __init__(self, kv: PagedKV, *, out_slots: Tensor, live: LiveSpans) -> None:
        """Takes the step's tensors; nothing is computed ahead, as the break reads the lengths on the host.

        Args:
            kv: the cache.
            out_slots: [T] int64, where this step's keys and values go; 0 for padding.
            live: the requests, read at every call of the break.
        """
        self.kv, self.out_slots, self.live = kv, out_slots, live

    def __call__(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends in one layer; see ``decoder.Attend``."""
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        _prefill(
            self.kv, layer_index, query=query, key=key, value=value, out=out,
            out_slots=self.out_slots, live=self.live,
        )  # fmt: skip
        return out


@eager_break
def _prefill(
    kv: PagedKV,
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
    plan = live.plan(kv)
    tokens = plan.tokens
    if tokens < len(out):
        out[tokens:].zero_()
    if tokens == 0:
        return
    # What is attended to is what the cache holds, so that a prompt in chunks equals the prompt at once.
    key, value = (new[:tokens].to(kv.keys.dtype) for new in (key, value))
    kv.write(layer_index, out_slots[:tokens], key, value)
    if plan.key_slots is not None:
        key = kv.keys[layer_index].index_select(0, plan.key_slots)
        value = kv.values[layer_index].index_select(0, plan.key_slots)
    attend = varlen if fits_varlen(query) else portable
    attended = out[:tokens].view(tokens, query.shape[1], query.shape[2])
    attend(query[:tokens], key.to(query.dtype), value.to(query.dtype), attended, plan)


def portable(query: Tensor, key: Tensor, value: Tensor, out: Tensor, plan: SpanPlan) -> None:
    """Causal attention of each span over its own keys, span by span; on any device, in any dtype.

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
        mask = None
        if new < seen:  # the last query sees all keys: SDPA's own causal mask would start at the first
            mask = torch.ones(new, seen, dtype=torch.bool, device=query.device).tril(seen - new)
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
    out.copy_(varlen_kernel()(query, key, value, plan.cu_seqlens_q, plan.cu_seqlens_k, *plan.longest))


def fits_varlen(query: Tensor) -> bool:
    """Whether the varlen kernel takes such queries: half precision, heads of 8 to 256, on a GPU from Ampere on."""
    head_dim = query.shape[-1]
    if not query.is_cuda or query.dtype not in HALF or head_dim % 8 or head_dim > 256:
        return False
    return _is_ampere(query.get_device())


@functools.cache
def _is_ampere(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 0)


def varlen_options(parameters: Collection[str]) -> dict[str, Any]:
    """Arguments that ask ``varlen_attn`` for causal attention with grouped heads, aligned to the last key.

    Its signature has changed between versions. Where it has no ``enable_gqa``, it takes grouped heads as they are.

    Args:
        parameters: names that the installed function takes.
    """
    causal: dict[str, Any] = {"is_causal": True} if "is_causal" in parameters else {"window_size": (-1, 0)}
    return causal | ({"enable_gqa": True} if "enable_gqa" in parameters else {})


@functools.cache
def varlen_kernel() -> Callable[..., Any]:
    """The installed ``varlen_attn``, set to causal attention with grouped heads."""
    from torch.nn.attention.varlen import varlen_attn  # it loads the compiler, so only where it is used

    return functools.partial(varlen_attn, **varlen_options(inspect.signature(varlen_attn).parameters))
