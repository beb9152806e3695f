"""Configurations and checkpoints with latent attention: what is read, and what is refused with the field's name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from cglab.errors import ModelError, ToggleError
from cglab.models.body import Portable
from cglab.models.config import ModelConfig
from cglab.models.dsa import DsaDecoder, dsa_layout
from cglab.models.dsa_config import ARCHITECTURE, DSA_PRESETS, DsaConfig
from cglab.models.experts import RoutedExperts
from cglab.models.kv import PagedKV
from cglab.models.loading import find_model, load_model, random_model
from cglab.models.ops import check_ops, use_ops
from cglab.models.sources import find_folder
from tests.models.latent import TINY
from tests.models.test_dsa import SMALL, theirs

FIELDS = {
    "architectures": [ARCHITECTURE], **SMALL, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e4},
    "n_shared_experts": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A function that writes ``config.json`` with fields replaced, and gives its folder."""

    def write(**fields):
        (tmp_path / "config.json").write_text(json.dumps(FIELDS | fields))
        return tmp_path

    return write


def test_the_shape_is_that_of_the_file(folder):
    config = DsaConfig.from_folder(folder())
    assert (config.head_dim, config.num_kv_heads, config.query_dim) == (8, 1, 20)
    assert (config.key_shape, config.value_shape) == ((1, 24), (1, 16))
    assert (config.shared_layers, config.dense_layers) == ((2,), 1)
    assert (config.rms_norm_eps, config.rope_theta, config.routed_scale) == (1e-5, 1e4, 2.5)
    assert find_model(folder()).config == config


def test_layers_may_be_listed_or_counted(folder):
    listed = {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "indexer_types": None}
    config = DsaConfig.from_folder(folder(**listed, first_k_dense_replace=None))
    assert (config.shared_layers, config.dense_layers) == ((), 2)
    assert DsaConfig.from_folder(folder(first_k_dense_replace=9)).dense_layers == 4


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"n_group": 2}, "n_group is 2; supported: 1"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"scoring_func": "softmax"}, "scoring_func is softmax; supported: sigmoid"),
        ({"topk_method": "greedy"}, "topk_method is greedy; supported: noaux_tc"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2; supported: 1"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave is False"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; supported: 4"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is yarn"),
        ({"indexer_types": ["full"] * 3}, "indexer_types is .* one for each layer"),
        (
            {"indexer_types": ["full", "none", "full", "full"]},
            "indexer_types is none; supported: full, shared",
        ),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "layer 0 has no layer before it"),
        ({"indexer_types": None, "index_topk_freq": 4}, "index_topk_freq without indexer_types is 4"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "dense layers before all sparse"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"index_head_dim": 4}, "index_head_dim 4 has no room for the 8"),
        ({"num_experts_per_tok": 9}, "9 experts a token of 8"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures is LlamaForCausalLM"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(folder, fields, told):
    with pytest.raises(ModelError, match=told):
        DsaConfig.from_folder(folder(**fields))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder that transformers wrote."""
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("gone", ["self_attn.indexer.wk.weight", "mlp.experts.7.up_proj.weight"])
def test_a_checkpoint_without_a_tensor_is_refused(checkpoint, tmp_path, gone):
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors[f"model.layers.3.{gone}"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with pytest.raises(ModelError, match=f"1 of {len(tensors) + 1} tensors are missing: .*{gone}"):
        load_model(tmp_path, device="cpu", dtype=torch.float32)


def test_the_layout_covers_every_parameter_once():
    parameters = dict(DsaDecoder(TINY, device="meta", dtype=torch.float32).named_parameters())
    filled = dict.fromkeys(parameters, 0)
    for piece in dsa_layout(TINY).values():
        rows = piece.of(parameters[piece.parameter])
        assert tuple(rows.shape) == piece.shape and filled[piece.parameter] >= piece.start
        filled[piece.parameter] += piece.rows
    assert filled == {name: len(parameter) for name, parameter in parameters.items()}


def test_random_weights_keep_the_size_of_the_stream():
    model = random_model(TINY, device="cpu", dtype=torch.bfloat16, seed=3)
    assert isinstance(model, DsaDecoder)
    router, indexer = model.blocks[3].feed_forward.router, model.blocks[3].attention.indexer
    assert (router.bias == 0).all() and router.weight.dtype == torch.float32
    assert (indexer.key_norm.weight == 1).all() and (indexer.key_norm.bias == 0).all()
    into_stream = model.blocks[3].feed_forward.down.float()
    torch.testing.assert_close(into_stream.std(), torch.tensor((24 * 8) ** -0.5), rtol=0.1, atol=0)


def test_dsa_24_is_the_stack_of_the_design():
    config = DSA_PRESETS["dsa-24"]
    with torch.device("meta"):
        model = DsaDecoder(config, device="meta", dtype=torch.bfloat16)
    assert {block.attention.latent_up.weight.shape for block in model.blocks} == {(64 * 256, 512)}
    assert [isinstance(block.feed_forward, RoutedExperts) for block in model.blocks] == [False] * 3 + [
        True
    ] * 21
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(29.3, abs=0.1)
    assert find_model("dsa-24").config is config
    with pytest.raises(ModelError, match=r"dsa-24\), no local folder"):
        find_folder("dsa 24")


def test_a_compiled_form_is_refused_and_the_portable_one_taken():
    model = random_model(TINY, device="cpu", dtype=torch.float32)
    kv = PagedKV(TINY, pages=2, rows=2, max_context=16, device="cpu", dtype=torch.float32)
    use_ops("portable", model, kv)
    with pytest.raises(ToggleError, match="no form for latent attention; good: portable"):
        use_ops("compiled", model, kv)
    assert isinstance(model.body, Portable)


def test_an_unknown_architecture_is_told_all_that_are_known(folder):
    with pytest.raises(ModelError, match=f"supported: Qwen3ForCausalLM, LlamaForCausalLM, {ARCHITECTURE}"):
        find_model(folder(architectures=["MambaForCausalLM"]))


def test_a_form_of_latent_attention_is_the_portable_one_on_any_device():
    for device in ("cpu", "cuda"):
        assert check_ops(None, torch.device(device), TINY) == "portable"
    with pytest.raises(ToggleError, match="no form for latent attention; good: portable"):
        check_ops("compiled", torch.device("cuda"), TINY)
    assert not isinstance(find_model("pico-gqa").config, DsaConfig)
    assert isinstance(find_model("pico-gqa").config, ModelConfig)
