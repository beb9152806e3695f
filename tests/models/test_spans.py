"""Attention over spans: two forms of one function, and what a step derives once for all layers."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cglab.errors import InputError
from cglab.models import spans as module
from cglab.models.kv import PagedKV
from cglab.models.request_axis import RequestAxisAttention
from cglab.models.spans import LiveSpans, PrefillAttention, Span, SpanPlan, packed_slots, varlen_options

ROWS, PAGE, CONTEXT = 5, 4, 24
SETS = {
    "fresh": [(1, 0, 7), (2, 0, 3)],
    "cached": [(1, 9, 4), (3, 20, 3)],
    "mixed": [(2, 0, 6), (1, 23, 1), (4, 5, 9), (3, 0, 1)],
    "single": [(2, 11, 13)],
    "ones": [(1, 4, 1), (2, 0, 1), (3, 15, 1)],
}
HEADS = {"ungrouped": (4, 4), "grouped": (6, 2), "one key head": (4, 1)}

sets = pytest.mark.parametrize("spans", SETS.values(), ids=SETS)
groups = pytest.mark.parametrize(("heads", "kv_heads"), HEADS.values(), ids=HEADS)


class Step:
    """Random queries, keys and values of a prefill step over a cache whose rows own scattered pages."""

    def __init__(
        self, config, spans, heads, kv_heads, *, device="cpu", dtype=torch.float32, kv_dtype=None, padding=0
    ):
        self.spans = [Span(*span) for span in spans]
        self.kv = PagedKV(config, pages=1 + ROWS * CONTEXT // PAGE, page_size=PAGE, rows=ROWS + 1, max_context=CONTEXT,
                          device=device, dtype=kv_dtype or dtype)  # fmt: skip
        pages = 1 + torch.randperm(ROWS * CONTEXT // PAGE).view(ROWS, -1)
        self.kv.page_table[1:] = pages.to(device)
        for cache in (self.kv.keys, self.kv.values):
            cache.copy_(torch.randn(cache.shape))
        slots = [self.slots(s)[s.start :] for s in self.spans]
        self.out_slots = torch.cat([*slots, torch.zeros(padding, dtype=torch.int64, device=device)])
        tokens = len(self.out_slots)
        self.query, self.key, self.value = (
            torch.randn(tokens, n, config.head_dim).to(device=device, dtype=dtype)
            for n in (heads, kv_heads, kv_heads)
        )

    def slots(self, span):
        position = torch.arange(span.end, device=self.kv.page_table.device)
        return self.kv.page_table[span.row][position // PAGE] * PAGE + position % PAGE

    def by_spans(self):
        attend = PrefillAttention(self.kv, out_slots=self.out_slots, live=LiveSpans(self.spans))
        return attend(1, self.query, self.key, self.value)

    def by_axis(self, places=8, room=64):
        """The same step over a fixed request axis."""
        plan = SpanPlan.of(self.spans, self.kv)
        absent = places - len(self.spans)
        device = self.kv.page_table.device
        ends = [
            torch.cat((ends, ends[-1:].expand(absent))) for ends in (plan.cu_seqlens_q, plan.cu_seqlens_k)
        ]
        rows = torch.tensor([s.row for s in self.spans] + [0] * absent, dtype=torch.int32, device=device)
        attend = RequestAxisAttention(self.kv, out_slots=self.out_slots, request_rows=rows, cu_seqlens_q=ends[0],
                                      cu_seqlens_k=ends[1], keys=len(self.out_slots) + room)  # fmt: skip
        return attend(1, self.query, self.key, self.value)

    def reference(self):
        """Softmax spelt out in double precision, a request at a time, over what the cache holds after the step."""
        out, first = [], 0
        for span in self.spans:
            query = self.query[first : first + span.length].double()
            first += span.length
            group = query.shape[1] // self.key.shape[1]
            key, value = (
                cache[1][self.slots(span)].double().repeat_interleave(group, dim=1)
                for cache in (self.kv.keys, self.kv.values)
            )
            scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[2] ** 0.5
            places = torch.arange(span.end, device=query.device)
            hidden = places > places[span.start :].unsqueeze(1)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, value).flatten(1))
        return torch.cat(out)


@pytest.fixture
def step(tiny):
    """Makes a step over a cache of tiny's shape with other numbers of heads."""

    def make(spans, heads=6, kv_heads=2, **options):
        return Step(tiny(num_heads=heads, num_kv_heads=kv_heads).config, spans, heads, kv_heads, **options)

    return make


@sets
@groups
def test_both_portable_forms_equal_attention_spelt_out(step, spans, heads, kv_heads):
    one = step(spans, heads, kv_heads)
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
def test_p55_what_is_returned_has_the_querys_dtype_and_reads_what_the_cache_holds(step, spans):
    """A bfloat16 cache under float32 heads: cached and fresh tokens are both seen as they were rounded."""
    one = step(spans, kv_dtype=torch.bfloat16)
    got, fixed = one.by_spans(), one.by_axis()
    assert got.dtype == fixed.dtype == torch.float32 and one.kv.keys.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), one.reference(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fixed, got, rtol=1e-5, atol=1e-6)


def test_what_layers_share_is_derived_once_a_step_and_dropped_with_its_spans(step, tiny, monkeypatch):
    one, made = step(SETS["mixed"]), []
    derive = SpanPlan.of
    monkeypatch.setattr(SpanPlan, "of", lambda *args: made.append(args) or derive(*args))
    live = LiveSpans(one.spans)
    attend = PrefillAttention(one.kv, out_slots=one.out_slots, live=live)
    for layer in (0, 1):
        attend(layer, one.query, one.key, one.value)
    assert len(made) == 1
    live.spans = one.spans  # equal ones: the page table may have changed
    attend(0, one.query, one.key, one.value)
    assert len(made) == 2
    other = PagedKV(
        tiny().config, pages=31, page_size=PAGE, rows=6, max_context=CONTEXT, device="cpu", dtype=torch.half
    )
    live.plan(other)
    assert len(made) == 3 and made[-1][1] is other


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6), room=st.integers(0, 9))
def test_packed_slots_are_every_requests_own_in_order_and_then_the_last_one(lengths, room):
    """Requests without keys take no place, wherever they stand."""
    if not sum(lengths):
        return
    table = torch.randperm(60).view(6, 10)
    kv = PagedKV.__new__(PagedKV)
    kv.page_size, kv.page_table = 4, table
    rows = torch.arange(len(lengths), dtype=torch.int32)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    wanted = [
        int(table[row, i // 4]) * 4 + i % 4 for row, length in enumerate(lengths) for i in range(length)
    ]
    got = packed_slots(kv, rows, ends, len(wanted) + room).tolist()
    assert got == wanted + wanted[-1:] * room


@pytest.mark.parametrize("bad", [(-1, 0, 1), (0, -1, 1), (0, 0, 0)])
def test_a_span_that_is_none_is_refused(bad):
    with pytest.raises(InputError, match="at least 1 token"):
        Span(*bad)


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        (["query", "max_k", "is_causal", "return_aux"], {"is_causal": True}),
        (["query", "max_k", "scale", "window_size"], {"window_size": (-1, 0)}),
        (["query", "max_k", "window_size", "enable_gqa"], {"window_size": (-1, 0), "enable_gqa": True}),
    ],
    ids=["first", "windows", "groups"],
)
def test_the_kernel_is_asked_for_causal_grouped_attention_by_its_signature(parameters, wanted):
    assert varlen_options(parameters) == wanted


def test_the_installed_kernel_takes_what_it_is_given():
    signature = inspect.signature(module.varlen_kernel().func)
    signature.bind(*"qkv", "cu_q", "cu_k", 1, 1, **module.varlen_kernel().keywords)


@sets
@groups
def test_the_varlen_form_packs_as_its_kernel_expects(step, monkeypatch, spans, heads, kv_heads):
    """On a CPU a stand-in with the kernel's contract: packed sequences, causal to the last key, grouped heads."""
    calls = []

    def stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k):
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q.is_contiguous()
        assert (cu_seq_q.diff().max(), cu_seq_k.diff().max()) <= (max_q, max_k) and key.shape[1] == kv_heads
        calls.append((max_q, max_k))
        out = torch.full(query.shape, float("nan"))  # rows beyond the last sequence are not written
        for (q0, q1), (k0, k1) in zip(
            cu_seq_q.unfold(0, 2, 1).tolist(), cu_seq_k.unfold(0, 2, 1).tolist(), strict=True
        ):
            if q1 > q0:
                hidden = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).triu(k1 - k0 - (q1 - q0) + 1)
                part = [x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1])]
                out[q0:q1] = torch.nn.functional.scaled_dot_product_attention(
                    *part, attn_mask=~hidden, enable_gqa=True
                ).transpose(0, 1)
        return out

    one = step(spans, heads, kv_heads, padding=2)
    wanted = one.by_spans(), one.by_axis()
    monkeypatch.setattr(module, "fits_varlen", lambda query: True)
    monkeypatch.setattr("cglab.models.request_axis.fits_varlen", lambda query: True)
    monkeypatch.setattr(module, "varlen_kernel", lambda: stand_in)
    monkeypatch.setattr("cglab.models.request_axis.varlen_kernel", lambda: stand_in)
    for got, plain in zip((one.by_spans(), one.by_axis()), wanted, strict=True):
        torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-6)
    longest = max(s.length for s in one.spans), max(s.end for s in one.spans)
    assert calls == [longest, (len(one.query), len(one.query) + 64)]


def test_what_fits_the_kernel_is_half_precision_on_a_gpu(step):
    for dtype in (torch.float32, torch.bfloat16):
        assert not module.fits_varlen(torch.zeros(1, 1, 16, dtype=dtype)), "not on a CPU"


@pytest.mark.gpu
@sets
@groups
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_varlen_equals_portable_within_rounding(step, monkeypatch, spans, heads, kv_heads, dtype):
    one = step(spans, heads, kv_heads, device="cuda", dtype=dtype, padding=2)
    assert module.fits_varlen(one.query) and not module.fits_varlen(one.query.float())
    fast = one.by_spans(), one.by_axis()
    monkeypatch.setattr(module, "fits_varlen", lambda query: False)
    monkeypatch.setattr("cglab.models.request_axis.fits_varlen", lambda query: False)
    slow = one.by_spans(), one.by_axis()
    live = sum(span.length for span in one.spans)
    wanted, rounding = (
        one.reference(),
        {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 3e-3, "atol": 3e-3},
    )
    for got in (*fast, *slow):
        torch.testing.assert_close(got[:live].double(), wanted, **rounding)
        assert not got[live:].any()
