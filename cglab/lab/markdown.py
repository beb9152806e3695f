"""Records as Markdown: tables, and the blocks of a text that hold them between two markers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

_NUMBER = re.compile(r"-?[\d,]*\.?\d+")


def number(value: Any, over: Any = 1.0) -> str:
    """A value, or its ratio to another, with two decimals; a dash where either is none."""
    known = isinstance(value, int | float) and isinstance(over, int | float)
    return f"{value / over:.2f}" if known else "-"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table: columns of numbers, with a dash for each that is not there, stand to the right.

    Args:
        columns: their names.
        rows: a text for each column; a bar in it is escaped and a line break replaced, since either would end the cell.
    """
    cells = [[cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in rows]
    rule = ["---:" if _numbers(column) else "---" for column in zip(*cells, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, rule or ["---"] * len(columns), *cells))


def between(text: str, begin: str, end: str, content: str) -> str:
    """A text with what stands between two markers replaced.

    Raises:
        ValueError: if they are not there, once each and in order.
    """
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed or begin in rest or end in after:
        message = f"the lines {begin!r} and {end!r} are needed, once each and in this order"
        raise ValueError(message)
    return f"{before}{begin}\n{content}\n{end}{after}"


def _numbers(cells: Iterable[str]) -> bool:
    """Whether all cells that hold something hold a number."""
    held = [cell for cell in cells if cell != "-"]
    return bool(held) and all(_NUMBER.fullmatch(cell) for cell in held)


@dataclass(frozen=True)
class Block(ABC):
    """A part of a text that is written from records and nothing else.

    Attributes:
        name: in its markers.
        bench: whose records it holds.
    """

    name: str
    bench: str
    records_it: ClassVar[str] = "on a GPU records it"
    """How the sentence ends that stands there without records."""

    @property
    def begin(self) -> str:
        """The line before the block."""
        return f"<!-- {self.name}: begin (scripts/readme_table.py) -->"

    @property
    def end(self) -> str:
        """The line after the block."""
        return f"<!-- {self.name}: end -->"

    @property
    def not_yet(self) -> str:
        """The block without records."""
        return f"*Not recorded yet.* `cglab bench {self.bench} --save` {self.records_it}."

    @abstractmethod
    def text(self, folder: Path | None) -> str:
        """The block from the records of a folder; None takes ``results`` in the data folder."""
