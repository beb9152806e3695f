"""Texts that a draft learns from and is measured on: with what the target made of them, and in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from cglab.measure.acceptance_rule import counted_length
from cglab.models.decoder import Decoder

POOL = 8  # batches of which the texts are sorted by length


@dataclass(frozen=True)
class Texts:
    """Equally long texts; a kind of draft adds what it sees of them.

    Attributes:
        tokens: [texts, length] int64.
        counted: [texts] int64, tokens of each text that are learnt from.
    """

    tokens: Tensor
    counted: Tensor

    def chosen(self, rows: Tensor) -> Self:
        """Some of the texts."""
        return type(self)(*(getattr(self, part.name)[rows] for part in fields(self)))


T = TypeVar("T", bound=Texts)
Observe: TypeAlias = Callable[[Decoder, Tensor, Tensor], T]
"""Runs a target over texts [texts, length] int64 of which [texts] tokens count, and keeps what a draft sees."""


def lessons(data: Path, ends: Sequence[int], drafted: int) -> list[Texts]:
    """All continuations, equally long ones together, on the CPU.

    Args:
        data: what ``pico_continuations.py`` wrote.
        ends: tokens that end a text.
        drafted: tokens of a pass; as in the measure, a text of which no more count has none.
    """
    kinds = []
    for name, array in np.load(data / "continuations.npz").items():
        prompt = int(name)
        counted = torch.tensor([prompt + counted_length(row[prompt:].tolist(), ends) for row in array])
        enough = counted > prompt + drafted
        kinds.append(Texts(torch.from_numpy(array.astype(np.int64))[enough], counted[enough]))
    return kinds


def batches(kinds: Sequence[T], batch: int, seed: int) -> Iterator[T]:
    """Endless batches of equally long texts; every epoch has each text once, but for an incomplete last batch.

    Texts of which about equally much is learnt from come together.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    while True:
        drawn: list[tuple[T, Tensor]] = []
        for kind in kinds:
            for pool in torch.randperm(len(kind.tokens), generator=generator).split(POOL * batch):
                alike = pool[kind.counted.cpu()[pool].argsort(stable=True)]
                drawn.extend((kind, rows) for rows in alike.split(batch) if len(rows) == batch)
        for index in torch.randperm(len(drawn), generator=generator).tolist():
            kind, rows = drawn[index]
            yield kind.chosen(rows.to(kind.tokens.device))
