"""A published shape becomes a folder that a server opens with random weights."""

from dataclasses import replace

import pytest

from cglab.errors import ModelError
from cglab.models.config import ModelConfig
from cglab.models.presets import PRESETS
from cglab.serving.arm import ServerArm, command, model_path
from cglab.serving.random_weights import RANDOM_WEIGHTS, write_folder


def test_the_folder_has_the_shape_a_tokenizer_and_no_weights(tmp_path, root):
    folder = write_folder(PRESETS["qwen3-8b"], tmp_path / "models" / "qwen3-8b")
    assert ModelConfig.from_folder(folder) == PRESETS["qwen3-8b"]
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (folder / "tokenizer.json").read_bytes() == (
        root / "data/models/pico-gqa/tokenizer.json"
    ).read_bytes()
    assert write_folder(PRESETS["qwen3-0.6b"], folder) == folder
    assert ModelConfig.from_folder(folder) == PRESETS["qwen3-0.6b"]


def test_an_arm_opens_it(tmp_path, installed):
    folder = write_folder(PRESETS["qwen3-0.6b"], tmp_path)
    assert model_path(str(folder)) == str(folder)
    argv = command(ServerArm("a", str(folder), arguments=RANDOM_WEIGHTS), installed, 1, {}).argv
    assert argv[-2:] == ("--load-format", "dummy")


def test_a_shape_that_is_no_folder_yet_says_how_to_make_one():
    with pytest.raises(ModelError, match=r"qwen3-8b is a shape.*write_folder"):
        model_path("qwen3-8b")


def test_a_vocabulary_below_the_tokenizers_is_refused(tmp_path):
    with pytest.raises(ModelError, match="at least 4096 tokens"):
        write_folder(replace(PRESETS["qwen3-0.6b"], vocab_size=4095), tmp_path / "small")
    assert not (tmp_path / "small").exists()
