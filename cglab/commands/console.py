"""What commands share: an outcome that is written once, plain tables, progress on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

HOLDS, FAILS, BAD_INPUT = 0, 1, 2
"""Exit statuses: what was asked holds, does not hold, or was no good question."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command found.

    Attributes:
        text: for people.
        value: for ``--json``; plain values.
        status: exit status.
    """

    text: str
    value: Any = None
    status: int = HOLDS


def note(text: str) -> None:
    """Says something beside the result, on standard error."""
    sys.stderr.write(f"{text}\n")


def text_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows under a header, as wide as they must be; numbers to the right; None is a dash."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    lines = [list(columns), *cells]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    right = [
        bool(rows) and all(isinstance(row[index], int | float | None) for row in rows)
        for index in range(len(columns))
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


@contextmanager
def progress_bar(total: int | None, title: str, unit: str = "step") -> Iterator[Any]:
    """A tqdm bar on standard error; a log file gets a line now and then instead of a moving bar."""
    from tqdm import tqdm

    live = sys.stderr.isatty()
    pace = {"leave": not live, "mininterval": 0.1 if live else 2.0}
    # The delay keeps a refusal at once free of an empty bar.
    with tqdm(total=total, desc=title, unit=unit, delay=0.1, **pace) as bar:
        yield bar
        if not live and bar.n and bar.last_print_t == bar.start_t:
            note(str(bar))  # over before the first line was due; tqdm says nothing of such a run


def advance(bar: Any, what: str) -> None:
    """One step on, and what comes next; a log file is spared a line for each."""
    bar.set_description(what, refresh=sys.stderr.isatty())
    bar.update()
