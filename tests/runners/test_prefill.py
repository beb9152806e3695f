"""T6, the prefill body: captured against padded eager, over every split of the tokens into requests."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cglab.errors import AddressError, InputError
from cglab.graphs.coverage import Reason
from cglab.graphs.keys import ShapeKey
from cglab.graphs.out_forms import same_bits
from cglab.models import spans as spans_module
from cglab.models.loading import random_model
from cglab.models.spans import Span
from cglab.runners.decode import DecodeRunner
from cglab.runners.prefill import INPUTS, REQUEST_AXIS, PrefillRunner
from tests.runners.splits import BUCKETS, ROOM, SPLITS, check, check_all, splits

backends = pytest.mark.parametrize("backend", ["full", "breakable"])


@backends
@settings(max_examples=25)
@given(steps=st.lists(splits(), min_size=1, max_size=5))
def test_p37_p38_one_recording_serves_every_split_and_live_count_bitwise(prefills, backend, steps):
    check_all(prefills.made[0] if prefills.made else prefills(backend, BUCKETS, settings=ROOM), steps)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_live_count_of_every_bucket_is_bitwise(prefills, backend, dtype):
    one = prefills(backend, BUCKETS, dtype=dtype, settings=ROOM)
    for live in (16, 2, 15, 3, 9, 8, 5, 4, 12):
        check(one, [(1, 0, live - 1), (2, 6, 1)])
    assert one.runner.coverage().captured == 9 and one.runner.coverage().eager == 0


@backends
def test_live_eager_agrees_within_drift_and_in_tokens(prefills, backend):
    """The fixed request axis and the spans are two forms of one function: live eager is always the one with spans."""
    one = prefills(backend, BUCKETS, settings=ROOM)
    for spans in SPLITS:
        before = one.cache()
        live = [Span(*span) for span in spans]
        logits = one.runner.last_logits(one.step(spans), live)
        one.restore(before)
        free = one.runner.last_logits(one.step(spans, one.runner.run_live_eager), live)
        assert logits.shape == (len(spans), 97)
        torch.testing.assert_close(logits, free, rtol=1e-3, atol=1e-4)
        gap = free.topk(2, -1).values.diff(dim=-1).abs().squeeze(-1)
        assert ((logits.argmax(-1) == free.argmax(-1)) | (gap < 1e-3)).all()


@backends
def test_a_prompt_in_chunks_equals_the_prompt_at_once(prefills, backend):
    one = prefills(backend, BUCKETS, settings=ROOM)
    whole = one.step([(1, 0, 16)])
    chunks = [one.step([(2, 0, 5)]), one.step([(3, 0, 4), (2, 5, 7)])[4:], one.step([(2, 12, 4)])]
    other = {**one.inputs([(2, 0, 16)]), "input_ids": one.inputs([(1, 0, 16)])["input_ids"]}
    alike = one.runner.run([Span(2, 0, 16)], **other)
    torch.testing.assert_close(alike, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(chunks), one.step([(2, 0, 16)]), rtol=1e-4, atol=1e-5)


@backends
def test_p27_absent_requests_have_no_tokens_and_start_at_the_end(prefills, backend):
    """After a step that fills the axis, a step of two requests: stale places would write into, or read, requests."""
    one = prefills(backend, BUCKETS, settings={"max_requests": 4, "max_cached": 64})
    check(one, [(5, 7, 9), (6, 0, 4), (7, 1, 2), (8, 15, 1)])
    check(one, [(3, 2, 4), (1, 0, 2)])
    views = one.runner.captured.buffers.view(8)
    if backend == "breakable":
        assert sorted(views) == sorted(INPUTS), "requests are no axis here"
        return
    assert views["request_rows"].tolist() == [3, 1, 0, 0]
    assert views["cu_seqlens_q"].tolist() == [0, 4, 6, 6, 6]
    assert views["cu_seqlens_k"].tolist() == [0, 6, 8, 8, 8]


@backends
def test_p27_b25_nothing_but_the_requests_own_tokens_is_read(prefills, backend):
    """NaN in every slot that the live requests have not filled: slot 0, their own tails, all other requests."""
    one = prefills(backend, BUCKETS, settings=ROOM)
    spans = [(4, 11, 2), (2, 0, 1), (7, 3, 3)]
    before = one.cache()
    clean = one.step(spans)
    one.restore(before)
    known = {slot for row, start, length in spans for slot in one.slots_of(row)[: start + length]}
    unknown = [slot for slot in range(one.kv.full.keys.shape[1]) if slot not in known]
    one.kv.full.keys[:, unknown] = float("nan")
    one.kv.full.values[:, unknown] = float("nan")
    assert same_bits(one.step(spans), clean) and not clean.isnan().any()


@backends
def test_p13_b26_a_padded_step_writes_its_own_slots_and_slot_zero_only(prefills, backend):
    one = prefills(backend, BUCKETS, settings=ROOM)
    one.step([(1, 0, 16)])
    before = one.cache()
    spans = [(4, 11, 3), (2, 0, 2)]
    one.step(spans)
    changed = (one.cache() != before).flatten(3).any(-1).any(0).any(0).nonzero().flatten().tolist()
    assert set(changed) - {0} == set(one.inputs(spans)["out_slots"].tolist())


def test_p53_padded_tokens_leave_the_body_finite_whatever_attention_finds_in_its_output(
    prefills, monkeypatch
):
    """Unset memory is NaN here: only what zeroes padded rows after attention keeps it out of the layers behind.

    In ``full`` only the varlen kernel leaves rows unset: test_spans has a stand-in for it.
    """
    plain = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kw: plain(*args, **kw).fill_(float("nan")))
    one = prefills("breakable", BUCKETS, settings=ROOM)
    one.step([(1, 0, 8)])
    one.step([(1, 0, 5)])
    recordings = one.runner.captured.recordings
    (hidden,) = recordings._backend.artifact(recordings.key(8)).output.leaves
    assert len(hidden) == 8 and hidden.isfinite().all()


def test_p54_a_step_without_tokens_runs_eager_and_writes_nothing(prefills):
    one = prefills("breakable", BUCKETS)
    before = one.cache()
    assert one.step([]).shape == (0, 32)
    assert one.runner.coverage().reasons == {"EMPTY_BATCH": 1} and same_bits(one.cache(), before)


@backends
def test_p07_more_padding_than_tokens_is_refused_unless_the_ceiling_is_lifted(prefills, backend):
    one = prefills(backend, (2, 16), settings=ROOM)
    for spans, reasons in (([(1, 0, 8)], {}), ([(1, 0, 7)], {"WASTE_CEILING": 1})):
        check_eager_alike(one, spans)
        assert one.runner.coverage().reasons == reasons
    lifted = prefills(backend, (2, 16), waste_ceiling=float("inf"), settings=ROOM)
    check(lifted, [(1, 0, 7)])
    assert lifted.runner.coverage().eager == 0


def check_eager_alike(one, spans):
    """A step, however it ran, agrees with live eager."""
    before = one.cache()
    got = one.step(spans)
    one.restore(before)
    torch.testing.assert_close(got, one.step(spans, one.runner.run_live_eager), rtol=1e-4, atol=1e-5)


@backends
def test_above_the_largest_bucket_is_eager_with_the_facts(prefills, backend):
    one = prefills(backend, (4, 8), settings=ROOM)
    check_eager_alike(one, [(1, 0, 9)])
    coverage = one.runner.coverage()
    assert coverage.reasons == {"ABOVE_LIMIT": 1}
    assert coverage.last_facts["ABOVE_LIMIT"] == "9 tokens, captured up to 8"


def test_more_requests_or_cached_tokens_than_the_axis_holds_are_eager_with_the_facts(prefills):
    one = prefills("full", BUCKETS, settings={"max_requests": 2, "max_cached": 20})
    check_eager_alike(one, [(1, 0, 2), (2, 0, 2), (3, 0, 3)])
    check_eager_alike(one, [(1, 10, 2), (2, 11, 2)])
    check(one, [(1, 10, 2), (2, 10, 2)])
    coverage = one.runner.coverage()
    assert coverage.captured == 1 and coverage.reasons == {"MORE_REQUESTS": 1, "MORE_KEYS": 1}
    assert coverage.last_facts[Reason.MORE_REQUESTS.name] == "3 requests, the axis holds 2"
    assert coverage.last_facts[Reason.MORE_KEYS.name] == "21 cached tokens, there is room for 20"


def test_spans_that_are_not_the_inputs_length_are_refused(prefills):
    one = prefills("breakable", BUCKETS)
    with pytest.raises(InputError, match="spans have 3 tokens, the inputs 4"):
        one.runner.run([Span(1, 0, 3)], **one.inputs([(1, 0, 4)]))
    for settings_ in ({"warmup_length": 0}, {"max_requests": 0}, {"max_cached": -1}):
        with pytest.raises(InputError, match="at least"):
            PrefillRunner(one.model, one.kv, one.group, BUCKETS, one.runner.captured.options, **settings_)


@backends
def test_p39_p45_what_a_step_derives_is_fetched_anew_by_the_next_one(prefills, backend):
    """Equal spans over a page table that changed in place: row 1 owns the pages of row 2 now."""
    one = prefills(backend, BUCKETS, settings=ROOM)
    spans = [(1, 9, 4)]
    first = one.step(spans)
    assert one.runner.live.spans == () and not one.runner.live._plans
    one.kv.full.page_table[1] = one.kv.full.page_table[2]
    again = check(one, spans)
    assert not torch.equal(again, first)


@backends
def test_p40_decode_and_prefill_of_one_group_never_serve_each_other(world, prefills, backend):
    """Equal sizes, one pool, shared inputs of the same names: each has recordings and keys of its own."""
    prefill = prefills(backend, (4, 8), settings=ROOM)
    decode = world(backend, (4, 8), group=prefill.group)
    keys = [one.runner.captured.recordings.key(4) for one in (prefill, decode)]
    assert keys == [ShapeKey(4, "prefill"), ShapeKey(4)] and keys[0] != keys[1]
    assert [one.runner.captured.recordings.can_run(keys[0]) for one in (prefill, decode)] == [True, False]
    for _ in range(3):
        check(prefill, [(3, 6, 3), (1, 0, 4)])
        values, before = decode.inputs([6, 5, 4]), decode.cache()
        tokens, logits = decode.runner.run(3, **values)
        decode.restore(before)
        wanted = decode.runner.run_padded_eager(3, 4, **values)
        assert same_bits(tokens, wanted[0]) and same_bits(logits, wanted[1])
    assert list(prefill.runner.coverage().hits) == ["8/prefill"]
    assert list(decode.runner.coverage().hits) == ["4"]


@backends
def test_p44_p28_warm_ups_and_example_batches_leave_live_kv_as_it_was(prefills, backend):
    """Stands for P44 too: this model keeps no recurrent state, so the cache is all that an example could spoil."""
    one = prefills(backend, BUCKETS, settings=ROOM, warmups=3)
    one.restore(torch.randn_like(one.cache()))  # other than what the first capture may have left
    before, table = one.cache(), one.kv.full.page_table.clone()
    # The tape takes back what a warm-up wrote, so that examples point at nothing live is looked at as such too.
    views = one.runner.captured.buffers.view(8)
    one.runner.captured.buffers.reset()
    one.runner.prepare(views)
    assert not views["out_slots"].any() and {span.row for span in one.runner.live.spans} <= {0}
    one.runner.set_live(None)
    one.runner.capture()
    assert same_bits(one.cache()[:, :, 1:], before[:, :, 1:]) and torch.equal(one.kv.full.page_table, table)
    check(one, [(4, 11, 5), (2, 0, 1)])


@backends
def test_p46_no_step_builds_a_graph_for_autograd(prefills, backend):
    """The body is called without the wrapper that a model's own forward may have: no_grad is the runner's."""
    one = prefills(backend, BUCKETS, settings=ROOM)
    one.model.requires_grad_(requires_grad=True)
    one.runner.capture()
    assert torch.is_grad_enabled()
    live = [Span(1, 0, 5)]
    padded = one.step([(1, 0, 5)], lambda live, **values: one.runner.run_padded_eager(live, 8, **values))
    hidden = one.step([(1, 0, 5)])
    above = one.step([(1, 0, 16), (2, 0, 1)])
    made = (
        padded,
        hidden,
        above,
        one.step([(1, 0, 5)], one.runner.run_live_eager),
        one.runner.last_logits(hidden, live),
    )
    assert one.runner.coverage().eager == 1 and not any(tensor.requires_grad for tensor in made)


@backends
def test_p47_a_capture_patches_nothing_whether_it_succeeds_or_fails(prefills, backend):
    """There is nothing to restore: functions of the model and of its modules are the ones from before."""

    def functions(model):
        return [
            (
                type(m).forward,
                type(m).__call__,
                m.__dict__.get("forward"),
                len(m._forward_hooks),
                sorted(vars(m)),
            )
            for m in model.modules()
        ]

    one = prefills(backend, BUCKETS, settings=ROOM)
    before = functions(random_model(one.config, device=one.device, dtype=torch.float32))  # never captured
    assert functions(one.model) == before
    one.step([(1, 0, 5)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one.kv.full, "cache", broken)
        with pytest.raises(Exception, match="out of order"):
            one.runner.capture()
    one.runner.capture()
    assert functions(one.model) == before
    check(one, [(1, 0, 5)])


def broken(*args):
    raise RuntimeError("out of order")


def test_p56_an_error_in_a_break_leaves_no_live_spans_and_a_usable_runner(prefills):
    one = prefills("breakable", BUCKETS)
    before = one.cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cglab.models.spans.portable", broken)
        patch.setattr("cglab.models.spans.varlen_kernel", lambda window: broken)
        with pytest.raises(RuntimeError, match="out of order"):
            one.step([(4, 11, 5), (2, 0, 1)])
    assert one.runner.live.spans == () and not one.runner.live._plans
    own = {0, *one.inputs([(4, 11, 5), (2, 0, 1)])["out_slots"].tolist()}
    others = [slot for slot in range(before.shape[2]) if slot not in own]
    assert same_bits(one.cache()[:, :, others], before[:, :, others])
    check(one, [(4, 11, 3), (2, 0, 1)])


@backends
def test_p56_a_refused_step_leaves_no_live_spans(prefills, backend):
    one = prefills(backend, BUCKETS, settings=ROOM)
    values = one.inputs([(1, 0, 4)])
    with pytest.raises(Exception, match="int32"):
        one.runner.run([Span(1, 0, 4)], **{**values, "positions": values["positions"].int()})
    assert one.runner.live.spans == ()
    check(one, [(1, 0, 4)])


@backends
def test_p55_a_narrower_cache_does_not_narrow_what_attention_returns(prefills, backend):
    """bfloat16 keys and values under a float32 model; outputs and the residual stream stay float32."""
    one = prefills(backend, BUCKETS, kv_dtype=torch.bfloat16, settings=ROOM)
    for spans in SPLITS:
        assert check(one, spans).dtype == torch.float32
    assert one.kv.full.keys.dtype == torch.bfloat16
    half = prefills(backend, BUCKETS, kv_dtype=torch.bfloat16, dtype=torch.bfloat16, settings=ROOM)
    assert half.step(SPLITS[0]).dtype == torch.bfloat16


@backends
def test_p57_no_buffer_exists_that_nobody_asked_for(prefills, backend):
    """No log-sum-exp, no logits, no second output: the slots, one output, and an empty pool between replays."""
    one = prefills(backend, BUCKETS, settings=ROOM)
    captured = one.runner.captured
    assert list(captured.buffers.slots) == [*INPUTS, *(REQUEST_AXIS if backend == "full" else ())]
    outputs = captured.recordings._backend.outputs._buffers
    assert [tuple(buffer.shape) for buffer in outputs] == [(16, 32)]
    assert [line["pool_bytes"] for line in captured.memory()][1:] == [0, 0], (
        "smaller buckets fit into the largest's"
    )
    if one.device.type == "cpu":
        assert one.group.pool.used_bytes == 0


@pytest.mark.parametrize("length", [1, 3, 8])
def test_b58_the_warm_ups_length_is_a_setting_and_does_not_change_what_is_recorded(
    prefills, monkeypatch, length
):
    seen, form = [], spans_module.portable

    def watched(query, key, value, out, query_ends, key_ends, window):
        seen.append((query_ends[-1], max(end - start for start, end in pairwise(query_ends))))
        form(query, key, value, out, query_ends, key_ends, window)

    monkeypatch.setattr(spans_module, "portable", watched)
    one = prefills("breakable", BUCKETS, settings={"warmup_length": length}, self_check=False)
    assert set(seen) == {(size, min(length, size)) for size in BUCKETS}, (
        "tokens and longest request of every run"
    )
    for spans in SPLITS:
        check(one, spans)
    full = prefills("full", BUCKETS, settings={"warmup_length": length, **ROOM})
    full.runner.prepare(full.runner.captured.buffers.view(16))
    assert max(span.length for span in full.runner.live.spans) == max(length, 2), (
        "eight places hold 16 tokens"
    )
    full.runner.set_live(None)


class Load:
    """KV that is still on its way: it is in the cache once it was waited for."""

    def __init__(self, one, wanted):
        self.one, self.wanted, self.waits = one, wanted, 0

    def wait(self):
        self.waits += 1
        self.one.restore(self.wanted)


@backends
def test_b58_an_example_request_is_no_longer_than_a_context(prefills, backend):
    """Two places of 16 tokens never fill a bucket of 48: its example leaves the rest padding."""
    one = prefills(backend, (8, 48), settings={"max_requests": 2, "max_cached": 16})
    check(one, [(1, 0, 16), (2, 0, 13)])


@backends
def test_p80_a_pending_load_into_the_cache_comes_before_the_replay(prefills, backend):
    """Stands for loads of a cache hierarchy: a replay has no waits between its layers, so all of it comes first."""
    one = prefills(backend, BUCKETS, settings=ROOM)
    spans, loaded = [(1, 9, 4)], one.cache()
    wanted = one.step(spans)
    one.restore(torch.zeros_like(loaded))
    assert not torch.equal(one.step(spans), wanted), "without the load"
    load = Load(one, loaded)
    one.group.expect(load)
    assert same_bits(one.step(spans), wanted) and load.waits == 1
    one.step(spans)
    assert load.waits == 1, "it is waited for once"


def test_p80_a_load_that_fails_is_not_forgotten(prefills):
    one = prefills("breakable", BUCKETS)
    load = Load(one, one.cache())
    load.wait = broken
    one.group.expect(load)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of order"):
            one.step([(1, 9, 4)])
    assert one.runner.coverage().steps == 0


@pytest.mark.gpu
@backends
def test_p80_a_copy_on_another_stream_is_waited_for_without_the_host(prefills, backend):
    one = prefills(backend, BUCKETS, settings=ROOM)
    spans, loaded = [(1, 9, 4)], one.cache()
    wanted = one.step(spans)
    one.restore(torch.zeros_like(loaded))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        one.restore(loaded)
    one.group.expect(side.record_event())
    assert same_bits(one.step(spans), wanted)


@backends
def test_p84_running_requests_ride_along_as_spans_of_one_token(prefills, backend):
    """A mixed batch: two new prompts and three requests that decode, by the same recording as prompts alone."""
    one = prefills(backend, BUCKETS, settings=ROOM)
    prompts = [(1, 0, 6), (2, 0, 5)]
    mixed = [*prompts, (3, 9, 1), (4, 15, 1), (5, 1, 1)]
    check(one, mixed)
    check(one, prompts)
    coverage = one.runner.coverage()
    assert dict(coverage.hits) == {"16/prefill": 2} and coverage.eager == 0


def test_p84_a_ride_along_request_gets_the_token_that_decode_would_give(prefills, world):
    one = prefills("breakable", BUCKETS)
    spans = [(2, 0, 5), (1, 9, 1)]
    before = one.cache()
    logits = one.runner.last_logits(one.step(spans), [Span(*span) for span in spans])
    one.restore(before)
    decode = DecodeRunner(one.model, one.kv, one.group, (1,), one.runner.captured.options)
    tokens = one.inputs([(1, 9, 1)])["input_ids"]
    inputs = {**one.inputs([(1, 9, 1)]), "request_rows": tokens * 0 + 1, "seq_lens": tokens * 0 + 10}
    _, wanted = decode.run_live_eager(1, **inputs)
    torch.testing.assert_close(logits[1:], wanted, rtol=1e-4, atol=1e-5)
    decode.close()


@backends
@pytest.mark.parametrize("name", ["keys", "values", "page_table"])
def test_b35_a_cache_that_moved_is_refused_by_name(prefills, backend, name):
    one = prefills(backend, (8,), settings=ROOM)
    setattr(one.kv.full, name, getattr(one.kv.full, name).clone())
    with pytest.raises(AddressError, match=rf"moved: kv\.{name}"):
        one.step([(1, 0, 8)])


@backends
def test_closing_gives_the_groups_pool_back(prefills, backend):
    one = prefills(backend, BUCKETS, settings=ROOM)
    one.step([(1, 0, 8)])
    assert one.group.pool.reserved_bytes > 0
    one.close()
    assert one.group.pool.reserved_bytes == 0


@backends
def test_b64_with_the_cache_full_a_padded_batch_is_captured_lazily_and_replays(prefills, backend):
    """Every page belongs to a request; what padding and examples point at was set aside when the cache was made."""
    one = prefills(backend, BUCKETS, lazy=True, settings=ROOM)
    assert sorted(one.kv.full.page_table[1:].flatten().tolist()) == list(range(1, 33)), "no page is free"
    assert one.runner.captured.captured_sizes == [] and one.runner.captured.unused_sizes == list(BUCKETS)
    for spans in SPLITS:
        check(one, spans)
    assert one.runner.coverage().captured == len(SPLITS) and one.runner.coverage().eager == 0
    assert one.runner.captured.captured_sizes == [4, 8, 16] and one.runner.captured.unused_sizes == []


@backends
def test_b55_a_lazy_capture_in_mid_service_touches_nothing_live(prefills, backend):
    """The first use of a bucket captures it, warm-ups included, and then serves the step that asked for it."""
    one = prefills(backend, BUCKETS, lazy=True, settings=ROOM)
    spans, before = SPLITS[2], one.cache()
    first, after = one.step(spans), one.cache()
    one.restore(before)
    assert same_bits(one.step(spans), first) and same_bits(one.cache()[:, :, 1:], after[:, :, 1:])
    assert one.runner.captured.captured_sizes == [8] and one.runner.captured.unused_sizes == [4, 16]
    assert one.runner.live.spans == ()
