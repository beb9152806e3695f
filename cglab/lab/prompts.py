"""Prompts to try a model with, whatever its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

import torch

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


def sample_prompts(count: int, *, vocabulary: int, has_text: bool) -> list[str] | list[Sequence[int]]:
    """The first ``count`` sample prompts.

    Args:
        count: how many; they repeat after ``TEXTS``.
        vocabulary: token ids are below it.
        has_text: whether the model has a tokenizer; without one prompts are ``LENGTH`` random token ids.
    """
    if has_text:
        return list(islice(cycle(TEXTS), count))
    generator = torch.Generator().manual_seed(0)
    ids: list[Sequence[int]] = torch.randint(0, vocabulary, (count, LENGTH), generator=generator).tolist()
    return ids
