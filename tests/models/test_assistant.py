"""The frozen-KV assistant: what it reads of its target, what it refuses, and that no form of it writes."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from cglab.errors import InputError, ModelError
from cglab.models.assistant import Assistant, AssistantConfig, FrozenAttention, bound_layers, turns
from cglab.models.attention import DecodeAttention
from cglab.models.config import ModelConfig
from cglab.models.drafts import DRAFT_PRESETS, DraftSource, find_draft, load_draft
from cglab.models.kv import PagedKV
from cglab.models.loading import random_model

TARGET = ModelConfig(
    "Qwen3ForCausalLM", vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=64, qk_norm=True, tie_embeddings=True, sliding_window=6, window_layers=(0, 2),
)  # fmt: skip
DRAFT = AssistantConfig(50, 32, 24, 40, ("sliding", "full"), num_heads=6, num_kv_heads=2, head_dim=8)
FULL = replace(TARGET, sliding_window=None, window_layers=())


class Pair:
    """A target with a filled cache of two requests, and an assistant bound to it."""

    def __init__(self, config=TARGET, draft=DRAFT):
        self.target = random_model(config, device="cpu", dtype=torch.float32, seed=0)
        self.draft = load_draft(DraftSource(draft, None), self.target).model
        self.kv = PagedKV(config, pages=13, page_size=4, rows=4, max_context=16, device="cpu", dtype=torch.float32,
                          window_pages=13 if config.sliding_window else None)  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        for pool in self.kv.pools:
            pool.page_table[1:].copy_(1 + torch.arange(12).view(3, 4))
        for cache in self.kv.caches().values():
            cache.normal_(generator=generator)
        self.hidden = torch.randn(2, 32, generator=generator)
        self.rows, self.lens = torch.tensor([1, 3]), torch.tensor([9, 14])

    def step(self, **given):
        attend = FrozenAttention(
            DecodeAttention(self.kv, request_rows=self.rows, seq_lens=self.lens), self.draft.layers
        )
        with torch.no_grad():
            return self.draft(torch.tensor([7, 11]), self.hidden, self.lens - 1, attend, **given)


def test_layers_are_bound_to_the_last_of_their_kind():
    assert bound_layers(DRAFT, TARGET) == (2, 3)
    assert bound_layers(replace(DRAFT, layer_kinds=("full", "full")), FULL) == (3, 3)


@pytest.mark.parametrize(
    ("draft", "target", "fact"),
    [
        (DRAFT, FULL, "asks sliding layers and the target has none"),
        (replace(DRAFT, vocab_size=51), TARGET, "vocab_size is 51, the target's 50"),
        (replace(DRAFT, head_dim=16), TARGET, "head_dim is 16"),
        (replace(DRAFT, num_kv_heads=3), TARGET, "num_kv_heads is 3"),
        (replace(DRAFT, backbone_size=30), TARGET, "backbone_size is 30, the target's hidden_size 32"),
        (
            replace(DRAFT, num_heads=5),
            TARGET,
            "5 query heads cannot share 2 key and value heads",
        ),
    ],
)
def test_a_draft_of_another_target_is_refused_before_a_weight_is_allocated(draft, target, fact):
    model = random_model(target, device="cpu", dtype=torch.float32)
    with pytest.raises(ModelError, match=fact):
        load_draft(DraftSource(draft, None), model)


def test_an_unbound_assistant_says_so():
    with pytest.raises(ModelError, match="bound to no target"):
        _ = Assistant(DRAFT).target


def test_p85_embedding_and_head_are_the_targets_own_and_no_copies():
    pair = Pair()
    assert not any("embedding" in name for name, _ in pair.draft.named_parameters())
    before = pair.step()[0]
    pair.target.embedding.weight.data.mul_(2)  # the head too, as they are tied
    assert not torch.allclose(before, pair.step()[0])


def test_a_step_is_what_its_formulas_say_and_writes_nothing():
    """Spelt out for one full layer: dense attention over the first ``seq_len`` keys of the target's last layer."""
    pair = Pair(FULL, replace(DRAFT, layer_kinds=("full",)))
    caches = {name: cache.clone() for name, cache in pair.kv.caches().items()}
    logits, after = pair.step()
    assert all(torch.equal(cache, caches[name]) for name, cache in pair.kv.caches().items())
    draft, (block,), config = pair.draft, pair.draft.blocks, pair.draft.config
    for row in range(2):
        token, length = (7, 11)[row], int(pair.lens[row])
        embedded = pair.target.embedding.weight[token] * 32**0.5
        state = draft.pre(torch.cat([embedded, pair.hidden[row]]))
        query = block.attention.query(block.attention_norm(state)).view(config.num_heads, 8)
        query = torch.nn.functional.rms_norm(query, (8,), block.attention.head_norm, 1e-6)
        cosine, sine = pair.target.rotary[length - 1]
        query = query * cosine + query.roll(4, -1) * sine
        slots = pair.kv.full.page_table[pair.rows[row]].repeat_interleave(4) * 4 + torch.arange(16) % 4
        key, value = (
            c[3][slots[:length]].repeat_interleave(3, 1) for c in (pair.kv.full.keys, pair.kv.full.values)
        )
        weights = torch.einsum("hd,phd->hp", query, key).div(8**0.5).softmax(-1)
        state = state + block.attention.output(torch.einsum("hp,phd->hd", weights, value).flatten())
        state = state + block.feed_forward(block.feed_forward_norm(state))
        right = draft.post(draft.norm(state))
        assert torch.allclose(after[row], right, atol=1e-5)
        assert torch.allclose(logits[row], pair.target.embedding.weight @ right, atol=1e-5)


def test_p41_a_draft_sees_the_tokens_in_the_cache_and_not_one_slot_more():
    pair = Pair()
    before = pair.step()
    for pool in pair.kv.pools:
        for row, length in zip(pair.rows.tolist(), pair.lens.tolist(), strict=True):
            position = torch.arange(length, 16)
            pool_slots = pool.page_table[row][position // 4] * 4 + position % 4
            pool.keys[:, pool_slots], pool.values[:, pool_slots] = float("nan"), float("nan")
    assert all(torch.equal(one, other) for one, other in zip(before, pair.step(), strict=True))


def test_a_frozen_step_refuses_to_store():
    pair = Pair()
    step = DecodeAttention(pair.kv, request_rows=pair.rows, seq_lens=pair.lens)
    with pytest.raises(InputError, match="a frozen step stores no keys and values; give out_slots"):
        step.cache(0)


def test_embeddings_may_be_given_and_are_used():
    pair = Pair()
    own = pair.step()
    same = pair.step(embeddings=pair.target.embedding.weight[torch.tensor([7, 11])])
    other = pair.step(embeddings=torch.ones(2, 32))
    assert torch.equal(own[0], same[0]) and not torch.equal(own[0], other[0])


def test_positions_on_several_axes_turn_a_share_of_the_pairs_each():
    table = torch.randn(20, 2, 12)
    same = turns(table, torch.tensor([[3, 5], [3, 5], [3, 5]]))
    assert torch.equal(same, turns(table, torch.tensor([3, 5])))
    (row,) = turns(table, torch.tensor([[3], [4], [5]]))
    for pair in range(6):
        for half in (pair, pair + 6):
            assert torch.equal(row[:, half], table[3 + pair % 3, :, half])


@pytest.fixture
def folder(tmp_path):
    """A complete draft's folder."""
    model = Pair().draft
    save_file(
        {name: tensor.contiguous() for name, tensor in model.named_parameters()},
        tmp_path / "model.safetensors",
    )
    fields = {name: getattr(DRAFT, name) for name in AssistantConfig.__dataclass_fields__}
    fields["layer_kinds"] = list(DRAFT.layer_kinds)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["FrozenKVAssistant"], **fields}))
    return tmp_path


def test_a_folder_opens_as_what_was_saved(folder):
    pair = Pair()
    loaded = load_draft(folder, pair.target)
    assert loaded.config == DRAFT and loaded.weights == "trained"
    for name, tensor in loaded.model.named_parameters():
        assert torch.equal(tensor, dict(pair.draft.named_parameters())[name])


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            "architectures is Qwen3ForCausalLM; supported: FrozenKVAssistant, BlockDraft",
        ),
        ({"layer_kinds": ["full", "sparse"]}, "layer_kinds is sparse; supported: full, sliding"),
        ({"layer_kinds": None}, "layer_kinds is missing, a list with full or sliding"),
        ({"hidden_size": "24"}, "hidden_size is '24', a positive integer"),
        ({"hidden_size": 26}, "has shape .*, config.json asks for"),
        ({"layer_kinds": ["full"]}, "tensors have no place in FrozenKVAssistant"),
        ({"layer_kinds": ["full"] * 3}, "tensors are missing"),
    ],
)
def test_a_damaged_folder_is_told_by_its_fact(folder, change, fact):
    fields = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=fact):
        load_draft(folder, Pair().target)


def test_a_draft_s_weights_that_are_no_numbers_are_told_by_tensor_and_file(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(ModelError, match=rf"model\.safetensors: {re.escape(name)} holds 1 values .* NaN"):
        load_draft(folder, Pair().target)


def test_an_unknown_draft_is_told_with_those_there_are(tmp_path):
    with pytest.raises(ModelError, match=r"no draft 'nobody'.*gemma-31b-like-assistant"):
        find_draft("nobody")
    with pytest.raises(ModelError, match="has no config.json"):
        find_draft(tmp_path)


def test_the_31b_pair_fits_together_and_has_its_published_size():
    config = DRAFT_PRESETS["gemma-31b-like-assistant"]
    target = ModelConfig(
        "Qwen3ForCausalLM", 262144, 5376, 21504, 60, 32, 16, 256, 65536, sliding_window=1024,
        window_layers=tuple(layer for layer in range(60) if layer % 6 != 5),
    )  # fmt: skip
    assert bound_layers(config, target) == (58, 58, 58, 59)
    with torch.device("meta"):
        assert sum(p.numel() for p in Assistant(config, device="meta").parameters()) < 0.5e9
