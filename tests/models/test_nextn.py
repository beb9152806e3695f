"""The NextN layer against a transformers model of one layer, and over a cache beside its target's."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from cglab.errors import ModelError
from cglab.models.draft_cache import draft_cache
from cglab.models.drafts import find_draft, load_draft
from cglab.models.indexer import KeyRanges
from cglab.models.loading import fill_randomly, random_model
from cglab.models.nextn import ARCHITECTURE, NextN, nextn_config
from cglab.models.sparse import LiveKeys, SparseAttention
from tests.models.conftest import TINY as QWEN
from tests.models.latent import ARMS, TINY, LatentRequests
from tests.models.test_dsa import CLOSE, SMALL


@pytest.fixture
def target():
    return random_model(TINY, device="cpu", dtype=torch.float32, seed=1)


@pytest.fixture
def layer(target):
    made = NextN(nextn_config(TINY), device="cpu", dtype=torch.float32).requires_grad_(requires_grad=False)
    fill_randomly(made, 1, seed=2)
    made.bind(target)
    return made


class Extended(LatentRequests):
    """Requests whose every chunk is followed by the layer's extend, over a cache at the same slots."""

    def __init__(self, layer, *args):
        super().__init__(layer.target, *args)
        self.layer, self.draft = layer, draft_cache(layer.config, self.kv, dtype=torch.float32)

    @torch.no_grad()
    def extend(self, tokens, *, breaks=ARMS["T8 and T9"]):
        """Scores of the token after next at each of the tokens of request 0 but the last, by the target's head."""
        spans, ids, position, slots = self.place({0: tokens[:-1]})
        keys = KeyRanges.of(spans, self.kv.full)
        step = {"out_slots": slots, "index_topk": TINY.index_topk, "breaks": breaks}
        step["keys"] = LiveKeys(keys) if breaks.select else keys
        hidden = self.model(ids, position, SparseAttention(self.kv, **step))
        after = self.layer(tokens[1:], hidden, position, SparseAttention(self.draft, **step))
        return hidden, self.model.logits(after)


@torch.no_grad()
def test_the_layer_is_that_of_transformers_on_joined_inputs(layer):
    from transformers import GlmMoeDsaConfig, GlmMoeDsaModel

    fields = {"num_hidden_layers": 1, "indexer_types": ["full"], "first_k_dense_replace": 0, "index_n_heads": 3,
              "moe_intermediate_size": 24}  # fmt: skip
    oracle = GlmMoeDsaModel(
        GlmMoeDsaConfig(**SMALL | fields, attn_implementation="eager", rms_norm_eps=1e-6)
    ).eval()
    (block,) = layer.blocks
    attention, experts = block.attention, block.feed_forward
    count, hidden, inner = TINY.num_experts, TINY.hidden_size, TINY.expert_size
    down, kv_down = attention.latent_down.weight.split(attention.latents)
    key, gates = attention.indexer.key_gate.weight.split((TINY.index_dim, TINY.index_heads))
    gate, up = experts.shared.gate_up.weight.chunk(2)
    oracle.load_state_dict(
        {
            "norm.weight": layer.norm.weight,
            "layers.0.input_layernorm.weight": block.attention_norm.weight,
            "layers.0.post_attention_layernorm.weight": block.feed_forward_norm.weight,
            **{f"layers.0.self_attn.{name}.weight": tensor for name, tensor in {
                "q_a_proj": down, "kv_a_proj_with_mqa": kv_down, "q_a_layernorm": attention.query_norm.weight,
                "kv_a_layernorm": attention.latent_norm.weight, "q_b_proj": attention.query_up.weight,
                "kv_b_proj": attention.latent_up.weight, "o_proj": attention.output.weight,
                "indexer.wq_b": attention.indexer.query.weight, "indexer.wk": key, "indexer.weights_proj": gates,
                "indexer.k_norm": attention.indexer.key_norm.weight,
            }.items()},
            "layers.0.self_attn.indexer.k_norm.bias": attention.indexer.key_norm.bias,
            "layers.0.mlp.gate.weight": experts.router.weight,
            "layers.0.mlp.gate.e_score_correction_bias": experts.router.bias,
            "layers.0.mlp.experts.gate_up_proj": experts.gate_up.view(count, 2 * inner, hidden),
            "layers.0.mlp.experts.down_proj": experts.down.view(count, hidden, inner),
            "layers.0.mlp.shared_experts.gate_proj.weight": gate,
            "layers.0.mlp.shared_experts.up_proj.weight": up,
            "layers.0.mlp.shared_experts.down_proj.weight": experts.shared.down.weight,
        },
        strict=False,
    )  # fmt: skip
    requests = Extended(layer, 1, 24)
    tokens = torch.randint(0, 97, (7,))  # every key is kept: of equal scores transformers keeps any
    before, scores = requests.extend(tokens)
    norms = (
        torch.nn.functional.rms_norm(part, (hidden,), norm.weight, TINY.rms_norm_eps)
        for part, norm in (
            (requests.model.embedding(tokens[1:]), layer.embedding_norm), (before, layer.hidden_norm),
        )
    )  # fmt: skip
    joined = torch.cat(tuple(norms), dim=-1) @ layer.join.weight.T
    expected = oracle(inputs_embeds=joined.unsqueeze(0)).last_hidden_state[0]
    torch.testing.assert_close(scores, requests.model.logits(expected), **CLOSE)


@pytest.mark.parametrize("arm", ARMS)
def test_extending_chunk_by_chunk_equals_extending_the_whole_prompt(layer, arm):
    tokens = torch.randint(0, 97, (20,))
    _, whole = Extended(layer, 1, 24).extend(tokens)
    requests = Extended(layer, 1, 24)
    chunks = [
        requests.extend(tokens[first : last + 1], breaks=ARMS[arm])[1]
        for first, last in ((0, 8), (8, 9), (9, 19))
    ]
    torch.testing.assert_close(torch.cat(chunks), whole, **CLOSE)


def test_its_cache_has_one_layer_at_the_slots_of_the_target(layer):
    requests = Extended(layer, 1, 24)
    requests.extend(torch.randint(0, 97, (9,)))
    written, drafted = (kv.full.keys.flatten(2).any(-1).any(0) for kv in (requests.kv, requests.draft))
    assert written.equal(drafted) and written.sum() == 8
    assert requests.draft.full.keys.shape == (1, *requests.kv.full.keys.shape[1:])
    assert requests.draft.full.page_table is requests.kv.full.page_table


@pytest.fixture
def folder(layer, tmp_path):
    """A function that writes the layer's folder, with fields of its configuration replaced."""

    def write(**changed):
        tensors = {name: parameter.contiguous() for name, parameter in layer.named_parameters()}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        fields = {
            **SMALL, "architectures": [ARCHITECTURE], "num_hidden_layers": 1, "first_k_dense_replace": 0,
            "indexer_types": ["full"], "index_n_heads": 3, "moe_intermediate_size": 24, "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 1e4}, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(fields | changed))
        return tmp_path

    return write


def test_a_folder_gives_the_layer_back(layer, target, folder):
    loaded = load_draft(folder(), target)
    assert loaded.weights == "trained" and isinstance(loaded.model, NextN)
    assert loaded.config == replace(layer.config, eos_token_ids=(0,))
    for name, parameter in loaded.model.named_parameters():
        assert parameter.equal(dict(layer.named_parameters())[name])
    assert loaded.model.blocks[0].feed_forward.router.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"num_hidden_layers": 2, "indexer_types": None}, "num_hidden_layers is 2 and 0 of them dense"),
        ({"first_k_dense_replace": 1}, "num_hidden_layers is 1 and 1 of them dense"),
        ({"hidden_size": 48}, "hidden_size is 48, the target's 32"),
        ({"moe_intermediate_size": 32}, "shape"),
    ],
)
def test_what_is_no_layer_of_the_target_is_refused(target, folder, changed, told):
    with pytest.raises(ModelError, match=told):
        load_draft(folder(**changed), target)


def test_a_layer_needs_a_target_with_latent_attention():
    free = NextN(nextn_config(TINY), device="meta")
    with pytest.raises(ModelError, match="bound to no target"):
        free.target  # noqa: B018
    with pytest.raises(ModelError, match="not for Qwen3ForCausalLM"):
        free.bind(random_model(QWEN, device="cpu", dtype=torch.float32))


def test_a_random_layer_of_the_preset_is_one_of_its_target():
    config = find_draft("dsa-24-nextn").config
    assert (config.num_layers, config.dense_layers, config.hidden_size) == (1, 0, 4096)
