"""Checked cells hold for any model: here a random one of another shape, without a tokenizer, from a folder."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from cglab.models.config import ModelConfig
from cglab.models.layout import checkpoint_layout
from scripts.refresh_notebooks import FOLDER

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "tie_word_embeddings": False,
    "eos_token_id": 7,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a-model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    layout = checkpoint_layout(ModelConfig.from_folder(folder))
    save_file(
        {name: torch.randn(piece.shape) for name, piece in layout.items()}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_checked_cells_hold_for_a_model_of_another_kind(path, model, root, environment):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)],
        cwd=root,
        env={**environment, "CGLAB_MODEL": str(model)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_n10_checked_cells_hold_with_the_gpu_hidden(path, root, environment):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)],
        cwd=root,
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
