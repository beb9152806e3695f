"""Greedy batched generation: who gets rows and pages, who ends when, and the same tokens on every arm."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cglab.engine.allocator import FreeList
from cglab.engine.batches import SchedulerOptions
from cglab.engine.engine import Engine
from cglab.engine.requests import Request
from cglab.engine.workload import steady_decode, steady_prefill
from cglab.errors import InputError
from cglab.graphs.options import Options
from cglab.lab.phases import LabPhases
from cglab.lab.techniques import Captures
from cglab.models.config import ModelConfig
from cglab.models.kv import PagedKV
from cglab.models.loading import random_model
from cglab.models.spans import LiveSpans, PrefillAttention, Span
from cglab.runners.base import GraphGroup

CONFIG = ModelConfig(
    "Qwen3ForCausalLM", vocab_size=53, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=64, qk_norm=True,
)  # fmt: skip
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15]]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


@pytest.fixture
def bench(device):
    """Makes engines with runners of a backend in both phases, and closes them."""
    made = []

    def make(
        backend="full", *, prefill="breakable", rows=9, pages=33, buckets=(1, 2, 4, 8), budget=16, **policy
    ):
        model = random_model(CONFIG, device=device, dtype=torch.float32, seed=3)
        kv = PagedKV(
            CONFIG, pages=pages, page_size=4, rows=rows, max_context=32, device=device, dtype=torch.float32
        )
        group, captures = GraphGroup(device), Captures()
        captures.decode, captures.prefill = backend, prefill
        phases = LabPhases(
            model,
            kv,
            group,
            captures,
            buckets=buckets,
            prefill_buckets=(4, 8, 16),
            options=Options(strict=True),
        )
        made.append((phases, group))
        return Engine(model, kv, phases, SchedulerOptions(budget, **policy))

    yield make
    for phases, group in made:
        phases.close()
        group.close()


@torch.no_grad()
def reference(engine, prompt, count):
    """One request alone, the whole sequence recomputed for every token: no cache, no batch, no capture."""
    kv = PagedKV(
        CONFIG,
        pages=9,
        page_size=4,
        rows=2,
        max_context=32,
        device=engine.kv.full.keys.device,
        dtype=torch.float32,
    )
    kv.full.page_table[1] = torch.arange(1, 9)
    tokens = list(prompt)
    for _ in range(count):
        length = len(tokens)
        where = torch.arange(length, device=kv.full.keys.device)
        attention = PrefillAttention(kv, out_slots=where + 4, live=LiveSpans([Span(1, 0, length)]))
        hidden = engine.model(torch.tensor(tokens, device=kv.full.keys.device), where, attention)
        tokens.append(int(engine.model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def settled(engine):
    """Nothing in flight, nothing leaked."""
    engine.scheduler.check_invariants()
    return engine.idle and engine.scheduler.memory.rows.free == engine.scheduler.memory.rows.total


@pytest.mark.parametrize("prefill", ["breakable", "eager"])
@pytest.mark.parametrize("backend", ["full", "breakable", "eager"])
def test_every_arm_generates_what_recomputing_from_scratch_does(bench, backend, prefill):
    engine = bench(backend, prefill=prefill)
    result = engine.generate(PROMPTS, [9, 4, 12, 1, 7])
    assert result.tokens == [reference(engine, p, n) for p, n in zip(PROMPTS, [9, 4, 12, 1, 7], strict=True)]
    assert result.finish == ["length"] * 5
    assert result.timings.step_batches == sorted(result.timings.step_batches, reverse=True), (
        "requests leave, none joins"
    )
    assert result.coverage.steps == 11, "twelve tokens, the first from the prefill"
    assert result.coverage.captured == (0 if backend == "eager" else 11)
    assert result.timings.prefill_tokens == [15] and result.prefill.steps == 1
    assert result.prefill.captured == (prefill != "eager")


def test_a_prompt_longer_than_the_budget_comes_in_chunks(bench):
    engine = bench(budget=4)
    prompts = [[*range(1, 12)], [3] * 9]
    result = engine.generate(prompts, 3)
    assert result.tokens == [reference(engine, p, 3) for p in prompts]
    assert result.timings.prefill_tokens == [4, 4, 4, 4, 4]


def test_a_known_prefix_is_not_computed_again(bench):
    engine = bench()
    first = engine.generate([[*range(1, 14)]], 3)
    again = engine.generate([[*range(1, 14)]], 3)
    assert again.tokens == first.tokens
    assert (first.timings.prefill_tokens, again.timings.prefill_tokens) == ([13], [1]), "three pages of four"
    engine.flush_cache()
    assert engine.generate([[*range(1, 14)]], 3).timings.prefill_tokens == [13]


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_prefix_of_other_weights_is_forgotten(bench, how):
    engine = bench("eager", prefill="eager")
    engine.generate([[*range(1, 14)]], 3)
    weight = engine.model.blocks[0].feed_forward.down.weight
    with torch.no_grad():
        if how == "in place":
            weight.neg_()
        else:
            weight.data = -weight.data
    changed = engine.generate([[*range(1, 14)]], 3)
    assert changed.timings.prefill_tokens == [13]
    assert changed.tokens == [reference(engine, [*range(1, 14)], 3)]


@pytest.mark.parametrize("mixed", [False, True])
def test_requests_that_gave_way_end_with_the_same_tokens(bench, mixed):
    engine = bench(rows=5, pages=11, buckets=(1, 2, 4), mixed=mixed)
    prompts = [[i + 1, 7, 9] for i in range(6)]
    requests = [Request(i, p, 14) for i, p in enumerate(prompts)]
    list(engine.stream(requests))
    assert sum(request.preemptions for request in requests) > 0
    assert [r.output for r in requests] == [reference(engine, p, 14) for p in prompts]
    assert settled(engine)


def test_p84_riders_of_a_mixed_batch_are_extends(bench):
    engine = bench(mixed=True, budget=8)
    first, second = Request(0, [1, 2, 3], 8), Request(1, [5, 6, 7, 8, 9], 4)
    engine.submit(first)
    engine.step()
    engine.submit(second)
    with engine.watched() as steps:
        events = engine.step()
    assert [(step.kind, step.tokens) for step in steps] == [("prefill", 6)]
    assert [event.request for event in events] == [first, second]
    while not engine.idle:
        engine.step()
    assert first.output == reference(engine, first.prompt, 8)
    assert second.output == reference(engine, second.prompt, 4)


def test_stop_tokens_end_a_request_and_are_kept(bench):
    engine = bench()
    plain = engine.generate(PROMPTS, 8).tokens
    stop = plain[0][3]
    result = engine.generate(PROMPTS, 8, stops=[stop])
    for got, whole, why in zip(result.tokens, plain, result.finish, strict=True):
        cut = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert got == cut and why == ("stop" if stop in whole else "length")


def test_requests_wait_for_rows_and_pages_and_all_end(bench):
    engine = bench(rows=3, pages=9, buckets=(1, 2))
    prompts = PROMPTS * 2
    result = engine.generate(prompts, 6)
    assert result.tokens == [reference(engine, p, 6) for p in prompts]
    assert max(result.timings.step_batches) == 2 and settled(engine)
    first = result.timings.first_token
    assert first == sorted(first), "in order"


def test_rows_and_pages_come_back_when_a_step_raises(bench, monkeypatch):
    engine = bench()
    runner = engine.phases.decode()

    def step(live, **inputs):
        raise RuntimeError("mid-flight")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", step)
        with pytest.raises(RuntimeError, match="mid-flight"):
            engine.generate(PROMPTS, 5)
    assert settled(engine)
    assert engine.generate(PROMPTS, 3).tokens == [reference(engine, p, 3) for p in PROMPTS]


def test_a_cancelled_request_streams_its_end_and_the_others_go_on(bench):
    engine = bench()
    requests = [Request(i, p, 8) for i, p in enumerate(PROMPTS[:3])]
    ends = {}
    for event in engine.stream(requests):
        if event.request is requests[1] and len(requests[1].output) == 3 and requests[1].finish is None:
            engine.cancel(requests[1])
        if event.finish:
            ends[event.request.index] = event.finish
    assert ends == {0: "length", 1: "cancelled", 2: "length"}
    assert requests[0].output == reference(engine, PROMPTS[0], 8)
    assert requests[1].output == reference(engine, PROMPTS[1], 8)[: len(requests[1].output)]
    assert settled(engine)


def test_a_stream_that_is_left_leaves_nothing_behind(bench):
    engine = bench()
    for event in engine.stream([Request(i, p, 8) for i, p in enumerate(PROMPTS)]):
        if event.token is not None:
            break
    del event
    gc.collect()
    assert settled(engine)


def test_a_request_that_wants_no_token_ends_at_once(bench):
    engine = bench()
    result = engine.generate([[1, 2], [3]], [0, 2])
    assert result.tokens == [[], reference(engine, [3], 2)] and result.finish == ["length"] * 2


def test_b26_reserved_row_and_page_are_never_given_out(bench):
    engine = bench(rows=3, pages=9)
    requests = [Request(i, p, 5) for i, p in enumerate(PROMPTS)]
    for _ in engine.stream(requests):
        for request in engine.scheduler.running:
            assert request.row > 0 and 0 not in request.pages


def test_a_step_writes_only_slots_of_running_requests(bench):
    engine = bench("full")
    with steady_decode(engine, 3, 6) as step:
        before = engine.kv.full.keys.clone()
        engine.phases.decode().run(step.live, **step.inputs)
        changed = (engine.kv.full.keys != before).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
        assert set(changed) - {0} <= set(step.inputs["out_slots"].tolist())
    assert settled(engine)


@pytest.mark.parametrize("compute", [True, False])
def test_a_step_is_held_where_requests_ride_along_too(bench, compute):
    engine = bench(mixed=True)
    with steady_decode(engine, 3, 12, compute=compute) as step:
        assert step.inputs["seq_lens"].tolist() == [12] * 3
    assert settled(engine) and engine.scheduler.options.mixed


def test_a_step_without_computed_prompts_is_of_the_same_size_and_its_pages_pass_for_no_prefix(bench):
    engine = bench()
    with steady_decode(engine, 3, 12) as step:
        inputs = {name: value.clone() for name, value in step.inputs.items()}
    keys = engine.kv.full.keys.clone()
    with steady_decode(engine, 3, 12, seed=1, compute=False) as step:
        for name in ("positions", "seq_lens", "request_rows"):
            assert torch.equal(step.inputs[name], inputs[name])
        assert torch.equal(engine.kv.full.keys, keys)
    assert settled(engine) and not engine.scheduler.memory.pages.cached


@pytest.mark.parametrize(("tokens", "cached", "requests"), [(8, 0, 1), (8, 8, 2), (12, 16, 1), (16, 0, 4)])
def test_a_prefill_step_can_be_held_and_repeated(bench, tokens, cached, requests):
    engine = bench()
    with steady_prefill(engine, tokens, cached, requests) as step:
        assert step.workload == {"tokens": tokens, "cached": cached, "requests": requests}
        assert step.rows == tokens == len(step.inputs["input_ids"])
        first = engine.phases.prefill().run(step.live, **step.inputs).clone()
        assert torch.equal(first, engine.phases.prefill().run(step.live, **step.inputs))
    assert settled(engine)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((7, 0, 2), "whole tokens"),
        ((8, 3, 1), "pages of 4"),
        ((32, 0, 1), "budget of 16"),
        ((16, 28, 1), "fit"),
    ],
)
def test_a_prefill_step_that_cannot_be_is_told(bench, sizes, told):
    engine = bench()
    with pytest.raises(InputError, match=told), steady_prefill(engine, *sizes):
        pass
    assert settled(engine)


def test_a_decode_step_that_does_not_fit_is_told(bench):
    engine = bench(pages=9)
    with pytest.raises(InputError, match="do not fit into the cache together"), steady_decode(engine, 4, 12):
        pass
    assert settled(engine)
    with pytest.raises(InputError, match="at most 8"), steady_decode(engine, 9, 4):
        pass


@pytest.mark.parametrize(
    ("prompts", "count", "message"),
    [
        ([[]], 4, "prompt 0 is empty"),
        ([[1], [53]], 4, "prompt 1 has token ids outside of 0 to 52"),
        ([[-1]], 4, "prompt 0 has token ids outside"),
        ([[1] * 30], 4, "34 do not fit into a context of 32"),
        ([[1]], -1, "at least 0, got -1"),
        ([[1]], 1.5, "at least 0, got 1.5"),
        ([[1], [2]], [3], "1 limits for 2 prompts"),
    ],
)
def test_what_can_never_run_is_refused_before_anything_starts(bench, prompts, count, message):
    engine = bench()
    with pytest.raises(InputError, match=message):
        engine.generate(prompts, count)
    assert engine.phases.decode().coverage().steps == 0 and settled(engine)


def test_no_prompts_give_an_empty_result(bench):
    result = bench().generate([], 4)
    assert result.tokens == [] and result.coverage.steps == 0 and result.timings.median_step is None
    assert "no decode step" in str(result)


def test_coverage_of_a_call_is_its_own(bench):
    engine = bench()
    first = engine.generate([[1]], 5)
    second = engine.generate([[1], [2]], 3)
    assert (first.coverage.steps, second.coverage.steps) == (4, 2)
    assert first.coverage.hits == {"1": 4} and second.coverage.hits == {"2": 2}
    assert engine.phases.decode().coverage().steps == 6


def test_generating_again_and_again_does_not_grow(bench):
    engine = bench()
    engine.generate(PROMPTS, 6)
    engine.generate(PROMPTS, 6)
    gc.collect()
    tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    for _ in range(3):
        engine.generate(PROMPTS, 6)
    gc.collect()
    assert sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()) == tensors


@given(st.lists(st.integers(1, 4), max_size=30))
def test_a_free_list_never_gives_the_same_index_twice(sizes):
    free, held = FreeList(9, "rows"), []
    for size in sizes:
        if size <= free.free:
            taken = free.take(size)
            assert 0 not in taken and not {*taken} & {i for part in held for i in part}
            held.append(taken)
        elif held:
            free.give(held.pop(0))
        assert free.free + sum(map(len, held)) == free.total == 8
    for part in held:
        free.give(part)
    assert free.take(8) == list(range(1, 9))


def test_a_free_list_tells_what_is_wrong():
    free = FreeList(3, "KV pages")
    with pytest.raises(InputError, match="3 KV pages wanted, 2 of 2 free"):
        free.take(3)
    (one,) = free.take()
    free.give([one])
    with pytest.raises(InputError, match=f"KV pages {one} is not in use"):
        free.give([one])
