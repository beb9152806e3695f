"""Sliding-window layers against transformers' own, over a pool that holds no more than the window, the rest NaN."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import cglab
from cglab.errors import InputError
from cglab.models.attention import DecodeAttention
from cglab.models.kv import PagedKV
from cglab.models.loading import load_model

WINDOW, LONGEST = 7, 40
SMALL = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
}
MIXES = {
    "last": {"max_window_layers": 2},
    "alternating": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "all": {"max_window_layers": 0},
    "one wide": {"max_window_layers": 1, "sliding_window": 64},
    "one token": {"max_window_layers": 3, "sliding_window": 1},
}


@pytest.fixture
def pair(tmp_path):
    """A function that makes a transformers model with windows, and ours from its folder."""
    import transformers

    def make(mix):
        config = transformers.Qwen3Config(**SMALL | MIXES[mix], attn_implementation="eager")
        theirs = transformers.Qwen3ForCausalLM(config).eval()
        for name, parameter in theirs.named_parameters():
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
        theirs.save_pretrained(tmp_path)
        ours = load_model(tmp_path, device="cpu", dtype=torch.float32).model
        kinds = [
            "sliding_attention" if i in ours.config.window_layers else "full_attention" for i in range(4)
        ]
        assert kinds == config.layer_types
        return theirs, ours

    return make


@pytest.mark.parametrize("mix", MIXES)
@torch.no_grad()
def test_many_tokens_at_once_equal_transformers(mix, pair, whole):
    theirs, ours = pair(mix)
    for length in (3, WINDOW, LONGEST):
        ids = torch.randint(0, 300, (length,))
        expected = theirs(ids.unsqueeze(0)).logits[0]
        torch.testing.assert_close(ours.logits(whole(ours, ids)), expected, rtol=0, atol=1e-4)
    without = replace(ours.config, sliding_window=None, window_layers=())
    ours.config = without
    far = (ours.logits(whole(ours, ids)) - expected).abs().max() > 0.1
    assert far == (mix != "one wide"), "whether the window matters at this length"


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("mix", MIXES)
@torch.no_grad()
def test_b25_decode_over_a_pool_of_nothing_but_the_window_equals_transformers(mix, width, pair, paged):
    """From the first token on, past where pages are dropped; whatever no query sees is NaN, in both pools."""
    theirs, ours = pair(mix)
    lengths = [LONGEST, 2 * LONGEST // 3, 5]
    tokens = [torch.randint(0, 300, (length // width * width,)) for length in lengths]
    expected = [theirs(ids.unsqueeze(0)).logits[0] for ids in tokens]
    runner = paged(ours, 3, LONGEST, widest=width)
    for cache in runner.kv.caches().values():
        cache.fill_(float("nan"))
    got = [[] for _ in tokens]
    for start in range(0, LONGEST, width):
        batch = {i: ids[start : start + width] for i, ids in enumerate(tokens) if start + width <= len(ids)}
        if batch:
            rows = ours.logits(runner.decode(batch, padding=2, width=width))
            for request, part in zip(batch, rows.split(width), strict=False):
                got[request].append(part)
    for rows, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.cat(rows), wanted, rtol=0, atol=1e-4)
    window = ours.config.sliding_window
    pages = -(-(window + width - 2) // 4) + 1
    assert runner.kv.sliding.keys.shape[:2] == (len(ours.config.window_layers), 4 * (1 + 3 * pages))
    assert runner.kv.full.keys.shape[0] == 4 - len(ours.config.window_layers)
    if window == WINDOW:
        assert not runner.kv.sliding.page_table[1, 0] and runner.kv.sliding.page_table[1].any(), (
            "dropped pages"
        )


@pytest.mark.parametrize("mix", MIXES)
@torch.no_grad()
def test_b25_prompts_in_chunks_over_a_pool_of_nothing_but_the_window_equal_transformers(mix, pair, paged):
    """Chunks of two requests, shorter and longer than the window, with decode steps in between."""
    theirs, ours = pair(mix)
    tokens = [torch.randint(0, 300, (length,)) for length in (30, 21)]
    runner = paged(ours, 2, LONGEST, widest=9)
    for cache in runner.kv.caches().values():
        cache.fill_(float("nan"))
    got, done = [[], []], [0, 0]
    for step in ((5, 2), (9, 9), (1, 1), (8, 3), (1, 1), (6, 5)):
        chunks = {i: ids[done[i] : done[i] + n] for i, (ids, n) in enumerate(zip(tokens, step, strict=True))}
        run = runner.decode if step == (1, 1) else runner.prefill
        for request, part in enumerate(ours.logits(run(chunks)).split(step)):
            got[request].append(part)
            done[request] += len(part)
    assert done == [30, 21]
    for rows, ids in zip(got, tokens, strict=True):
        torch.testing.assert_close(torch.cat(rows), theirs(ids.unsqueeze(0)).logits[0], rtol=0, atol=1e-4)


def test_a_window_layer_reads_the_window_and_not_the_context(tiny, paged):
    """Whole pages of positions, as few as hold the window: the gather is what a window saves."""
    for window, width, read in ((6, 1, 8), (8, 1, 8), (8, 2, 12), (64, 1, 24)):
        runner = paged(tiny(sliding_window=window, window_layers=(1,)), 2, 24, widest=width)
        inputs = runner.decode_inputs({0: [1] * width, 1: [2] * width}, width=width)
        attend = DecodeAttention(
            runner.kv, width=width, out_slots=inputs["out_slots"], window_out_slots=inputs["window_out_slots"],
            request_rows=inputs["rows"], seq_lens=inputs["lens"],
        )  # fmt: skip
        full, windowed = (attend._steps[pool] for pool in runner.kv.pools)
        assert full.slots.shape == (2, 24) and windowed.slots.shape == (2, read)
        assert windowed.mask.shape[-1] == read


def test_a_full_layer_records_the_same_operations_beside_window_layers(tiny, paged):
    def operations(**windows):
        runner = paged(tiny(num_layers=2, **windows), 2, 24)
        inputs = runner.decode_inputs({0: [1], 1: [2]})
        slots = {name: cglab.Slot(pad=int(name == "lens")) for name in inputs}
        how = {"backend": "full", "inline_breaks": True, "strict": True}
        with cglab.capture(lambda **given: runner.step(given), slots=slots, buckets=(2,), **how) as captured:
            captured(**inputs)
            return Counter(captured.inspect(2))

    none, one, every = (
        operations(),
        *(operations(sliding_window=6, window_layers=w) for w in ((1,), (0, 1))),
    )
    for more, fewer in ((one, none), (every, none), (one, every)):
        extra = more - fewer
        assert not fewer - more and 0 < extra.total() < 20, "what a pool costs a step"
        assert not extra.keys() & {"aten::mm", "aten::index_copy_"}, "layers cost what they did"


def test_pools_are_found_by_layer_and_slots_are_needed_for_each(tiny, paged):
    runner = paged(tiny(num_layers=3, sliding_window=6, window_layers=(0, 2)), 2, 24)
    kv = runner.kv
    assert [kv.pool(layer) is kv.sliding for layer in range(3)] == [True, False, True]
    assert (
        kv.full.keys is kv.full.keys
        and kv.full.values is kv.full.values
        and kv.full.page_table is kv.full.page_table
    )
    assert set(kv.watched()) == {
        f"kv.{name}"
        for pool in ("", "sliding.")
        for name in (pool + "keys", pool + "values", pool + "page_table")
    }
    assert all(get() is not None for get in kv.watched().values())
    inputs = runner.decode_inputs({0: [1]})
    window_slots = inputs.pop("window_out_slots")
    with pytest.raises(InputError, match="has 2 pools and slots are given for 1: give window_out_slots"):
        runner.step(inputs)
    plain = paged(tiny(), 1, 24)
    with pytest.raises(InputError, match="has 1 pools and slots are given for 2"):
        plain.step({**plain.decode_inputs({0: [1]}), "window_out_slots": window_slots})


def test_window_pages_are_for_models_with_window_layers(tiny):
    sizes = {"pages": 3, "page_size": 4, "rows": 2, "max_context": 9, "device": "cpu", "dtype": torch.float32}
    windowed = replace(tiny().config, sliding_window=6, window_layers=(1,))
    for config, pages in ((windowed, None), (tiny().config, 4)):
        with pytest.raises(
            InputError, match="give window_pages for a model with window layers, and for no other"
        ):
            PagedKV(config, window_pages=pages, **sizes)
    with pytest.raises(InputError, match="1 window pages leave none beside the reserved one"):
        PagedKV(windowed, window_pages=1, **sizes)
    kv = PagedKV(windowed, window_pages=5, **sizes)
    assert kv.sliding.keys.shape == (1, 20, 2, 16) and kv.sliding.page_table.shape == kv.full.page_table.shape
