"""Prompts: text or token ids in, token ids out; and some to try a model with, whatever its vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from typing import Any

import torch

from cglab.errors import InputError, ModelError
from cglab.models.sources import find_folder
from cglab.models.tokenizer import Tokenizer

Prompts = str | Sequence[str] | Sequence[Sequence[int]]

TEXTS = (
    "def read_lines(path):\n    with open(path) as",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\ndef main(",
    "for index, value in enumerate(",
    "try:\n    import json\nexcept ImportError:\n",
    "def test_copy(self):\n        self.assertEqual(",
    "if __name__ == '__main__':\n",
    "while True:\n    line = stream.readline()\n",
)
"""Beginnings of Python code: what the shipped models were trained to continue."""

LENGTH = 12


def sample_prompts(count: int, *, vocabulary: int, has_text: bool) -> list[Any]:
    """The first ``count`` sample prompts.

    Args:
        count: how many; they repeat after ``TEXTS``.
        vocabulary: token ids are below it.
        has_text: whether the model has a tokenizer; without one prompts are ``LENGTH`` random token ids.
    """
    if has_text:
        return list(islice(cycle(TEXTS), count))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (count, LENGTH), generator=generator).tolist()


def held_out(count: int | None = None, model: str = "pico-gqa") -> list[list[int]]:
    """Token ids of a shipped model's held-out prompts: beginnings of files that it was not trained on.

    Args:
        count: the first so many, which have all lengths from 16 to 256 tokens; None for all.
        model: its name.

    Raises:
        ModelError: if the model is not shipped, or was shipped without prompts.
    """
    path = find_folder(model) / "prompts.json"
    if not path.is_file():
        raise ModelError(f"{path} is not there: {model} has no held-out prompts; take a shipped model")
    return [prompt["ids"] for prompt in json.loads(path.read_text(encoding="utf-8"))[:count]]


def encode(prompts: Prompts, tokenizer: Tokenizer | None, model: str) -> list[list[int]]:
    """Token ids of prompts that are text or token ids already.

    Args:
        prompts: one text, texts, or lists of token ids.
        tokenizer: of the model; None if it has none.
        model: its name, for messages.

    Raises:
        InputError: for text without a tokenizer, or a prompt of another kind.
    """
    if not isinstance(prompts, Iterable):
        raise InputError(
            f"prompts are a {type(prompts).__name__}; give a string, or a list of strings or token ids"
        )
    listed: Iterable[Any] = [prompts] if isinstance(prompts, str) else prompts
    result = []
    for index, prompt in enumerate(listed):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise InputError(f"{model} has no tokenizer: give prompts as lists of token ids")
            result.append(list(tokenizer.encode(prompt)))
        elif (
            isinstance(prompt, Sequence)
            and not isinstance(prompt, bytes | bytearray)
            and all(isinstance(token, int) for token in prompt)
        ):
            result.append(list(prompt))
        else:
            kind = type(prompt).__name__
            raise InputError(f"prompt {index} is a {kind}; give a string or a list of token ids")
    return result
