"""Attention over spans: two forms of one function, and what a step derives once for all layers."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cglab.errors import InputError
from cglab.models import packed, request_axis
from cglab.models import spans as module
from cglab.models.kv import LayerPool, PagedKV
from cglab.models.packed import packed_slots, varlen_options
from cglab.models.request_axis import RequestAxisAttention
from cglab.models.spans import LiveSpans, PrefillAttention, Span, SpanPlan

ROWS, PAGE, CONTEXT, LAYER = 5, 4, 24, 1
SETS = {
    "fresh": [(1, 0, 7), (2, 0, 3)],
    "cached": [(1, 9, 4), (3, 20, 3)],
    "mixed": [(2, 0, 6), (1, 23, 1), (4, 5, 9), (3, 0, 1)],
    "single": [(2, 11, 13)],
    "ones": [(1, 4, 1), (2, 0, 1), (3, 15, 1)],
}
HEADS = {"ungrouped": (4, 4), "grouped": (6, 2), "one key head": (4, 1)}

sets = pytest.mark.parametrize("spans", SETS.values(), ids=SETS)
windows = pytest.mark.parametrize("window", [None, 1, 5, 64], ids=lambda window: f"window {window}")
groups = pytest.mark.parametrize(("heads", "kv_heads"), HEADS.values(), ids=HEADS)


class Step:
    """Random queries, keys and values of a prefill step over a cache whose rows own scattered pages."""

    def __init__(
        self, config, spans, heads, kv_heads, *, device="cpu", dtype=torch.float32, kv_dtype=None, padding=0
    ):
        self.spans = [Span(*span) for span in spans]
        pages = 1 + ROWS * CONTEXT // PAGE
        self.kv = PagedKV(config, pages=pages, page_size=PAGE, rows=ROWS + 1, max_context=CONTEXT, device=device,
                          dtype=kv_dtype or dtype, window_pages=pages if config.sliding_window else None)  # fmt: skip
        self.pool = self.kv.pool(LAYER)
        for pool in self.kv.pools:
            pool.page_table[1:] = 1 + torch.randperm(pages - 1).view(ROWS, -1).to(device)
            for cache in (pool.keys, pool.values):
                cache.copy_(torch.randn(cache.shape))
        idle = torch.zeros(padding, dtype=torch.int64, device=device)
        slots = [
            torch.cat([*(self.slots(s, pool)[s.start :] for s in self.spans), idle]) for pool in self.kv.pools
        ]
        self.out_slots = dict(zip(("out_slots", "window_out_slots"), slots, strict=False))
        tokens = len(slots[0])
        self.query, self.key, self.value = (
            torch.randn(tokens, n, config.head_dim).to(device=device, dtype=dtype)
            for n in (heads, kv_heads, kv_heads)
        )

    def slots(self, span, pool):
        position = torch.arange(span.end, device=pool.page_table.device)
        return pool.page_table[span.row][position // PAGE] * PAGE + position % PAGE

    def by_spans(self):
        attend = PrefillAttention(self.kv, live=LiveSpans(self.spans), **self.out_slots)
        return attend(LAYER, self.query, self.key, self.value)

    def by_axis(self, places=8, room=64):
        """The same step over a fixed request axis."""
        plan = SpanPlan.of(self.spans, self.kv.full)
        absent, device = places - len(self.spans), self.kv.full.page_table.device
        ends = [
            torch.cat((ends, ends[-1:].expand(absent))) for ends in (plan.cu_seqlens_q, plan.cu_seqlens_k)
        ]
        rows = torch.tensor([s.row for s in self.spans] + [0] * absent, dtype=torch.int32, device=device)
        attend = RequestAxisAttention(
            self.kv, request_rows=rows, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], keys=len(self.query) + room,
            **self.out_slots,
        )  # fmt: skip
        return attend(LAYER, self.query, self.key, self.value)

    def reference(self):
        """Softmax spelt out in double precision, a request at a time, over what the cache holds after the step."""
        out, first = [], 0
        for span in self.spans:
            query = self.query[first : first + span.length].double()
            first += span.length
            group = query.shape[1] // self.key.shape[1]
            key, value = (
                cached.double().repeat_interleave(group, dim=1)
                for cached in self.pool.gather(LAYER, self.slots(span, self.pool))
            )
            scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[2] ** 0.5
            places = torch.arange(span.end, device=query.device)
            seen_last = places[span.start :].unsqueeze(1)
            hidden = (places > seen_last) | (places <= seen_last - (self.pool.window or CONTEXT))
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, value).flatten(1))
        return torch.cat(out)


@pytest.fixture
def step(tiny):
    """Makes a step over a cache of tiny's shape with other numbers of heads."""

    def make(spans, heads=6, kv_heads=2, window=None, **options):
        sliding = {"sliding_window": window, "window_layers": (LAYER,)} if window else {}
        config = tiny(num_heads=heads, num_kv_heads=kv_heads, **sliding).config
        return Step(config, spans, heads, kv_heads, **options)

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
def test_p53_padded_rows_are_zero_and_live_rows_as_without_padding(step, spans):
    torch.manual_seed(3)
    exact = step(spans)
    torch.manual_seed(3)
    padded = step(spans, padding=3)
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
def test_b25_nothing_but_what_a_token_sees_is_read(step, spans, window):
    """NaN in every slot of the cache that no live token may see, and pages that a window dropped point nowhere."""
    one = step(spans, window=window)
    clean = one.by_spans(), one.by_axis()
    seen = set()
    for span in one.spans:
        first = max(span.start - window + 1, 0) if window else 0
        seen |= set(one.slots(span, one.pool)[first:].tolist())
        one.pool.page_table[span.row, : first // PAGE] = 0
    unseen = [slot for slot in range(one.pool.keys.shape[1]) if slot not in seen]
    for cache in (one.pool.keys, one.pool.values):
        cache[:, unseen] = float("nan")
    assert torch.equal(one.by_spans(), clean[0]) and torch.equal(one.by_axis(), clean[1])


@sets
def test_p55_what_is_returned_has_the_querys_dtype_and_reads_what_the_cache_holds(step, spans):
    """A bfloat16 cache under float32 heads: cached and fresh tokens are both seen as they were rounded."""
    one = step(spans, kv_dtype=torch.bfloat16)
    got, fixed = one.by_spans(), one.by_axis()
    assert got.dtype == fixed.dtype == torch.float32 and one.kv.full.keys.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), one.reference(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fixed, got, rtol=1e-5, atol=1e-6)


def test_what_layers_share_is_derived_once_a_step_and_dropped_with_its_spans(step, tiny, monkeypatch):
    one, made = step(SETS["mixed"]), []
    derive = SpanPlan.of
    monkeypatch.setattr(SpanPlan, "of", lambda *args: made.append(args) or derive(*args))
    live = LiveSpans(one.spans)
    attend = PrefillAttention(one.kv, live=live, **one.out_slots)
    for layer in (0, 1):
        attend(layer, one.query, one.key, one.value)
    assert len(made) == 1
    live.spans = one.spans  # equal ones: the page table may have changed
    attend(0, one.query, one.key, one.value)
    assert len(made) == 2
    windowed = PagedKV(tiny(sliding_window=3, window_layers=(1,)).config, pages=31, page_size=PAGE, rows=6,
                       max_context=CONTEXT, device="cpu", dtype=torch.half, window_pages=31)  # fmt: skip
    plans = [live.plan(pool) for pool in windowed.pools for _ in range(2)]
    assert len(made) == 4 and plans[0] is plans[1] and plans[2] is plans[3], "one for each pool"
    assert plans[0].longest == (9, 24) and plans[2].longest == (9, 11), "a window reads no more than it sees"


def test_a_step_needs_slots_for_every_pool_and_for_no_other(step):
    plain, windowed = step(SETS["single"]), step(SETS["single"], window=5)
    for one, slots in ((plain, windowed.out_slots), (windowed, plain.out_slots)):
        with pytest.raises(InputError, match="give window_out_slots where the model has window layers"):
            PrefillAttention(one.kv, live=LiveSpans(one.spans), **slots)


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    first=st.integers(0, 9),
    room=st.integers(0, 9),
)
def test_packed_slots_are_every_requests_own_in_order_and_then_the_last_one(lengths, first, room):
    """Requests without keys take no place, wherever they stand."""
    if not sum(lengths):
        return
    table = torch.randperm(60).view(6, 10)
    pool = LayerPool.__new__(LayerPool)
    pool.page_size, pool.page_table = 4, table
    rows = torch.arange(len(lengths), dtype=torch.int32)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    places = [(row, first + i) for row, length in enumerate(lengths) for i in range(length)]
    wanted = [int(table[row, position // 4]) * 4 + position % 4 for row, position in places]
    got = packed_slots(pool, rows, ends, len(wanted) + room, torch.full_like(rows, first)).tolist()
    assert got == wanted + wanted[-1:] * room


@pytest.mark.parametrize("bad", [(-1, 0, 1), (0, -1, 1), (0, 0, 0)])
def test_a_span_that_is_none_is_refused(bad):
    with pytest.raises(InputError, match="at least 1 token"):
        Span(*bad)


@pytest.mark.parametrize(
    ("parameters", "window", "wanted"),
    [
        (["query", "max_k", "is_causal", "return_aux"], None, {"is_causal": True}),
        (["query", "max_k", "scale", "window_size"], None, {"window_size": (-1, 0)}),
        (["query", "max_k", "scale", "window_size"], 5, {"window_size": (4, 0)}),
        (["query", "max_k", "window_size", "enable_gqa"], None, {"window_size": (-1, 0), "enable_gqa": True}),
        (["query", "max_k", "window_size", "enable_gqa"], 1, {"window_size": (0, 0), "enable_gqa": True}),
    ],
)
def test_the_kernel_is_asked_for_causal_grouped_attention_by_its_signature(parameters, window, wanted):
    assert varlen_options(parameters, window) == wanted


def test_the_installed_operator_takes_what_it_is_given():
    """By its schema: on a device without the kernel the call itself is refused, but only once the arguments fit."""
    operator = packed.flash_operator()
    assert operator is not None
    some, ends = torch.zeros(1, 1, 8, dtype=torch.bfloat16), torch.tensor([0, 1], dtype=torch.int32)
    for window in (None, 7):
        with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
            packed.varlen_kernel(window)(some, some, some, ends, ends, 1, 1)


def test_without_the_operator_as_it_is_known_the_public_function_is_taken(monkeypatch):
    monkeypatch.setattr(packed, "flash_operator", lambda: None)
    kernel = packed.varlen_kernel.__wrapped__(7)
    inspect.signature(kernel.func).bind(*"qkv", "cu_q", "cu_k", 1, 1, **kernel.keywords)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3])
def test_the_operator_gives_what_the_public_function_gives(monkeypatch, window):
    heads = [torch.randn(9, n, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2)]
    ends = torch.tensor([0, 4, 9], dtype=torch.int32, device="cuda")
    direct = packed.varlen_kernel.__wrapped__(window)(*heads, ends, ends, 5, 5)
    monkeypatch.setattr(packed, "flash_operator", lambda: None)
    assert torch.equal(direct, packed.varlen_kernel.__wrapped__(window)(*heads, ends, ends, 5, 5))


def stand_in(window, calls):
    """A function with the kernel's contract: packed sequences, causal to the last key, grouped heads, a window."""

    def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k):
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q.is_contiguous()
        assert cu_seq_q.diff().max() <= max_q and cu_seq_k.diff().max() <= max_k
        calls.append((key.shape[1], max_q, max_k))
        out = torch.full(query.shape, float("nan"))  # rows beyond the last sequence are not written
        ends = (cu_seq.unfold(0, 2, 1).tolist() for cu_seq in (cu_seq_q, cu_seq_k))
        for (q0, q1), (k0, k1) in zip(*ends, strict=True):
            if q1 > q0:
                places, last = torch.arange(k1 - k0), torch.arange(k1 - k0)[q0 - q1 :].unsqueeze(1)
                seen = (places <= last) & (places > last - (window or CONTEXT))
                part = [heads.transpose(0, 1) for heads in (query[q0:q1], key[k0:k1], value[k0:k1])]
                attended = torch.nn.functional.scaled_dot_product_attention(
                    *part, attn_mask=seen, enable_gqa=True
                )
                out[q0:q1] = attended.transpose(0, 1)
        return out

    return kernel


def forced(patch, *, fits):
    """Both attentions take, or do not take, the varlen form."""
    for where in (module, request_axis):
        patch.setattr(where, "fits_varlen", lambda query: fits)


@sets
@groups
@windows
def test_the_varlen_form_packs_as_its_kernel_expects(step, monkeypatch, spans, heads, kv_heads, window):
    one, calls = step(spans, heads, kv_heads, window, padding=2), []
    wanted = one.by_spans(), one.by_axis()
    forced(monkeypatch, fits=True)
    for where in (module, request_axis):
        monkeypatch.setattr(where, "varlen_kernel", lambda window: stand_in(window, calls))
    for got, plain in zip((one.by_spans(), one.by_axis()), wanted, strict=True):
        torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-6)
    tokens, reach = len(one.query), (window or CONTEXT + 1) - 1
    longest = max(s.length for s in one.spans), max(s.length + min(s.start, reach) for s in one.spans)
    room = tokens + (64 if window is None else min(64, 8 * (window - 1)))
    assert calls == [(kv_heads, *longest), (kv_heads, tokens, room)]


def test_what_fits_the_kernel_is_half_precision_on_a_gpu(step):
    for dtype in (torch.float32, torch.bfloat16):
        assert not packed.fits_varlen(torch.zeros(1, 1, 16, dtype=dtype)), "not on a CPU"


@pytest.mark.gpu
@sets
@groups
@windows
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_varlen_equals_portable_within_rounding(step, monkeypatch, spans, heads, kv_heads, window, dtype):
    one = step(spans, heads, kv_heads, window, device="cuda", dtype=dtype, padding=2)
    assert packed.fits_varlen(one.query) and not packed.fits_varlen(one.query.float())
    fast = one.by_spans(), one.by_axis()
    forced(monkeypatch, fits=False)
    slow = one.by_spans(), one.by_axis()
    live, tolerance = sum(span.length for span in one.spans), 2e-2 if dtype == torch.bfloat16 else 3e-3
    wanted = one.reference()
    for got in (*fast, *slow):
        torch.testing.assert_close(got[:live].double(), wanted, rtol=tolerance, atol=tolerance)
        assert not got[live:].any()
