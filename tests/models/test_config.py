import json
from dataclasses import replace

import pytest
import torch

from cglab.errors import ModelError
from cglab.models.assistant import bound_layers
from cglab.models.config import Llama3Scaling, ModelConfig
from cglab.models.decoder import Decoder
from cglab.models.drafts import DRAFT_PRESETS
from cglab.models.presets import PRESETS

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def read(tmp_path):
    """A function that writes config.json (and generation_config.json) and reads the folder."""

    def read(content, generation=None):
        (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return ModelConfig.from_folder(tmp_path)

    return read


def test_what_a_llama_leaves_out_has_its_defaults(read):
    config = read(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.group) == (4, 16, 1)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-6, 10000.0, None)
    assert not config.qk_norm and not config.tie_embeddings and config.eos_token_ids == ()


def test_what_a_qwen3_leaves_out_has_its_defaults(read):
    config = read(LLAMA | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2})
    assert config.qk_norm and (config.head_dim, config.group) == (128, 2)


@pytest.mark.parametrize(
    "rotary",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 500000.0}},
        {"rope_theta": 500000, "rope_scaling": LLAMA3 | {"type": "llama3"}, "rope_parameters": None},
    ],
)
def test_the_rotary_settings_are_read_in_old_and_new_form(read, rotary):
    config = read(LLAMA | rotary)
    assert config.rope_theta == 500000.0 and config.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


def test_end_tokens_are_those_that_generation_uses(read):
    assert read(LLAMA | {"eos_token_id": 2}).eos_token_ids == (2,)
    assert read(LLAMA | {"eos_token_id": 2, "bos_token_id": 1}).bos_token_id == 1
    assert read(LLAMA | {"eos_token_id": 2}, {"eos_token_id": [2, 5]}).eos_token_ids == (2, 5)


QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
SLIDING = {"use_sliding_window": True, "sliding_window": 64}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": 64},
        {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
        SLIDING,
        SLIDING | {"max_window_layers": 0},
        SLIDING | {"max_window_layers": 2},
        SLIDING | {"max_window_layers": 3},
        SLIDING | {"max_window_layers": 3, "layer_types": MIXED},
        SLIDING | {"layer_types": ["full_attention"] * 3},
        {"layer_types": ["full_attention"] * 3},
    ],
    ids=str,
)
def test_windows_are_read_as_transformers_reads_them(read, fields):
    from transformers import Qwen3Config

    ours, theirs = read(QWEN3 | fields), Qwen3Config(num_hidden_layers=3, **fields)
    windowed = tuple(i for i, kind in enumerate(theirs.layer_types) if kind == "sliding_attention")
    assert ours.window_layers == windowed
    assert ours.sliding_window == (theirs.sliding_window if windowed else None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": MIXED},
            "layer_types without use_sliding_window is sliding_attention; supported: full",
        ),
        (
            SLIDING | {"sliding_window": None, "layer_types": MIXED},
            "without use_sliding_window is sliding_attention",
        ),
        (
            SLIDING | {"layer_types": ["chunked_attention"] * 3},
            "layer_types is chunked_attention; supported: full_attention, sliding_attention",
        ),
        (
            SLIDING | {"layer_types": MIXED[:2]},
            r"layer_types is \[.*\], a list of 3, one for each layer, is expected",
        ),
        (SLIDING | {"layer_types": "full_attention"}, "layer_types is 'full_attention', a list of names"),
        (SLIDING | {"layer_types": [1, 2, 3]}, r"layer_types is \[1, 2, 3\], a list of names"),
        (SLIDING | {"sliding_window": 0, "max_window_layers": 1}, "sliding_window is 0, a positive integer"),
        (SLIDING | {"max_window_layers": -1}, "max_window_layers is -1, an integer from 0"),
        (SLIDING | {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, an integer up to 1000"),
    ],
)
def test_windows_that_no_layer_computes_are_told(read, change, message):
    with pytest.raises(ModelError, match=message):
        read(QWEN3 | change)


@pytest.mark.parametrize(
    ("window", "layers"),
    [(None, (1,)), (64, ()), (0, (1,)), (64, (3,)), (64, (-1,)), (64, (2, 1)), (64, (1, 1))],
)
def test_a_window_and_its_layers_belong_together(read, window, layers):
    with pytest.raises(ModelError, match=rf"a sliding window of {window} in layers .* of 3: give"):
        replace(read(LLAMA), sliding_window=window, window_layers=layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures is GPT2LMHeadModel; supported: Qwen3ForCausalLM, Llama",
        ),
        ({"architectures": None}, "architectures is missing; supported: Qwen3ForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu; supported: silu"),
        ({"use_sliding_window": True}, "use_sliding_window is True; supported: False"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4}},
            "rope_type is yarn; supported: default, llama3",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 4}},
            "low_freq_factor is missing, a positive number",
        ),
        ({"rope_scaling": "yes"}, "rope_scaling is 'yes', an object is expected"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            r"partial_rotary_factor is 0\.5; supported: 1\.0",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\).*open the unquantised model"),
        ({"vocab_size": None}, "vocab_size is missing, a positive integer is expected"),
        ({"hidden_size": "64"}, "hidden_size is '64', a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, a positive integer"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny', a positive number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', a token id or a list"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 key and value heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
    ],
)
def test_what_cannot_be_computed_or_read_is_told(read, change, message):
    with pytest.raises(ModelError, match=message):
        read(LLAMA | change)


def test_files_that_are_no_configuration_are_told(read, tmp_path):
    with pytest.raises(ModelError, match=r"cannot be read as JSON .*fetch the file again"):
        read("{")
    with pytest.raises(ModelError, match="holds a JSON list, an object is expected"):
        read("[]")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_presets_cannot_be_changed_by_accident():
    with pytest.raises(TypeError):
        PRESETS["qwen3-8b"] = None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
def test_a_number_that_no_float_can_hold_is_refused(read, value):
    with pytest.raises(ModelError, match="rms_norm_eps is"):
        read(LLAMA | {"rms_norm_eps": value})


@pytest.mark.parametrize(
    "odd", [{"architectures": {"a": 1}}, {"architectures": 5}, {"quantization_config": "awq"}]
)
def test_a_field_of_another_kind_is_refused_by_name(read, odd):
    with pytest.raises(ModelError, match="supported"):
        read(LLAMA | odd)


def test_a_configuration_nested_beyond_reading_is_refused(read):
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        read("[" * 200_000)


def test_the_gemma_like_shape_has_about_31_billion_weights_and_five_windows_to_one_full_layer():
    config = PRESETS["gemma-31b-like"]
    model = Decoder(config, device="meta", dtype=torch.bfloat16)
    assert 29e9 < sum(parameter.numel() for parameter in model.parameters()) < 32e9
    full = sorted(set(range(config.num_layers)) - set(config.window_layers))
    assert full == list(range(5, 60, 6))
    assert bound_layers(DRAFT_PRESETS["gemma-31b-like-assistant"], config) == (58, 58, 58, 59)
