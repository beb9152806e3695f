"""Models with sliding-window layers, from a transformers folder to tokens: the same tokens, in far fewer pages."""

from dataclasses import replace

import pytest
import torch

import cglab
from cglab.engine.requests import Request
from cglab.engine.workload import DecodeStep
from cglab.errors import InputError
from cglab.lab import facade
from cglab.lab.floor import bytes_read
from cglab.models.loading import random_model

WINDOW, BUDGET, PAGE = 20, 24, 16
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
}
MIXES = {
    "alternating": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "last": {"max_window_layers": 2},
    "all": {"max_window_layers": 0},
    "one token": {"max_window_layers": 3, "sliding_window": 1},
}
LENGTHS = (3, 19, 20, 21, 24, 47, 90)
"""Of prompts: shorter and longer than the window, than the budget, and than both together."""
LIMITS = (40, 12, 9, 12, 2, 12, 30)
LONGEST = 60
"""New tokens of each that transformers is asked for."""
MODES = ("eager", "breakable", "full")


class Model:
    """A folder as transformers writes it, prompts, and what transformers itself generates for each alone."""

    def __init__(self, folder, mix):
        import transformers

        self.folder, self.mix = folder, mix
        config = transformers.Qwen3Config(**SHAPE | MIXES[mix], attn_implementation="eager")
        theirs = transformers.Qwen3ForCausalLM(config).eval()
        torch.manual_seed(4)
        for name, parameter in theirs.named_parameters():
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
        theirs.save_pretrained(folder)
        self.prompts = [torch.randint(0, 300, (length,)).tolist() for length in LENGTHS]
        self._tokens = []
        for prompt in self.prompts:
            ids, cached = torch.tensor([prompt]), config.sliding_window > 1  # its cache never drops one token
            whole = theirs.generate(
                ids, max_new_tokens=LONGEST, do_sample=False, pad_token_id=0, use_cache=cached
            )
            self._tokens.append(whole[0, len(prompt) :].tolist())
        assert {len(tokens) for tokens in self._tokens} == {LONGEST}

    def tokens(self, limits):
        """The first new tokens of each prompt."""
        return [tokens[:limit] for tokens, limit in zip(self._tokens, limits, strict=True)]

    def open(self, **options):
        settings = {
            "max_batch": 4,
            "max_context": 256,
            "token_budget": BUDGET,
            "prefill_buckets": (8, 16, 24),
        }
        return cglab.open(self.folder, device="cpu", **settings | options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A function that makes the model of a mix, once."""
    made = {}

    def make(mix="alternating"):
        if mix not in made:
            made[mix] = Model(tmp_path_factory.mktemp("model"), mix)
        return made[mix]

    return make


@pytest.fixture(scope="module")
def lab(model):
    with model().open() as opened:
        yield opened


def settled(engine):
    """Nothing in flight, nothing leaked, in either pool."""
    engine.scheduler.check_invariants()
    memory = engine.scheduler.memory
    return engine.idle and memory.window_pages.free == memory.window_pages.total and memory.pages.held == 0


@pytest.mark.parametrize("prefill", MODES)
@pytest.mark.parametrize("decode", MODES)
def test_every_arm_generates_what_transformers_does(model, lab, decode, prefill):
    """Seven requests, four at a time: prompts in chunks of a common budget, across the window and beyond."""
    lab.captures.decode, lab.captures.prefill = decode, prefill
    result = lab.generate(model().prompts, LIMITS)
    assert result.tokens == model().tokens(LIMITS)
    assert max(result.timings.prefill_tokens) == BUDGET and sum(result.timings.prefill_tokens) == sum(LENGTHS)
    assert result.coverage.share == (decode != "eager")
    told = {
        "eager": {"BACKEND_EAGER"},
        "breakable": {"WASTE_CEILING"},
        "full": {"WASTE_CEILING", "MORE_KEYS"},
    }
    assert set(result.prefill.reasons) <= told[prefill]
    assert (result.prefill.captured > 0) == (prefill != "eager")
    assert settled(lab.engine)


@pytest.mark.parametrize("mix", sorted(set(MIXES) - {"alternating"}))
@pytest.mark.parametrize("mixed", [False, True], ids=["apart", "mixed"])
def test_any_mix_of_layers_and_mixed_batches_generate_what_transformers_does(model, mix, mixed):
    with model(mix).open(mixed=mixed) as lab:
        lab.captures.prefill = "full"
        assert lab.generate(model(mix).prompts, LIMITS).tokens == model(mix).tokens(LIMITS)
        assert settled(lab.engine)


@pytest.mark.parametrize("mixed", [False, True], ids=["apart", "mixed"])
@pytest.mark.parametrize("mode", MODES)
def test_b25_with_nan_in_every_page_that_was_given_back_requests_that_gave_way_end_with_the_same_tokens(
    model, mode, mixed
):
    """A cache too small for what runs at a time; after every step all that nobody holds is spoilt."""
    with model().open(cache_tokens=13 * PAGE, mixed=mixed) as lab:
        lab.captures.decode = lab.captures.prefill = mode
        requests = [Request(i, prompt, LONGEST) for i, prompt in enumerate(model().prompts)]
        engine, memory, dropped = lab.engine, lab.engine.scheduler.memory, 0
        for request in requests:
            engine.submit(request)
        while not engine.idle:
            engine.step()
            engine.scheduler.check_invariants()
            dropped += sum(request.window_pages.count(0) for request in engine.scheduler.running)
            held = {engine.kv.full: memory.pages._free, engine.kv.sliding: memory.window_pages}
            for pool, books in held.items():
                free = torch.tensor(sorted(set(range(books.total + 1)) - books.used))
                for cache in (pool.keys, pool.values):
                    cache.unflatten(1, (-1, PAGE))[:, free] = float("nan")
        assert [request.output for request in requests] == model().tokens([LONGEST] * len(requests))
        assert sum(request.preemptions for request in requests) > 0 and dropped > 50 and settled(engine)


def test_the_window_pool_holds_little_more_than_windows_and_nobody_waits_for_it(model, lab):
    kv, memory = lab.engine.kv, lab.engine.scheduler.memory
    assert [kv.pool(layer) is kv.sliding for layer in range(4)] == [True, False, True, False]
    assert 3 * memory.window_pages.total < memory.pages.total
    assert kv.sliding.keys.shape[1] == (memory.window_pages.total + 1) * PAGE
    requests = [Request(i, list(model().prompts[6]), 150) for i in range(4)]
    list(lab.stream(requests))
    assert not any(request.preemptions for request in requests) and settled(lab.engine)
    with cglab.open("pico-gqa", device="cpu", max_batch=1, max_context=32) as plain:
        assert plain.engine.kv.sliding is None and plain.engine.scheduler.memory.window_pages.total == 0
        assert plain.prefix_reuse_reason is None and "prefix" not in repr(plain)


def test_there_is_no_prefix_reuse_and_the_user_is_told_why(model, lab):
    lab.captures.decode = lab.captures.prefill = "eager"
    first, again = (lab.generate([model().prompts[5]], 3) for _ in range(2))
    assert first.tokens == again.tokens and first.timings.prefill_tokens == again.timings.prefill_tokens
    assert lab.prefix_reuse_reason == (
        f"sliding-window layers keep only the last {WINDOW} tokens, so a cached prefix would lack their keys and "
        "values"
    )
    assert f"no prefix reuse: {lab.prefix_reuse_reason}" in repr(lab)
    with pytest.raises(InputError, match=r"32 of them cached.*sliding-window layers keep only"):
        lab.compare("prefill", ("eager", "breakable"), tokens=8, cached=32)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("decode", {"batch": 3, "context": 60}), ("prefill", {"tokens": 24, "requests": 2})],
)
def test_steps_are_compared_as_those_of_other_models(lab, name, sizes):
    compared = lab.compare(name, MODES, repeats=1, **sizes)
    assert {arm: parity.verdict for arm, parity in compared.parity.items()} == {
        "breakable": "bitwise",
        "full": "bitwise",
    }


@pytest.mark.parametrize("size", ["max_batch", "max_context", "token_budget", "cache_tokens"])
@pytest.mark.parametrize("value", [0, -16, 2.5])
def test_sizes_that_make_no_sense_are_told_before_a_weight_is_loaded(model, monkeypatch, size, value):
    monkeypatch.setattr(facade, "load_model", lambda *args, **options: pytest.fail("weights were loaded"))
    with pytest.raises(InputError, match=f"{size} must be a whole number from 1 to 100,000,000, got {value}"):
        model().open(**{size: value})


def test_the_floor_of_a_step_counts_a_window_once_the_context_outgrows_it(lab):
    def floor(context, **fields):
        config = replace(lab.config, **fields)
        model = random_model(config, device="cpu", dtype=torch.float32)
        return bytes_read(model, config, DecodeStep(3, context, {}))

    token = (
        2 * 2 * 16 * 4 * 3
    )  # bytes of a layer: keys and values of two heads of 16 in float32, three requests
    assert floor(WINDOW) == floor(WINDOW, sliding_window=None, window_layers=())
    assert floor(50) - floor(WINDOW) == (50 - WINDOW) * 2 * token, "two of four layers"
    assert floor(50, window_layers=(0, 1, 2, 3)) == floor(WINDOW)
