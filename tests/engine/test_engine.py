"""Greedy batched generation: who gets rows and pages, who ends when, and the same tokens on every arm."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cglab.engine.allocator import FreeList
from cglab.engine.engine import Engine
from cglab.engine.requests import Request
from cglab.engine.workload import steady_decode
from cglab.errors import InputError
from cglab.graphs.options import Options
from cglab.models.config import ModelConfig
from cglab.models.kv import PagedKV
from cglab.models.loading import random_model
from cglab.runners.base import GraphGroup
from cglab.runners.decode import DecodeRunner

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
    """Makes an engine and a runner of a backend, and closes them."""
    made = []

    def make(backend="full", *, rows=9, pages=33, buckets=(1, 2, 4, 8), **options):
        model = random_model(CONFIG, device=device, dtype=torch.float32, seed=3)
        kv = PagedKV(
            CONFIG, pages=pages, page_size=4, rows=rows, max_context=32, device=device, dtype=torch.float32
        )
        group = GraphGroup(device)
        runner = DecodeRunner(model, kv, group, buckets, Options(backend=backend, strict=True, **options))
        made.append((runner, group))
        return Engine(model, kv, device), runner

    yield make
    for runner, group in made:
        runner.close()
        group.close()


def reference(engine, prompt, count):
    """One request alone, the whole sequence recomputed for every token: no cache, no batch, no capture."""
    tokens = list(prompt)
    for _ in range(count):
        request = Request(0, tokens, 1)
        assert engine.admit(request)
        tokens.append(int(engine.prefill(request).argmax()))
        engine.release(request)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("backend", ["full", "breakable", "eager"])
def test_every_arm_generates_what_recomputing_from_scratch_does(bench, backend):
    engine, runner = bench(backend)
    result = engine.generate(PROMPTS, [9, 4, 12, 1, 7], runner)
    assert result.tokens == [reference(engine, p, n) for p, n in zip(PROMPTS, [9, 4, 12, 1, 7], strict=True)]
    assert result.finish == ["length"] * 5
    assert result.timings.step_batches == sorted(result.timings.step_batches, reverse=True), (
        "requests leave, none joins"
    )
    assert result.coverage.steps == 11, "twelve tokens, the first from the prefill"
    assert result.coverage.captured == (0 if backend == "eager" else 11)


def test_stop_tokens_end_a_request_and_are_kept(bench):
    engine, runner = bench()
    plain = engine.generate(PROMPTS, 8, runner).tokens
    stop = plain[0][3]
    result = engine.generate(PROMPTS, 8, runner, stops=[stop])
    for got, whole, why in zip(result.tokens, plain, result.finish, strict=True):
        cut = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert got == cut and why == ("stop" if stop in whole else "length")


def test_requests_wait_for_rows_and_pages_and_all_end(bench):
    engine, runner = bench(rows=3, pages=9, buckets=(1, 2))
    prompts = PROMPTS * 2
    result = engine.generate(prompts, 6, runner)
    assert result.tokens == [reference(engine, p, 6) for p in prompts]
    assert max(result.timings.step_batches) == 2
    assert engine.rows.free == engine.rows.total == 2 and engine.pages.free == engine.pages.total == 8
    assert not engine.kv.page_table.any(), "rows of requests that left point at page 0"
    first = result.timings.first_token
    assert first == sorted(first), "in order"


def test_rows_and_pages_come_back_when_a_step_raises(bench):
    engine, runner = bench()
    requests = [Request(i, p, 5) for i, p in enumerate(PROMPTS)]

    def step(live, inputs):
        raise RuntimeError("mid-flight")

    with pytest.raises(RuntimeError, match="mid-flight"):
        list(engine.stream(requests, step, lambda: 0.0))
    assert engine.rows.free == engine.rows.total and engine.pages.free == engine.pages.total
    assert not engine.kv.page_table.any()
    assert engine.generate(PROMPTS, 3, runner).tokens == [reference(engine, p, 3) for p in PROMPTS]


def test_b26_reserved_row_and_page_are_never_given_out(bench):
    engine, runner = bench(rows=3, pages=9)
    seen = []
    admit = engine.admit

    def spy(request):
        took = admit(request)
        seen.append((request.row, *request.pages))
        return took

    engine.admit = spy
    engine.generate(PROMPTS, 5, runner)
    assert all(0 not in taken[1:] for taken in seen) and all(taken[0] != 0 for taken in seen if taken[1:])


def test_a_step_writes_only_slots_of_running_requests(bench):
    engine, runner = bench("full")
    with steady_decode(engine, 3, 6) as step:
        before = engine.kv.keys.clone()
        runner.run(step.live, **step.inputs)
        changed = (engine.kv.keys != before).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
        assert set(changed) - {0} <= set(step.inputs["out_slots"].tolist())
    assert engine.rows.free == engine.rows.total


@pytest.mark.parametrize(
    ("prompts", "count", "message"),
    [
        ([[]], 4, "prompt 0 is empty"),
        ([[1], [53]], 4, "prompt 1 has token ids outside of 0 to 52"),
        ([[-1]], 4, "prompt 0 has token ids outside"),
        ([[1] * 30], 4, "34 do not fit into a context of 32"),
        ([[1]], 0, "at least 1, got 0"),
        ([[1], [2]], [3], "1 limits for 2 prompts"),
    ],
)
def test_what_can_never_run_is_refused_before_anything_starts(bench, prompts, count, message):
    engine, runner = bench()
    with pytest.raises(InputError, match=message):
        engine.generate(prompts, count, runner)
    assert runner.coverage().steps == 0 and engine.rows.free == engine.rows.total


def test_no_prompts_give_an_empty_result(bench):
    engine, runner = bench()
    result = engine.generate([], 4, runner)
    assert result.tokens == [] and result.coverage.steps == 0 and result.timings.median_step is None
    assert "no decode step" in str(result)


def test_coverage_of_a_call_is_its_own(bench):
    engine, runner = bench()
    first = engine.generate([[1]], 5, runner)
    second = engine.generate([[1], [2]], 3, runner)
    assert (first.coverage.steps, second.coverage.steps) == (4, 2)
    assert first.coverage.hits == {"1": 4} and second.coverage.hits == {"2": 2}
    assert runner.coverage().steps == 6


def test_generating_again_and_again_does_not_grow(bench):
    engine, runner = bench()
    engine.generate(PROMPTS, 6, runner)
    gc.collect()
    tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    for _ in range(3):
        engine.generate(PROMPTS, 6, runner)
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
