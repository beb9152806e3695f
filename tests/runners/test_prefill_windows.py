"""The prefill body of a model with sliding-window layers: captured against eager, over a pool that drops pages."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cglab.errors import AddressError, InputError
from cglab.graphs.coverage import Reason
from cglab.graphs.out_forms import same_bits
from cglab.models.spans import Span
from cglab.runners.prefill import INPUTS
from tests.runners.splits import BUCKETS, ROOM, SPLITS

# SPLITS are shorter and longer than the window of 6 of these models, and across it.
backends = pytest.mark.parametrize("backend", ["full", "breakable"])


def check(one, spans):
    """One captured step equals padded eager to the bit: hidden states, and both pools but for slot 0."""
    got, wanted, after, expected = one.both(spans)
    assert same_bits(got, wanted), spans
    for cache, other in zip(after, expected, strict=True):
        assert same_bits(cache[:, 1:], other[:, 1:]), f"cache after {spans}"
    return got


@st.composite
def splits(draw):
    """2 to 16 tokens of up to 8 requests, cached tokens before some of them."""
    spans, left = [], 16
    for row in range(1, 1 + draw(st.integers(1, 8))):
        if left > 1:
            length = draw(st.integers(1 + (row == 1), left))  # one token alone is below the waste ceiling
            spans.append((row, draw(st.integers(0, 16 - length)), length))
            left -= length
    return spans


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@settings(max_examples=20)
@given(steps=st.lists(splits(), min_size=1, max_size=5))
def test_p37_p38_one_recording_serves_every_split_within_and_beyond_the_window(
    window_prefills, backend, dtype, steps
):
    one = (
        window_prefills.made[0]
        if window_prefills.made
        else window_prefills(backend, BUCKETS, dtype=dtype, settings=ROOM)
    )
    one.runner.coverage().clear()
    for spans in steps:
        check(one, spans)
    assert one.runner.coverage().captured == len(steps) and one.runner.coverage().reasons == {}


@backends
def test_live_eager_agrees_within_drift_and_in_tokens(window_prefills, backend):
    one = window_prefills(backend, BUCKETS, settings=ROOM)
    for spans in SPLITS:
        before, live = one.cache(), [Span(*span) for span in spans]
        logits = one.runner.last_logits(one.step(spans), live)
        one.restore(before)
        free = one.runner.last_logits(one.step(spans, one.runner.run_live_eager), live)
        torch.testing.assert_close(logits, free, rtol=1e-3, atol=1e-4)
        gap = free.topk(2, -1).values.diff(dim=-1).abs().squeeze(-1)
        assert ((logits.argmax(-1) == free.argmax(-1)) | (gap < 1e-3)).all()


@backends
def test_a_prompt_in_chunks_equals_the_prompt_at_once(window_prefills, backend):
    """Chunks that end before, at and beyond the window; pages before it are dropped in between."""
    one = window_prefills(backend, BUCKETS, settings=ROOM)
    whole = one.step([(2, 0, 16)])
    chunks = [one.step([(2, 0, 5)]), one.step([(3, 0, 4), (2, 5, 7)])[4:], one.step([(2, 12, 4)])]
    torch.testing.assert_close(torch.cat(chunks), whole, rtol=1e-4, atol=1e-5)
    assert not one.kv.sliding.page_table[2, 0] and one.kv.sliding.page_table[2, 1]


@backends
def test_p27_b25_dropped_pages_and_all_else_outside_the_window_may_hold_nan(window_prefills, backend):
    one = window_prefills(backend, BUCKETS, settings=ROOM)
    spans = [(4, 11, 2), (2, 0, 1), (7, 3, 3)]
    before = one.cache()
    clean = one.step(spans)
    one.restore(before)
    seen = [slot for span in spans for slot in one.window_slots_of(*span)]
    hidden = torch.ones(one.kv.sliding.keys.shape[1], dtype=torch.bool)
    hidden[seen] = False
    for cache in (one.kv.sliding.keys, one.kv.sliding.values):
        cache[:, hidden.to(one.device)] = float("nan")
    assert not one.kv.sliding.page_table[4, 0], "the first page of the longest request was given back"
    assert same_bits(one.step(spans), clean) and not clean.isnan().any()
    for cache in (one.kv.sliding.keys, one.kv.sliding.values):
        cache[:, seen[0]] = float("nan")
    spoilt = one.step(spans)
    assert spoilt[0].isnan().all(), "the oldest position that a query sees is read"
    if backend == "breakable":  # packed keys of all requests are one matrix in the other form
        assert not spoilt[2:].isnan().any()


@backends
def test_p13_b26_a_padded_step_writes_its_own_slots_and_slot_zero_of_both_pools_only(
    window_prefills, backend
):
    one = window_prefills(backend, BUCKETS, settings=ROOM)
    one.step([(1, 0, 16)])
    before, spans = one.cache(), [(4, 11, 3), (2, 0, 2)]
    one.step(spans)
    values = one.inputs(spans)
    for i, (cache, saved) in enumerate(zip(one.cache(), before, strict=True)):
        changed = set((cache != saved).flatten(2).any(-1).any(0).nonzero().flatten().tolist())
        assert changed - {0} == set(values["out_slots" if i < 2 else "window_out_slots"].tolist())
    assert one.runner.captured.buffers.view(8)["window_out_slots"][5:].tolist() == [0] * 3


def test_only_a_model_with_windows_has_the_slot(prefills, window_prefills):
    assert prefills("breakable", BUCKETS).runner.inputs == INPUTS
    one = window_prefills("breakable", BUCKETS)
    assert one.runner.inputs == tuple(one.runner.slots()) == (*INPUTS, "window_out_slots")
    values = one.inputs([(1, 0, 4)])
    del values["window_out_slots"]
    with pytest.raises(InputError, match="window_out_slots"):
        one.runner.run([Span(1, 0, 4)], **values)


def test_an_axis_has_room_for_cached_tokens_that_some_layer_sees(window_prefills, monkeypatch):
    """With full layers every cached token counts; where all layers have a window of 6, at most 5 a request."""
    spans = [(1, 10, 2), (2, 11, 2)]
    mixed = window_prefills("full", BUCKETS, settings={"max_requests": 2, "max_cached": 20})
    mixed.step(spans)
    assert (
        mixed.runner.coverage().last_facts[Reason.MORE_KEYS.name] == "21 cached tokens, there is room for 20"
    )
    monkeypatch.setattr(type(mixed), "config", replace(mixed.config, window_layers=(0, 1, 2)))
    every = window_prefills("full", BUCKETS, settings={"max_requests": 2, "max_cached": 10})
    check(every, spans)
    assert every.runner.coverage().captured == 1 and every.kv.full.keys.numel() == 0


@backends
@pytest.mark.parametrize("name", ["keys", "values", "page_table"])
def test_b36_the_window_pool_is_under_the_address_contract(window_prefills, backend, name):
    one = window_prefills(backend, (8,), settings=ROOM)
    setattr(one.kv.sliding, name, getattr(one.kv.sliding, name).clone())
    with pytest.raises(AddressError, match=rf"moved: kv\.sliding\.{name}"):
        one.step([(1, 0, 8)])


@backends
@pytest.mark.parametrize("device", [torch.device("cpu")], ids=str)
def test_a_model_without_windows_records_nothing_of_them_and_one_with_them_little_more(
    prefills, window_prefills, monkeypatch, backend
):
    """Which keys a window holds is derived once for all its layers, and on the device only where it is recorded."""
    windows = Counter(window_prefills(backend, (8,)).runner.captured.inspect(8))
    world = type(prefills(backend, (8,)))
    monkeypatch.setattr(world, "config", replace(world.config, num_layers=3))
    plain = Counter(prefills(backend, (8,)).runner.captured.inspect(8))
    extra = windows - plain
    if backend == "breakable":
        assert windows == plain
        return
    assert not plain - windows and 0 < extra.total() < 40
    assert {"aten::cumsum", "aten::clamp_min"} <= extra.keys() - plain.keys()
    assert not extra.keys() & {"aten::mm", "aten::index_copy_", "aten::_scaled_dot_product_attention_math"}
