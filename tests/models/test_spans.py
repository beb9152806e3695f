"""Attention over spans: two forms of one function, and what a step derives once for all layers."""

import inspect
from functools import partial
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cglab.errors import InputError
from cglab.models import request_axis, varlen
from cglab.models import spans as module
from cglab.models.kv import LayerPool, PagedKV
from cglab.models.request_axis import RequestAxisAttention
from cglab.models.spans import LiveSpans, PrefillAttention, Span, SpanPlan, packed_slots

ROWS, PAGE, CONTEXT = 5, 4, 24
SETS = {
    "fresh": [(1, 0, 7), (2, 0, 3)],
    "cached": [(1, 9, 4), (3, 20, 3)],
    "mixed": [(2, 0, 6), (1, 23, 1), (4, 5, 9), (3, 0, 1)],
    "single": [(2, 11, 13)],
    "ones": [(1, 4, 1), (2, 0, 1), (3, 15, 1)],
}
HEADS = {"ungrouped": (4, 4), "grouped": (6, 2), "one key head": (4, 1)}

WINDOWS = {"full": None, "one token": 1, "three": 3, "across pages": 6, "wide": 64}

sets = pytest.mark.parametrize("spans", SETS.values(), ids=SETS)
groups = pytest.mark.parametrize(("heads", "kv_heads"), HEADS.values(), ids=HEADS)
windows = pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)


class Step:
    """Random queries, keys and values of a prefill step over a cache whose rows own scattered pages.

    With a window layer 1 has it; pages before the first position that is seen are given back. Whatever a span neither
    sees nor writes is NaN.
    """

    def __init__(self, config, spans, *, device="cpu", dtype=torch.float32, kv_dtype=None, padding=0):
        self.spans, self.device = [Span(*span) for span in spans], torch.device(device)
        pages = ROWS * CONTEXT // PAGE
        self.kv = PagedKV(config, pages=1 + pages, page_size=PAGE, rows=ROWS + 1, max_context=CONTEXT, device=device,
                          dtype=kv_dtype or dtype, window_pages=1 + pages if config.window_layers else None)  # fmt: skip
        self.pool = self.kv.pool(1)
        for pool in self.kv.pools:
            pool.page_table[1:] = 1 + torch.randperm(pages).view(ROWS, -1).to(device)
        for cache in self.kv.caches().values():
            cache.copy_(torch.randn(cache.shape))
        seen = torch.cat([self.slots(span, self.pool)[self.first(span) :] for span in self.spans])
        hidden = torch.ones(self.pool.keys.shape[1], dtype=torch.bool, device=device).index_fill_(0, seen, 0)
        self.pool.keys[:, hidden] = self.pool.values[:, hidden] = float("nan")
        for span in self.spans:
            self.pool.page_table[span.row, : self.first(span) // PAGE] = 0
        idle = torch.zeros(padding, dtype=torch.int64, device=device)
        self.out_slots = {
            name: torch.cat([*(self.slots(span, pool)[span.start :] for span in self.spans), idle])
            for name, pool in zip(("out_slots", "window_out_slots"), self.kv.pools, strict=False)
        }
        self.query, self.key, self.value = (
            torch.randn(len(self.out_slots["out_slots"]), n, config.head_dim).to(device=device, dtype=dtype)
            for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        )

    def first(self, span):
        """The first position that the span sees."""
        return max(span.start - self.pool.window + 1, 0) if self.pool.window else 0

    def slots(self, span, pool):
        position = torch.arange(span.end, device=self.device)
        return pool.page_table[span.row][position // PAGE] * PAGE + position % PAGE

    def by_spans(self):
        attend = PrefillAttention(self.kv, **self.out_slots, live=LiveSpans(self.spans))
        return attend(1, self.query, self.key, self.value)

    def by_axis(self, places=8, room=64):
        """The same step over a fixed request axis."""
        plan = SpanPlan.of(self.spans, self.kv.full)
        absent = places - len(self.spans)
        ends = [
            torch.cat((ends, ends[-1:].expand(absent))) for ends in (plan.cu_seqlens_q, plan.cu_seqlens_k)
        ]
        rows = torch.tensor([s.row for s in self.spans] + [0] * absent, dtype=torch.int32, device=self.device)
        attend = RequestAxisAttention(self.kv, **self.out_slots, request_rows=rows, cu_seqlens_q=ends[0],
                                      cu_seqlens_k=ends[1], keys=len(self.query) + room)  # fmt: skip
        return attend(1, self.query, self.key, self.value)

    def reference(self):
        """Softmax spelt out in double precision, a request at a time, over what the cache holds after the step."""
        out, begin = [], 0
        for span in self.spans:
            query = self.query[begin : begin + span.length].double()
            begin += span.length
            group, first = query.shape[1] // self.key.shape[1], self.first(span)
            key, value = (
                cache[1 if self.pool.window is None else 0][self.slots(span, self.pool)[first:]]
                .double()
                .repeat_interleave(group, dim=1)
                for cache in (self.pool.keys, self.pool.values)
            )
            scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[2] ** 0.5
            places = torch.arange(first, span.end, device=query.device)
            own = torch.arange(span.start, span.end, device=query.device).unsqueeze(1)
            hidden = (places > own) | (places <= own - (self.pool.window or CONTEXT))
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, value).flatten(1))
        return torch.cat(out)


@pytest.fixture
def step(tiny):
    """Makes a step over a cache of tiny's shape with other numbers of heads, and a window in layer 1."""

    def make(spans, heads=6, kv_heads=2, window=None, **options):
        layers = (1,) if window else ()
        shape = tiny(num_heads=heads, num_kv_heads=kv_heads, sliding_window=window, window_layers=layers)
        return Step(shape.config, spans, **options)

    return make


@sets
@groups
@windows
def test_both_portable_forms_equal_attention_spelt_out(step, spans, heads, kv_heads, window):
    one = step(spans, heads, kv_heads, window)
    got, fixed = one.by_spans(), one.by_axis()
    torch.testing.assert_close(got.double(), one.reference(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fixed, got, rtol=1e-5, atol=1e-6)


@sets
@windows
def test_p53_padded_rows_are_zero_and_live_rows_as_without_padding(step, spans, window):
    torch.manual_seed(3)
    exact = step(spans, window=window)
    torch.manual_seed(3)
    padded = step(spans, window=window, padding=3)
    live = len(exact.query)
    for name in ("query", "key", "value"):
        getattr(padded, name)[:live] = getattr(exact, name)
        getattr(padded, name)[live:] = float("nan")
    for form in ("by_spans", "by_axis"):
        wanted, got = getattr(exact, form)(), getattr(padded, form)()
        assert not got[live:].any() and not got.isnan().any()
        torch.testing.assert_close(got[:live], wanted, rtol=1e-5, atol=1e-6)


@sets
@windows
def test_p55_what_is_returned_has_the_querys_dtype_and_reads_what_the_cache_holds(step, spans, window):
    """A bfloat16 cache under float32 heads: cached and fresh tokens are both seen as they were rounded."""
    one = step(spans, window=window, kv_dtype=torch.bfloat16)
    got, fixed = one.by_spans(), one.by_axis()
    assert got.dtype == fixed.dtype == torch.float32 and one.pool.keys.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), one.reference(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fixed, got, rtol=1e-5, atol=1e-6)


def test_what_layers_of_a_pool_share_is_derived_once_a_step_and_dropped_with_its_spans(step, monkeypatch):
    one, made = step(SETS["mixed"], window=6), []
    derive = SpanPlan.of
    monkeypatch.setattr(SpanPlan, "of", lambda spans, pool: made.append(pool) or derive(spans, pool))
    live = LiveSpans(one.spans)
    attend = PrefillAttention(one.kv, **one.out_slots, live=live)
    for layer in (0, 1, 0, 1):
        attend(layer, one.query, one.key, one.value)
    assert made == [one.kv.full, one.kv.sliding]
    live.spans = one.spans  # equal ones: the page table may have changed
    attend(1, one.query, one.key, one.value)
    assert made[2:] == [one.kv.sliding]


@windows
def test_only_positions_that_some_query_of_a_span_sees_are_gathered(step, window):
    """After 23 cached tokens a window of 6 gathers 5 of them: what a window saves, and all that need be there."""
    one = step(SETS["mixed"], window=window)
    plan = SpanPlan.of(one.spans, one.pool)
    seen = [min(span.start, (window or CONTEXT) - 1) + span.length for span in one.spans]
    assert plan.key_ends == [0, *accumulate(seen)] and plan.longest == (9, max(seen))
    if window == 1:
        assert plan.key_slots is None, "the step's own keys are all there is"
        return
    wanted = [one.slots(span, one.pool)[-keys:] for span, keys in zip(one.spans, seen, strict=True)]
    assert torch.equal(plan.key_slots, torch.cat(wanted))


def test_slots_are_needed_for_each_pool(step):
    one, plain = step(SETS["fresh"], window=6), step(SETS["fresh"])
    with pytest.raises(InputError, match="has 2 pools and slots are given for 1: give window_out_slots"):
        PrefillAttention(one.kv, out_slots=one.out_slots["out_slots"], live=LiveSpans())
    with pytest.raises(InputError, match="has 1 pools and slots are given for 2"):
        PrefillAttention(plain.kv, **one.out_slots, live=LiveSpans())


@given(
    requests=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 25)), min_size=1, max_size=6),
    room=st.integers(0, 9),
)
def test_packed_slots_are_every_requests_own_in_order_and_then_the_last_one(requests, room):
    """Requests without keys take no place, wherever they stand; the first key may be at any position."""
    lengths, firsts = zip(*requests, strict=True)
    if not sum(lengths):
        return
    pool = LayerPool.__new__(LayerPool)
    pool.page_size, pool.page_table = 4, torch.randperm(60).view(6, 10)
    rows, first = (torch.tensor(column, dtype=torch.int32) for column in (range(len(lengths)), firsts))
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def wanted(firsts):
        places = [(row, i) for row, n in enumerate(lengths) for i in range(firsts[row], firsts[row] + n)]
        return [int(pool.page_table[row, i // 4]) * 4 + i % 4 for row, i in places]

    for given_first, slots in ((first, wanted(firsts)), (None, wanted([0] * len(lengths)))):
        got = packed_slots(pool, rows, ends, len(slots) + room, given_first).tolist()
        assert got == slots + slots[-1:] * room


@pytest.mark.parametrize("bad", [(-1, 0, 1), (0, -1, 1), (0, 0, 0)])
def test_a_span_that_is_none_is_refused(bad):
    with pytest.raises(InputError, match="at least 1 token"):
        Span(*bad)


@pytest.mark.parametrize(
    ("parameters", "window", "wanted"),
    [
        (["query", "max_k", "is_causal", "return_aux"], None, {"is_causal": True}),
        (["query", "max_k", "scale", "window_size"], None, {"window_size": (-1, 0)}),
        (["query", "max_k", "scale", "window_size"], 6, {"window_size": (5, 0)}),
        (["query", "is_causal", "window_size"], 1, {"window_size": (0, 0)}),
        (["query", "max_k", "window_size", "enable_gqa"], None, {"window_size": (-1, 0), "enable_gqa": True}),
    ],
    ids=["first", "windows", "window", "one token", "groups"],
)
def test_the_kernel_is_asked_for_causal_grouped_attention_by_its_signature(parameters, window, wanted):
    assert varlen.varlen_options(parameters, window) == wanted


@windows
def test_the_installed_kernel_takes_what_it_is_given(window):
    kernel = varlen.varlen_kernel(window)
    inspect.signature(kernel.func).bind(*"qkv", "cu_q", "cu_k", 1, 1, **kernel.keywords)


@pytest.mark.parametrize("head_dim", [16, 12, 264])
def test_a_kernel_without_windows_serves_full_layers_only(monkeypatch, head_dim):
    """Stands for a GPU: what is asked of the query, of the device, and of the installed function."""

    class Query:
        is_cuda, dtype, shape = True, torch.bfloat16, (1, 1, head_dim)
        get_device = staticmethod(lambda: 0)

    monkeypatch.setattr(varlen, "_is_ampere", lambda index: True)
    for parameters, windowed in (({"is_causal"}, False), ({"window_size"}, True)):
        monkeypatch.setattr(varlen, "_parameters", lambda parameters=parameters: parameters)
        assert varlen.fits_varlen(Query()) == (head_dim == 16)
        assert varlen.fits_varlen(Query(), 6) == (head_dim == 16 and windowed)


@sets
@groups
@windows
def test_the_varlen_form_packs_as_its_kernel_expects(step, monkeypatch, spans, heads, kv_heads, window):
    """On a CPU a stand-in with the kernel's contract: packed sequences, aligned to the last key, grouped heads."""
    calls = []

    def stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window):
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q.is_contiguous()
        assert (cu_seq_q.diff().max(), cu_seq_k.diff().max()) <= (max_q, max_k) and key.shape[1] == kv_heads
        calls.append((max_q, max_k))
        out = torch.full(query.shape, float("nan"))  # rows beyond the last sequence are not written
        for (q0, q1), (k0, k1) in zip(
            cu_seq_q.unfold(0, 2, 1).tolist(), cu_seq_k.unfold(0, 2, 1).tolist(), strict=True
        ):
            if q1 > q0:
                shift = k1 - k0 - (q1 - q0)
                seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(shift)
                seen = seen.triu(shift - window + 1) if window else seen
                part = [x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1])]
                out[q0:q1] = torch.nn.functional.scaled_dot_product_attention(
                    *part, attn_mask=seen, enable_gqa=True
                ).transpose(0, 1)
        return out

    one = step(spans, heads, kv_heads, window, padding=2)
    wanted = one.by_spans(), one.by_axis()
    for form in (module, request_axis):
        monkeypatch.setattr(form, "fits_varlen", lambda query, window: True)
        monkeypatch.setattr(form, "varlen_kernel", lambda window: partial(stand_in, window=window))
    for got, plain in zip((one.by_spans(), one.by_axis()), wanted, strict=True):
        torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-6)
    seen = [min(span.start, (window or CONTEXT) - 1) + span.length for span in one.spans]
    room = min(64, 8 * (window - 1)) if window else 64
    longest = max(span.length for span in one.spans), max(seen)
    assert calls == [longest, (len(one.query), len(one.query) + room)]


def test_what_fits_the_kernel_is_half_precision_on_a_gpu(step):
    for dtype in (torch.float32, torch.bfloat16):
        assert not varlen.fits_varlen(torch.zeros(1, 1, 16, dtype=dtype)), "not on a CPU"


@pytest.mark.gpu
@sets
@groups
@windows
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_varlen_equals_portable_within_rounding(step, monkeypatch, spans, heads, kv_heads, window, dtype):
    one = step(spans, heads, kv_heads, window, device="cuda", dtype=dtype, padding=2)
    assert varlen.fits_varlen(one.query, window) and not varlen.fits_varlen(one.query.float(), window)
    fast = one.by_spans(), one.by_axis()
    for form in (module, request_axis):
        monkeypatch.setattr(form, "fits_varlen", lambda query, window: False)
    slow = one.by_spans(), one.by_axis()
    live = sum(span.length for span in one.spans)
    wanted, rounding = (
        one.reference(),
        {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 3e-3, "atol": 3e-3},
    )
    for got in (*fast, *slow):
        torch.testing.assert_close(got[:live].double(), wanted, **rounding)
        assert not got[live:].any()
