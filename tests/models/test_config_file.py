"""What is written is read back as the same shape, by the lab and by transformers."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.models.config import Llama3Scaling, ModelConfig
from cglab.models.config_file import as_config_json
from cglab.models.presets import PRESETS

SHAPE = ModelConfig("Qwen3ForCausalLM", 512, 64, 128, 4, 4, 2, 16, 256, qk_norm=True)


def read_back(config, folder):
    (folder / "config.json").write_text(json.dumps(as_config_json(config)))
    return ModelConfig.from_folder(folder)


@pytest.mark.parametrize("name", PRESETS)
def test_a_published_shape_is_read_back_as_it_was(tmp_path, name):
    assert read_back(PRESETS[name], tmp_path) == PRESETS[name]


@st.composite
def shapes(draw):
    qwen3 = draw(st.booleans())
    groups, kv_heads, layers = draw(st.tuples(*[st.integers(1, 4)] * 3))
    windows = draw(st.sets(st.integers(0, layers - 1))) if qwen3 else set()
    scaling = draw(st.sampled_from([None, Llama3Scaling(8.0, 1.0, 4.0, 64)]))
    return replace(
        SHAPE, architecture="Qwen3ForCausalLM" if qwen3 else "LlamaForCausalLM", qk_norm=qwen3, num_layers=layers,
        num_heads=groups * kv_heads, num_kv_heads=kv_heads, rope_theta=draw(st.sampled_from([1e4, 5e5])),
        rope_scaling=scaling, tie_embeddings=draw(st.booleans()), attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()), window_layers=tuple(sorted(windows)), sliding_window=8 if windows else None,
        bos_token_id=draw(st.sampled_from([None, 1])), eos_token_ids=draw(st.sampled_from([(), (2,), (2, 3)])),
    )  # fmt: skip


@given(shapes())
def test_any_shape_is_read_back_as_it_was(tmp_path_factory, config):
    assert read_back(config, tmp_path_factory.mktemp("shape")) == config


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_reads_the_same_shape(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    config = PRESETS[name]
    assert read_back(config, tmp_path) == config
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.architectures == [config.architecture]
    assert (theirs.hidden_size, theirs.num_hidden_layers, theirs.head_dim) == (
        config.hidden_size, config.num_layers, config.head_dim,
    )  # fmt: skip
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    windows = getattr(theirs, "layer_types", None) or ["full_attention"] * config.num_layers
    assert tuple(i for i, kind in enumerate(windows) if kind == "sliding_attention") == config.window_layers
