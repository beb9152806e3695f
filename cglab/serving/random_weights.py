"""A folder from which SGLang opens a shape with random weights: a configuration, a tokenizer and no weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

from cglab.errors import ModelError
from cglab.models.config import ModelConfig
from cglab.models.config_file import as_config_json
from cglab.models.sources import shipped_models

RANDOM_WEIGHTS: Final = ("--load-format", "dummy")
"""Arguments of an arm whose model is such a folder."""
TOKENIZER: Final = "pico-gqa"
"""Whose tokenizer goes with it. Text means nothing to random weights; requests are token ids."""


def write_folder(config: ModelConfig, folder: Path, dtype: str = "bfloat16") -> Path:
    """Writes what a server needs beside random weights.

    Args:
        config: the shape, such as ``PRESETS["qwen3-8b"]``.
        folder: made if it is not there; files of the same names are replaced.
        dtype: of the weights.

    Returns:
        The folder, for an arm's ``model``, with :data:`RANDOM_WEIGHTS` among its ``arguments``.

    Raises:
        ModelError: the vocabulary is smaller than that of the tokenizer that goes with it.
    """
    source = shipped_models()[TOKENIZER]
    smallest = ModelConfig.from_folder(source).vocab_size
    if config.vocab_size < smallest:
        raise ModelError(
            f"a vocabulary of {config.vocab_size} is too small for the tokenizer of {TOKENIZER}; "
            f"give a shape with at least {smallest} tokens"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(as_config_json(config, dtype), indent=2), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    return folder
