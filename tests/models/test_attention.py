import pytest
import torch

import cglab
from cglab.errors import BreakRefusedError, InputError
from cglab.models import spans
from cglab.models.attention import DecodeAttention, LiveRows
from cglab.models.kv import PagedKV
from cglab.models.spans import LiveSpans, PrefillAttention, Span

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def sequences(*lengths):
    return [torch.randint(0, 300, (length,)) for length in lengths]


@pytest.fixture
def started(tiny, paged):
    """Three requests of 5, 11 and 2 tokens in the cache, and their tokens."""
    runner = paged(tiny(), 3, 24)
    tokens = sequences(5, 11, 2)
    runner.prefill(dict(enumerate(tokens)))
    return runner, tokens


def test_prefill_then_decode_equals_the_whole_sequence_in_one_go(tiny, paged, whole):
    runner = paged(tiny(), 3, 24)
    tokens = sequences(13, 20, 7)
    heads = [5, 11, 2]
    hidden = runner.prefill({i: tokens[i][: heads[i]] for i in range(3)})
    parts = [[part] for part in hidden.split(heads)]
    for step in range(9):
        batch = {i: tokens[i][[heads[i] + step]] for i in range(3) if heads[i] + step < len(tokens[i])}
        for request, row in zip(batch, runner.decode(batch), strict=True):
            parts[request].append(row.unsqueeze(0))
    for request in range(3):
        expected = whole(runner.model, tokens[request])
        torch.testing.assert_close(torch.cat(parts[request]), expected, **TOLERANCE)


def test_a_prompt_in_chunks_equals_the_prompt_at_once(tiny, paged, whole):
    runner = paged(tiny(), 2, 24)
    first, second = sequences(17, 9)
    runner.prefill({0: first[:3]})
    runner.prefill({0: first[3:10], 1: second[:4]})
    end = runner.prefill({1: second[4:], 0: first[10:]})
    torch.testing.assert_close(end[:5], whole(runner.model, second)[4:], **TOLERANCE)
    torch.testing.assert_close(end[5:], whole(runner.model, first)[10:], **TOLERANCE)


@pytest.mark.parametrize("width", [2, 4])
def test_a_step_of_several_tokens_sees_what_single_steps_see(started, whole, width):
    runner, tokens = started
    new = [torch.randint(0, 300, (width,)) for _ in tokens]
    wide = runner.decode(dict(enumerate(new)), width=width).split(width)
    for request, rows in enumerate(wide):
        expected = whole(runner.model, torch.cat((tokens[request], new[request])))[-width:]
        torch.testing.assert_close(rows, expected, **TOLERANCE)


def test_heads_without_groups_and_one_shared_key_head(tiny, paged, whole):
    for kv_heads in (6, 1):
        runner = paged(tiny(num_kv_heads=kv_heads), 1, 16)
        (tokens,) = sequences(6)
        runner.prefill({0: tokens[:5]})
        last = runner.decode({0: tokens[5:]})
        torch.testing.assert_close(last, whole(runner.model, tokens)[-1:], **TOLERANCE)


def test_b26_padded_requests_write_to_slot_0_only(started):
    runner, _ = started
    before = runner.kv.full.keys.clone(), runner.kv.full.values.clone()
    inputs = runner.decode_inputs({1: [7]}, padding=3)
    with torch.no_grad():
        runner.step(inputs)
    for tensor, old in zip((runner.kv.full.keys, runner.kv.full.values), before, strict=True):
        changed = (tensor != old).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
        assert changed == [0, int(inputs["out_slots"][0])]


def test_b25_nothing_but_live_tokens_is_read(started):
    """NaN in free pages, in the rest of a request's last page, in row 0, slot 0 and unused table entries."""
    runner, _ = started
    clean = runner.decode({0: [7], 1: [8]}, padding=2)
    runner.lengths[0] -= 1
    runner.lengths[1] -= 1
    live = torch.cat([runner.slots(i, 0, runner.lengths[i]) for i in (0, 1)])
    rest = torch.ones(runner.kv.full.keys.shape[1], dtype=torch.bool)
    rest[live] = False
    runner.kv.full.keys[:, rest] = float("nan")
    runner.kv.full.values[:, rest] = float("nan")
    runner.kv.full.page_table[1, 2:] = 10**9
    poisoned = runner.decode({0: [7], 1: [8]}, padding=2)
    assert torch.equal(poisoned[:2], clean[:2])


def test_b28_garbage_in_padded_tokens_leaves_live_rows_bitwise_equal(started):
    runner, _ = started
    inputs = runner.decode_inputs({2: [9]}, padding=3)
    with torch.no_grad():
        clean = runner.step(inputs)[:1].clone()
        inputs["ids"][1:] = 299
        inputs["positions"][1:] = 127
        assert torch.equal(runner.step(inputs)[:1], clean)


def test_p53_padded_rows_of_a_break_are_zero_and_live_rows_do_not_change(started):
    runner, _ = started
    query, key, value = torch.randn(4, 6, 16), torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    inputs = runner.decode_inputs({0: [1], 1: [2]}, padding=2)
    outputs = []
    for live in (None, LiveRows(2)):
        attend = DecodeAttention(
            runner.kv,
            out_slots=inputs["out_slots"],
            request_rows=inputs["rows"],
            seq_lens=inputs["lens"],
            live=live,
        )
        outputs.append(attend(0, query, key, value))
    assert torch.equal(outputs[0][:2], outputs[1][:2])
    assert outputs[0][2:].abs().min() > 0
    assert torch.equal(outputs[1][2:], torch.zeros(2, 96))


def test_p54_without_live_rows_no_kernel_runs_and_the_output_is_zero(started, monkeypatch):
    def called(*args, **options):
        pytest.fail("attention over no rows")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", called)
    for form in ("portable", "varlen_kernel"):
        monkeypatch.setattr(spans, form, called)
    runner, _ = started
    before = runner.kv.full.keys.clone()
    heads = torch.randn(2, 6, 16), torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    zeros = torch.zeros(2, dtype=torch.int64)
    decode = DecodeAttention(
        runner.kv, out_slots=zeros, request_rows=zeros, seq_lens=zeros + 1, live=LiveRows(0)
    )
    prefill = PrefillAttention(runner.kv, out_slots=zeros, live=LiveSpans())
    for attend in (decode, prefill):
        assert torch.equal(attend(0, *heads), torch.zeros(2, 96))
    assert torch.equal(runner.kv.full.keys[:, 1:], before[:, 1:])


def test_p53_prefill_zeroes_padded_tokens(started):
    runner, _ = started
    heads = torch.randn(6, 6, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    slots = torch.cat((runner.slots(2, 2, 4), torch.zeros(2, dtype=torch.int64)))
    before = runner.kv.full.keys.clone()
    out = PrefillAttention(runner.kv, out_slots=slots, live=LiveSpans([Span(3, 2, 4)]))(1, *heads)
    assert out[:4].abs().min() > 0 and torch.equal(out[4:], torch.zeros(2, 96))
    changed = (runner.kv.full.keys != before).flatten(2).any(-1)
    assert not changed[0].any() and set(changed[1].nonzero().flatten().tolist()) <= {0, *slots.tolist()}


def capture(runner, backend, live, buckets):
    def step(ids, positions, out_slots, rows, lens):
        inputs = {"ids": ids, "positions": positions, "out_slots": out_slots, "rows": rows, "lens": lens}
        return runner.model.logits(runner.step(inputs, live=live))

    slots = {
        name: cglab.Slot(pad=1 if name == "lens" else 0)
        for name in ("ids", "positions", "out_slots", "rows", "lens")
    }
    inline = backend == "full" and live is None
    return cglab.capture(
        step, slots=slots, buckets=buckets, backend=backend, inline_breaks=inline, strict=True
    ), step


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_a_decode_step_can_be_captured_and_replays_bitwise(started, backend):
    """No host read, no data-dependent shape, no tensor from Python values: the recorder would refuse them."""
    runner, _ = started
    live = LiveRows(1) if backend == "breakable" else None
    captured, step = capture(runner, backend, live, (1, 2, 4))
    for batch in ({0: [3]}, {0: [4], 1: [5], 2: [6]}, {1: [7], 2: [8]}):
        inputs = runner.decode_inputs(batch)
        padded = {1: 0, 2: 0, 3: 1}[len(batch)]
        if live:
            live.rows = len(batch)
        full = {
            name: torch.cat((tensor, torch.full((padded,), int(name == "lens"))))
            for name, tensor in inputs.items()
        }
        with torch.no_grad():
            expected = step(**full)[: len(batch)]
        assert torch.equal(captured(**inputs), expected)
    assert captured.coverage().captured == 3
    captured.close()


def test_a_full_capture_refuses_the_break_unless_it_is_told_to_record_it(started):
    runner, _ = started
    captured, _ = capture(runner, "full", LiveRows(1), (1,))
    with pytest.raises(BreakRefusedError, match="_decode"):
        captured(**runner.decode_inputs({0: [3]}))


def test_sizes_that_do_not_fit_are_told(started):
    runner, _ = started
    zeros = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(
        InputError, match="3 request rows, 3 lengths and 3 slots do not make a step of width 2"
    ):
        DecodeAttention(runner.kv, out_slots=zeros, request_rows=zeros, seq_lens=zeros, width=2)


def test_the_cache_has_a_reserved_corner_and_refuses_to_be_nothing_else(tiny):
    config = tiny().config
    kv = PagedKV(config, pages=3, page_size=4, rows=2, max_context=9, device="cpu", dtype=torch.bfloat16)
    assert (
        kv.full.keys.shape == kv.full.values.shape == (2, 12, 2, 16) and kv.full.keys.dtype == torch.bfloat16
    )
    assert (
        kv.full.page_table.shape == (2, 3)
        and kv.full.page_table.dtype == torch.int64
        and not kv.full.page_table.any()
    )
    for sizes in ({"pages": 1}, {"rows": 1}, {"page_size": 0}, {"max_context": 0}):
        given = {"pages": 3, "rows": 2, "page_size": 4, "max_context": 9, **sizes}
        with pytest.raises(InputError, match="at least"):
            PagedKV(config, **given, device="cpu", dtype=torch.float32)
