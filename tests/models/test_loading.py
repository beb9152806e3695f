"""Opening models: what is read, and that everything else is one clear error that leaves nothing behind."""

import gc
import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from cglab.errors import ModelError
from cglab.models import loading, sources
from cglab.models.checkpoint import check_shards, shard_files
from cglab.models.config import ModelConfig
from cglab.models.layout import checkpoint_layout
from cglab.models.loading import layout_of, load_model

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "eos_token_id": 7,
}


def write_json(path, content):
    path.write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path):
    """A complete model folder with random weights."""
    write_json(tmp_path / "config.json", CONFIG)
    layout = checkpoint_layout(ModelConfig.from_folder(tmp_path))
    save_file(
        {name: torch.randn(piece.shape) for name, piece in layout.items()}, tmp_path / "model.safetensors"
    )
    return tmp_path


@pytest.fixture
def sharded(folder):
    """The same folder with its weights in three shards and an index."""
    tensors = load_file(folder / "model.safetensors")
    weight_map = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(part, folder / file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


def load(folder):
    return load_model(folder, device="cpu", dtype=torch.float32)


def edit(folder, change):
    """Rewrites the weights after a change to the dictionary of tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_folder_gives_model_shape_and_end_tokens(folder):
    loaded = load(folder)
    assert loaded.weights == "trained" and loaded.tokenizer is None
    assert loaded.config.eos_token_ids == (7,)
    tensors = load_file(folder / "model.safetensors")
    assert torch.equal(loaded.model.embedding.weight, tensors["model.embed_tokens.weight"])
    qkv = torch.cat([tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(loaded.model.blocks[1].attention.qkv.weight, qkv)
    assert torch.equal(
        loaded.model.blocks[0].attention.head_norm[3], tensors["model.layers.0.self_attn.q_norm.weight"]
    )
    assert torch.equal(
        loaded.model.blocks[0].attention.head_norm[4], tensors["model.layers.0.self_attn.k_norm.weight"]
    )


def test_shards_give_the_same_model_as_one_file(sharded):
    one = load(sharded).model.state_dict()
    (sharded / "model.safetensors").unlink()
    shards = load(sharded).model.state_dict()
    assert one.keys() == shards.keys() and all(torch.equal(one[name], shards[name]) for name in one)


def test_shards_may_be_links_as_in_a_download_cache(sharded, tmp_path_factory):
    store = tmp_path_factory.mktemp("blobs")
    (sharded / "model.safetensors").unlink()
    for number, shard in enumerate(sorted(sharded.glob("*.safetensors"))):
        blob = shard.rename(store / str(number))
        shard.symlink_to(blob)
    assert load(sharded).weights == "trained"


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/tmp/evil.safetensors", "a/b.safetensors", "..", "a\\b"]
)
def test_an_index_that_leaves_its_folder_is_refused(sharded, name):
    (sharded / "model.safetensors").unlink()
    write_json(sharded / "model.safetensors.index.json", {"weight_map": {"lm_head.weight": name}})
    with pytest.raises(ModelError, match="outside of its folder; only plain file names"):
        load(sharded)


def test_a_missing_shard_is_named(sharded):
    (sharded / "model.safetensors").unlink()
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of 3 shards: model-00002-of-00003\.safetensors"):
        load(sharded)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}])
def test_an_index_without_a_map_is_refused(folder, index):
    (folder / "model.safetensors").unlink()
    write_json(folder / "model.safetensors.index.json", index)
    with pytest.raises(ModelError, match="no weight_map"):
        load(folder)


def test_a_tensor_in_two_shards_is_refused(sharded):
    with pytest.raises(ModelError, match=r"is in model\.safetensors and in model\.safetensors"):
        config = ModelConfig.from_folder(sharded)
        check_shards(
            [sharded / "model.safetensors", *shard_files(sharded)], config, partial(layout_of, config)
        )


@pytest.mark.parametrize("keep", [4, 600, -1])
def test_truncated_safetensors_are_told(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(
        ModelError, match=r"model\.safetensors is truncated or no safetensors file .*fetch the file again"
    ):
        load(folder)


def test_missing_unknown_misshapen_and_quantised_tensors_are_told(folder):
    whole = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    cases = {
        rf"1 of 25 tensors are missing: {name}": lambda tensors: tensors.pop(name),
        "1 tensors have no place in Qwen3ForCausalLM: extra": lambda tensors: tensors.update(
            extra=torch.ones(1)
        ),
        rf"{name} has shape \[47, 32\], config.json asks for \[48, 32\]": lambda tensors: tensors.update(
            {name: torch.ones(47, 32)}
        ),
        rf"{name} is stored as I8; supported: F32, F16, BF16": lambda tensors: tensors.update(
            {name: torch.ones(48, 32, dtype=torch.int8)}
        ),
    }
    for message, change in cases.items():
        save_file(whole, folder / "model.safetensors")
        edit(folder, change)
        with pytest.raises(ModelError, match=message):
            load(folder)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_told_by_tensor_and_file(folder, odd):
    name = "model.layers.1.mlp.up_proj.weight"
    edit(folder, lambda tensors: tensors[name][3, :2].fill_(odd))
    with pytest.raises(ModelError, match=rf"model\.safetensors: {name} holds 2 values of 1536 that are NaN"):
        load(folder)


def test_weights_that_the_dtype_cannot_hold_are_told(folder):
    name = "model.layers.0.mlp.down_proj.weight"
    edit(folder, lambda tensors: tensors[name][0, 0].fill_(1e6))
    assert load(folder).weights == "trained"
    with pytest.raises(
        ModelError, match=rf"{name} has values that torch.float16 cannot hold, the largest 1e\+06"
    ):
        load_model(folder, device="cpu", dtype=torch.float16)


def test_tensors_that_follow_from_others_are_passed_over(folder):
    write_json(folder / "config.json", CONFIG | {"tie_word_embeddings": True})
    edit(
        folder,
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    )
    loaded = load(folder)  # the file has a head, which the tied model does not use
    assert loaded.model.head is None


def test_pickles_are_never_read(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(
        ModelError, match=r"only pytorch_model\.bin, which is not read \(a pickle can run code\)"
    ):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"has no weights; expected: model\.safetensors, or"):
        load(folder)


def test_n03_a_read_that_fails_halfway_leaves_no_weights_behind(folder, monkeypatch):
    """The error's traceback holds the model; its memory must be gone all the same."""
    seen = []

    def fail(shards, model, layout):
        seen.append(model)
        raise OSError("the disk went away")

    monkeypatch.setattr(loading, "read_shards", fail)
    with pytest.raises(OSError, match="went away") as caught:
        load(folder)
    assert caught.value.__traceback__ is not None
    assert all(parameter.is_meta for parameter in seen[0].parameters()) and seen[0].rotary.is_meta


def test_a_wrong_folder_is_refused_before_any_weight_is_allocated(folder, monkeypatch):
    edit(folder, lambda tensors: tensors.pop("model.norm.weight"))
    monkeypatch.setattr(loading, "Decoder", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(ModelError, match=r"missing: model\.norm\.weight"):
        load(folder)


def test_a_model_can_be_collected_after_use(folder):
    import weakref

    kept = weakref.ref(load(folder).model)
    gc.collect()
    assert kept() is None


def test_a_tokenizer_of_another_model_is_refused(folder, root):
    tokenizer = root / "data/models/pico-gqa/tokenizer.json"
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    with pytest.raises(ModelError, match="the tokenizer has 4096 tokens, the model 300"):
        load(folder)


def test_names_that_are_nothing_list_what_there_is():
    with pytest.raises(
        ModelError,
        match=r"no model 'pico-gpa' \(did you mean pico-gqa.*pico-gqa.*qwen3-0\.6b, qwen3-8b.*owner/name",
    ):
        load("pico-gpa")


def test_shipped_models_are_found_by_name_and_cglab_data_overrides(folder, monkeypatch):
    assert "pico-gqa" in sources.shipped_models()
    (folder / "models").mkdir()
    monkeypatch.setenv("CGLAB_DATA", str(folder))
    assert sources.shipped_models() == {}
    with pytest.raises(ModelError, match=f"none in {folder}; CGLAB_DATA says where"):
        load("pico-gqa")


def test_a_hub_id_fetches_no_code_and_no_pickles(folder, monkeypatch):
    import huggingface_hub

    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load("someone/some-model").weights == "trained"
    assert asked == {
        "name": "someone/some-model",
        "allow_patterns": ["*.json", "*.safetensors"],
        "ignore_patterns": ["*/*"],
    }


def test_a_hub_id_without_a_network_is_one_clear_error(monkeypatch, tmp_path):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelError, match=r"'someone/some-model' is no local folder and could not be fetched"
    ) as told:
        load("someone/some-model")
    assert str(told.value).endswith("give the folder of a model that is here") and "\n" not in str(told.value)


def test_presets_come_with_a_byte_tokenizer_and_say_that_they_are_random(monkeypatch):
    from dataclasses import replace

    small = replace(
        loading.PRESETS["qwen3-8b"], hidden_size=32, intermediate_size=16, num_layers=1, num_heads=8
    )
    monkeypatch.setattr(loading, "PRESETS", {"qwen3-8b": small})
    loaded = load_model("qwen3-8b", device="cpu", dtype=torch.bfloat16, seed=5)
    assert loaded.weights == "random" and loaded.model.embedding.weight.dtype == torch.bfloat16
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("def f(): é")) == "def f(): é"


def test_more_layers_than_tensors_are_refused_before_anything_is_made_for_each(tmp_path, root):
    source = root / "data/models/pico-gqa"
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": 10**9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    with pytest.raises(ModelError, match="states 1000000000 layers"):
        load_model(tmp_path, device="cpu", dtype=torch.float32)
