"""Stages of a decoder: the cut, global layer ids, each stage's own weights and cache, and what passes between them."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cglab.errors import InputError
from cglab.models.compiled import Compiled
from cglab.models.config import ModelConfig
from cglab.models.dense import DenseAttention
from cglab.models.dsa_config import DsaConfig
from cglab.models.indexer import KeyRanges
from cglab.models.kv import PagedKV
from cglab.models.loading import load_model, random_model
from cglab.models.regions import torch_kernels
from cglab.models.spans import LiveSpans, PrefillAttention, Span
from cglab.models.sparse import Breaks, LiveKeys, SparseAttention
from cglab.models.stages import Elsewhere, Proxy, bind, by_global_id, cut

from .latent import TINY

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    "Qwen3ForCausalLM", vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=5, num_heads=4, num_kv_heads=2,
    head_dim=16, max_position=64, qk_norm=True, tie_embeddings=True,
)  # fmt: skip
CONFIGS = {
    "tied": CONFIG,
    "untied": replace(CONFIG, tie_embeddings=False),
    "windows": replace(CONFIG, sliding_window=5, window_layers=(0, 1)),
    "latent": replace(TINY, num_layers=5, shared_layers=(2, 3)),
}
SPANS = [Span(1, 0, 9), Span(2, 0, 1), Span(3, 0, 6)]

configs = pytest.mark.parametrize("name", CONFIGS)
counts = pytest.mark.parametrize("count", [2, 3, 5])


@given(layers=st.integers(1, 200), data=st.data())
def test_a_cut_holds_every_layer_once_in_order_and_evenly(layers, data):
    stages = cut(layers, data.draw(st.integers(1, layers)))
    assert list(chain.from_iterable(stage.layers for stage in stages)) == list(range(layers))
    sizes = [len(stage.layers) for stage in stages]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert [stage.first for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.last for stage in stages] == [False] * (len(stages) - 1) + [True]


@pytest.mark.parametrize(
    ("layers", "stages", "sizes", "told"),
    [
        (4, 0, None, "make 1 to 4 stages, got 0"),
        (4, 5, None, "make 1 to 4 stages, got 5"),
        (4, 2, [4], "give each at least one"),
        (4, 2, [4, 0], "give each at least one"),
        (4, 2, [2, 3], "all of them together"),
    ],
)
def test_a_cut_that_is_none_is_told(layers, stages, sizes, told):
    with pytest.raises(InputError, match=told):
        cut(layers, stages, sizes)
    assert [len(stage.layers) for stage in cut(4, 2, [3, 1])] == [3, 1]


def test_p76_layer_lists_are_indexed_by_global_id_and_conflicts_raise():
    one, other = object(), object()
    assert by_global_id([(3, one), (4, other)], 6) == [None, None, None, one, other, None]
    assert by_global_id([(0, one), (0, one)], 1) == [one], "a loop model names its one layer again"
    for held, told in (
        (((2, one), (2, other)), "two objects"),
        (((6, one),), "0 to 5"),
        (((-1, one),), "0 to 5"),
    ):
        with pytest.raises(InputError, match=told):
            by_global_id(held, 6)


@configs
@counts
def test_p76_a_stage_has_the_weights_of_the_whole_under_the_same_names_and_no_others(name, count):
    whole = dict(random_model(CONFIGS[name], device=CPU, dtype=torch.float32, seed=4).named_parameters())
    seen = []
    for stage in cut(5, count):
        part = random_model(CONFIGS[name], device=CPU, dtype=torch.float32, seed=4, stage=stage)
        held = dict(part.named_parameters())
        assert all(torch.equal(parameter, whole[name]) for name, parameter in held.items())
        assert {int(n.split(".")[1]) for n in held if n.startswith("blocks")} == set(stage.layers)
        assert len(part.blocks) == 5 and sum(isinstance(each, Elsewhere) for each in part.blocks) == 5 - len(
            stage.layers
        )
        seen += held
    twice = ["embedding.weight"] if CONFIGS[name].tie_embeddings else []
    assert sorted(seen) == sorted([*whole, *twice]), "a tied head is the embedding once more"


def test_a_stage_of_a_checkpoint_reads_its_own_tensors():
    whole = load_model("pico-gqa", device=CPU, dtype=torch.float32)
    for stage in cut(whole.config.num_layers, 2):
        part = load_model("pico-gqa", device=CPU, dtype=torch.float32, stage=stage).model
        wanted = dict(whole.model.named_parameters())
        assert all(torch.equal(each, wanted[name]) for name, each in part.named_parameters())
        assert sum(p.numel() for p in part.parameters()) < sum(p.numel() for p in wanted.values())


class Row:
    """Stages in a row over the caches of their own layers, and the whole beside them."""

    def __init__(self, config, count, body=None):
        self.parts, self.caches = [], []
        for stage in (None, *cut(config.num_layers, count)):
            model = random_model(config, device=CPU, dtype=torch.float32, stage=stage)
            kv = PagedKV(config, pages=13, page_size=4, rows=4, max_context=16, device=CPU, dtype=torch.float32,
                         window_pages=13 if config.sliding_window else None, layers=stage and stage.layers)  # fmt: skip
            for pool in kv.pools:
                pool.page_table[1:].copy_(1 + torch.arange(12).view(3, 4))
            if body is not None:
                body.prepare(model, kv)
                model.body = body
            self.parts.append(model)
            self.caches.append(kv)
        positions = [place for span in SPANS for place in range(span.start, span.end)]
        rows = [span.row for span in SPANS for _ in range(span.length)]
        self.positions = torch.tensor(positions)
        self.slots = self.caches[0].full.slots(torch.tensor(rows), self.positions.unsqueeze(1)).flatten()
        self.input_ids = torch.arange(len(positions)) % config.vocab_size

    def attend(self, kv):
        if isinstance(self.parts[0].config, DsaConfig):
            keys = LiveKeys(KeyRanges.of(SPANS, kv.full))
            kept = self.parts[0].config.index_topk
            return SparseAttention(kv, out_slots=self.slots, keys=keys, breaks=Breaks(), index_topk=kept)
        windows = {"window_out_slots": self.slots} if kv.sliding is not None else {}
        return PrefillAttention(kv, out_slots=self.slots, live=LiveSpans(SPANS), **windows)

    @torch.no_grad()
    def run(self):
        """Hidden states of the whole and of the last stage, and what each other stage handed on."""
        whole, *parts = self.parts
        own, *caches = self.caches
        wanted = whole(self.input_ids, self.positions, self.attend(own))
        handed, out = [], None
        for part, kv in zip(parts, caches, strict=True):
            given = {"input_ids": self.input_ids} if part.stage.first else {"proxies": handed[-1]}
            out = part.part(positions=self.positions, attend=self.attend(kv), **given)
            if not part.stage.last:
                handed.append(dict(zip((each.name for each in part.handed), out, strict=True)))
        return wanted, out, handed


@configs
@counts
def test_stages_in_a_row_compute_the_whole_to_the_bit_and_cache_their_own_layers(name, count):
    """One of latent attention takes a selection where its first layer shares one, or hands it through."""
    row = Row(CONFIGS[name], count)
    wanted, got, handed = row.run()
    assert torch.equal(got, wanted)
    shared = getattr(CONFIGS[name], "shared_layers", ())
    for stage, taken in zip(cut(5, count)[1:], handed, strict=True):
        assert list(taken) == ["hidden_states", *["topk_indices"] * (stage.layers.start in shared)]
    whole, *caches = row.caches
    for stage, kv in zip(cut(5, count), caches, strict=True):
        assert sorted(layer for pool in kv.pools for layer in pool.layers) == list(stage.layers)
        for layer in stage.layers:
            ours, theirs = kv.pool(layer).tensors(layer), whole.pool(layer).tensors(layer)
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)) and ours[0].any()


@pytest.mark.slow
def test_the_compiled_form_hands_on_its_residual_too():
    pytest.importorskip("triton", reason="no Triton here: it comes with torch for CUDA")
    row = Row(CONFIG, 2, Compiled(CONFIG, backend="aot_eager", kernels=torch_kernels()))
    wanted, got, handed = row.run()
    assert torch.equal(got, wanted)
    assert [list(each) for each in handed] == [["hidden_states", "residual"]]
    assert row.parts[1].handed == (
        Proxy("hidden_states", (32,), torch.float32), Proxy("residual", (32,), torch.float32)
    )  # fmt: skip


def test_a_selection_is_declared_and_a_dense_step_has_none_to_hand_on():
    config = CONFIGS["latent"]
    first, second = (
        random_model(config, device=CPU, dtype=torch.float32, stage=stage) for stage in cut(5, 2)
    )
    assert first.taken == second.handed == ()
    assert first.handed == second.taken == (
        Proxy("hidden_states", (32,), torch.float32), Proxy("topk_indices", (6,), torch.int32, padding=-1)
    )  # fmt: skip
    kv = PagedKV(
        config, pages=5, page_size=4, rows=2, max_context=16, device=CPU, dtype=torch.float32, layers=range(3)
    )
    ids = torch.arange(3)
    with pytest.raises(InputError, match="a dense step selects nothing; run a sparse one"):
        first.part(
            positions=ids, input_ids=ids, attend=DenseAttention(kv, out_slots=ids + 4, spans=[Span(1, 0, 3)])
        )


def test_p74_p77_proxies_are_bound_by_name_in_any_order_and_markers_are_left():
    declared = Proxy("hidden_states", (4,), torch.float32), Proxy("topk_indices", (2,), torch.int32)
    hidden, indices = torch.ones(3, 4), torch.ones(3, 2, dtype=torch.int32)
    given = {"topk_indices": indices, "a_marker": 7, "hidden_states": hidden}
    bound = bind(declared, given)
    assert list(bound) == ["hidden_states", "topk_indices"]
    assert bound["hidden_states"] is hidden and bound["topk_indices"] is indices
    empty = [proxy.empty(5, CPU) for proxy in declared]
    assert [(tuple(e.shape), e.dtype) for e in empty] == [((5, 4), torch.float32), ((5, 2), torch.int32)]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "needs hidden_states, residual and was handed nothing"),
        ({"hidden_states": torch.ones(3, 4)}, "needs residual and was handed hidden_states"),
        ({"hidden_states": torch.ones(3, 4), "residual": None}, "needs residual"),
        ({"hidden_states": torch.ones(3, 4), "residual": torch.ones(3, 5)}, r"residual is \[3, 5\].*\[tokens, 4\]"),
        ({"hidden_states": torch.ones(3, 4).double(), "residual": torch.ones(3, 4)}, "hidden_states is .*float64"),
    ],
)  # fmt: skip
def test_p74_an_absent_or_unlike_proxy_is_told_by_its_name(given, told):
    with pytest.raises(InputError, match=told):
        bind([Proxy(name, (4,), torch.float32) for name in ("hidden_states", "residual")], given)


def test_what_another_stage_holds_refuses_to_run():
    first = random_model(CONFIG, device=CPU, dtype=torch.float32, stage=cut(5, 2)[0])
    with pytest.raises(InputError, match="layer 4 is held by another stage"):
        first.blocks[4](torch.ones(1))
    with pytest.raises(InputError, match=r"stage 0 of 2 \(layers 0 to 2\) looks tokens up"):
        first.part(positions=torch.zeros(1, dtype=torch.int64), attend=None)
