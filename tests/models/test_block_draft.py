"""The block draft: what it stores of its target's features, what its blocks see, and what it refuses."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from cglab.errors import ModelError
from cglab.models.attention import DecodeAttention
from cglab.models.block_draft import BlockDraft, BlockDraftConfig, spread
from cglab.models.body import Portable, Taps
from cglab.models.config import ModelConfig
from cglab.models.decoder import Decoder
from cglab.models.drafts import DRAFT_PRESETS, DraftSource, find_draft, load_draft
from cglab.models.kv import PagedKV
from cglab.models.loading import fill_randomly, random_model
from cglab.models.presets import PRESETS
from cglab.models.rotary import rotate

TARGET = ModelConfig(
    "Qwen3ForCausalLM", vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=64, qk_norm=True, tie_embeddings=True,
)  # fmt: skip
DRAFT = BlockDraftConfig(50, 32, 40, 2, 4, 2, 8, block_size=4, mask_token_id=49, context_layers=(1, 2))
LENGTHS = (9, 6)


def made(config=DRAFT, target=TARGET):
    model = BlockDraft(config, device="cpu", dtype=torch.float32).eval().requires_grad_(requires_grad=False)
    fill_randomly(model, config.num_layers, seed=2)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.normal_(1.0, 0.1)
    model.bind(random_model(target, device="cpu", dtype=torch.float32, seed=0))
    return model


def cache_of(stack):
    kv = PagedKV(stack, pages=9, page_size=4, rows=3, max_context=16, device="cpu", dtype=torch.float32)
    kv.full.page_table[1:].copy_(torch.randperm(8, generator=torch.Generator().manual_seed(5)).view(2, 4) + 1)
    return kv


def slots_of(kv, row, positions):
    return kv.full.page_table[row][positions // 4] * 4 + positions % 4


@torch.no_grad()
def test_a_block_sees_itself_in_both_directions_and_the_context_before_it():
    """Spelt out densely for each request, from features to hidden states."""
    draft = made()
    kv = cache_of(DRAFT.stack)
    features = [torch.randn(length, 64) for length in LENGTHS]
    for row, given in enumerate(features, 1):
        positions = torch.arange(len(given))
        attend = DecodeAttention(kv, request_rows=torch.tensor([row]), seq_lens=torch.tensor([len(given)]),
                                 out_slots=slots_of(kv, row, positions), width=len(given))  # fmt: skip
        draft.materialise(given, positions, attend)
    ids = torch.tensor([[7, 49, 49, 49], [11, 49, 49, 49]])
    positions = torch.tensor(LENGTHS).unsqueeze(1) + torch.arange(4)
    slots = torch.cat([slots_of(kv, row, positions[row - 1]) for row in (1, 2)])
    attend = DecodeAttention(
        kv, request_rows=torch.tensor([1, 2]), seq_lens=torch.tensor(LENGTHS) + 4, out_slots=slots, width=4,
        tree=torch.ones(2, 4, 4, dtype=torch.bool),
    )  # fmt: skip
    found = draft(ids.flatten(), positions.flatten(), attend).unflatten(0, (2, 4))
    for row, length in enumerate(LENGTHS):
        context = draft.context_norm(draft.fuse(features[row]))
        hidden, table = draft.target.embedding(ids[row]), draft.target.rotary
        for block in draft.blocks:
            attention = block.attention
            normed = block.attention_norm(hidden)
            qkv = attention.qkv(normed).view(4, 8, 8)
            heads = torch.nn.functional.rms_norm(qkv[:, :6], (8,), eps=1e-6) * attention.head_norm
            query, key = rotate(heads, table[length : length + 4]).split((4, 2), 1)
            joint = attention.qkv(context).view(length, 8, 8)
            old = torch.nn.functional.rms_norm(joint[:, 4:6], (8,), eps=1e-6) * attention.head_norm[4:]
            keys = torch.cat([rotate(old, table[:length]), key]).repeat_interleave(2, 1)
            values = torch.cat([joint[:, 6:], qkv[:, 6:]]).repeat_interleave(2, 1)
            weights = torch.einsum("qhd,khd->hqk", query, keys).div(8**0.5).softmax(-1)
            hidden = hidden + attention.output(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
            hidden = hidden + block.feed_forward(block.feed_forward_norm(hidden))
        assert torch.allclose(found[row], draft.norm(hidden), atol=1e-5)


@torch.no_grad()
def test_taps_are_the_residual_stream_after_their_layers():
    target = random_model(TARGET, device="cpu", dtype=torch.float32, seed=0)
    kv = cache_of(TARGET)
    lengths = torch.tensor([1, 1])
    sizes = {"request_rows": torch.tensor([1, 2]), "seq_lens": lengths}
    ids, positions = torch.tensor([3, 4]), lengths - 1
    slots = torch.cat([slots_of(kv, row, positions[:1]) for row in (1, 2)])
    taps = Taps((1, 3))
    hidden = target(ids, positions, DecodeAttention(kv, out_slots=slots, **sizes), taps)
    features = taps.features()
    assert features.shape == (2, 64)
    assert torch.equal(target.norm(features[:, 32:]), hidden)
    shorter = random_model(TARGET, device="cpu", dtype=torch.float32, seed=0)
    shorter.blocks = shorter.blocks[:2]
    shorter.norm = torch.nn.Identity()
    stream = Portable()(shorter, shorter.embedding(ids), shorter.rotary[positions],
                        DecodeAttention(kv, out_slots=slots, **sizes))  # fmt: skip
    assert torch.equal(features[:, :32], stream)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"block_size": 1}, "a block of 1 drafts nothing"),
        ({"mask_token_id": 50}, "mask_token_id 50 is no token of a vocabulary of 50"),
        ({"context_layers": ()}, "context_layers must be ascending"),
        ({"context_layers": (2, 1)}, "context_layers must be ascending"),
    ],
)
def test_a_shape_that_cannot_draft_is_refused(change, fact):
    with pytest.raises(ModelError, match=fact):
        replace(DRAFT, **change)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"vocab_size": 51}, "vocab_size is 51, the target's 50"),
        ({"backbone_size": 16}, "backbone_size is 16, the target's 32"),
        ({"head_dim": 4}, "head_dim is 4, the target's 8"),
        ({"context_layers": (1, 4)}, "reads layer 4, the target has 4"),
    ],
)
def test_a_draft_of_another_target_is_refused(change, fact):
    with pytest.raises(ModelError, match=fact):
        made(replace(DRAFT, **change))


def test_an_unbound_draft_says_so():
    with pytest.raises(ModelError, match="bound to no target"):
        _ = BlockDraft(DRAFT).target


def test_a_folder_reads_as_what_was_written(tmp_path):
    fields = {name: getattr(DRAFT, name) for name in BlockDraftConfig.__dataclass_fields__}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BlockDraft"], **fields}))
    assert BlockDraftConfig.from_folder(tmp_path) == DRAFT
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["FrozenKVAssistant"], **fields}))
    with pytest.raises(ModelError, match="supported: BlockDraft"):
        BlockDraftConfig.from_folder(tmp_path)


def test_a_draft_is_opened_as_the_kind_that_its_configuration_names(tmp_path):
    """Written with random weights, read back, and drafting the same; the architecture alone says which kind it is."""
    target = random_model(TARGET, device="cpu", dtype=torch.float32, seed=0)
    written = load_draft(DraftSource(DRAFT, None), target, seed=3)
    assert written.weights == "random" and written.model.target is target
    fields = {name: getattr(DRAFT, name) for name in BlockDraftConfig.__dataclass_fields__}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BlockDraft"], **fields}))
    save_file(written.model.state_dict(), tmp_path / "model.safetensors")
    read = load_draft(tmp_path, target)
    assert isinstance(read.model, BlockDraft) and read.config == DRAFT and read.weights == "trained"
    pairs = zip(written.model.parameters(), read.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    with pytest.raises(ModelError, match="a FrozenKVAssistant is needed and this draft is a BlockDraft"):
        _ = read.assistant
    with pytest.raises(ModelError, match="open an assistant"):
        _ = find_draft(tmp_path).assistant
    with pytest.raises(ModelError, match="backbone_size is 32, the target's 64"):
        load_draft(tmp_path, random_model(replace(TARGET, hidden_size=64), device="cpu", dtype=torch.float32))


@pytest.mark.parametrize(
    ("target", "draft", "layers"),
    [(36, 5, (1, 9, 17, 25, 33)), (28, 3, (1, 13, 25)), (36, 1, (18,)), (5, 2, (1, 2)), (4, 1, (2,))],
)
def test_context_layers_are_spread_evenly_over_the_target(target, draft, layers):
    assert spread(target, draft) == layers


@pytest.mark.parametrize(("target", "draft"), [(4, 2), (3, 2), (8, 6)])
def test_a_target_with_too_few_layers_to_spread_over_is_refused(target, draft):
    with pytest.raises(ModelError, match=f"a target of {target} layers has no {draft} different ones"):
        spread(target, draft)


def test_the_published_shape_fits_its_target_and_opens_by_name():
    config = find_draft("qwen3-8b-dflash").config
    assert config is DRAFT_PRESETS["qwen3-8b-dflash"] and (config.num_layers, config.block_size) == (5, 8)
    target = Decoder(PRESETS["qwen3-8b"], device="meta", dtype=torch.bfloat16)
    draft = BlockDraft(config, device="meta", dtype=torch.bfloat16)
    draft.bind(target)
    shapes = [[p.shape for p in model.blocks[0].parameters()] for model in (draft, target)]
    assert shapes[0] == shapes[1], "the layers are as wide as the target's"
