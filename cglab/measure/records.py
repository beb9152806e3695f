"""Result records: one JSON object a line, in ``data/results/*.jsonl``.

An append writes the whole file anew beside the old one and renames it into place, under a lock on the folder.
A full disk, a kill at any byte and other appends therefore leave every earlier line as it was, and a batch of records
is there whole or not at all; what another program adds to the file meanwhile is lost with the old one. A line ends
with a checksum of what stands before it. Lines that are no records (a partial line that something else left behind,
one that was changed) are kept in the file and told by number.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any, Final

from cglab.errors import ResultsError
from cglab.graphs.options import outside_level
from cglab.measure.record import Record
from cglab.settings import read_settings

CHECKSUM: Final = re.compile(rb', "checksum": "([0-9a-f]{16})"\}$')
"""How a line ends; lines of earlier versions have none."""


class ResultsWarning(UserWarning):
    """Lines of results were passed over."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A line that is no record. It stays in its file."""

    file: str
    line: int
    reason: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}: {self.text[:80]}"


@dataclass(frozen=True, slots=True)
class Results:
    """What a folder of results holds: records by time, and lines that are none."""

    records: tuple[Record, ...]
    problems: tuple[Problem, ...]


def append(path: str | Path, records: Iterable[Record]) -> None:
    """Adds records to a file of results, all of them or none.

    Args:
        path: a ``.jsonl`` file; its folder is made if needed.
        records: to add, in order.

    Raises:
        ResultsError: if they cannot be written; the file is then as it was, unless the error says otherwise.
        InputError: for a value that JSON cannot hold.
    """
    lines = b"".join(_with_checksum(record.as_line()) for record in records)
    target = Path(path).resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent) as folder:
            # Whoever holds the lock owns every unfinished copy: a writer that was killed left it.
            for orphan in target.parent.glob(f".{escape(target.name)}.*.part"):
                orphan.unlink(missing_ok=True)
            before = target.read_bytes() if target.exists() else b""
            if before and not before.endswith(b"\n"):
                before += b"\n"
            replace_file(target, before + lines)
            _settle(folder, target)
    except OSError as error:
        raise ResultsError(
            f"cannot write results to {target}: {error}; what was there is untouched. "
            "Free space or choose another folder, and run again"
        ) from error


def load(folder: str | Path | None = None) -> Results:
    """As ``read``, with a ``ResultsWarning`` of lines that are no records."""
    found = read(folder)
    if found.problems:
        told = ResultsWarning(
            f"passed over {len(found.problems)} lines that are no records, which stay in their files; "
            f"the first is {found.problems[0]}"
        )
        warnings.warn(told, stacklevel=outside_level())
    return found


def read(folder: str | Path | None = None) -> Results:
    """Reads every ``.jsonl`` file of a folder, or one such file; by default of ``results`` in the data folder.

    Raises:
        ResultsError: if there is no such folder or file, or it cannot be read.
    """
    where = read_settings().data / "results" if folder is None else Path(folder)
    if not where.exists():
        raise ResultsError(f"no results at {where}; record some with `cglab bench`, or name their folder")
    records: list[Record] = []
    problems: list[Problem] = []
    for file in sorted(where.glob("*.jsonl")) if where.is_dir() else [where]:
        try:
            lines = file.read_bytes().split(b"\n")
        except OSError as error:
            raise ResultsError(f"cannot read results from {file}: {error}") from error
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                records.append(Record.from_dict(_object(line)))
            except ResultsError as error:
                problems.append(Problem(str(file), number, str(error), line.decode(errors="replace")))
    return Results(tuple(sorted(records, key=lambda record: record.created)), tuple(problems))


def _with_checksum(line: bytes) -> bytes:
    """A line of JSON with a last field that tells whether any bit before it changed."""
    bare = line.rstrip(b"\n")
    return bare[:-1] + b', "checksum": "' + _digest(bare) + b'"}\n'


def _digest(bare: bytes) -> bytes:
    return sha256(bare).hexdigest()[:16].encode()


def _object(line: bytes) -> dict[str, Any]:
    bare = line.rstrip(b"\r")
    if ending := CHECKSUM.search(bare):
        bare = bare[: ending.start()] + b"}"
        if _digest(bare) != ending[1]:
            raise ResultsError("its checksum is another: it is not what was written")
    try:
        values = json.loads(bare.decode(), parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"no complete JSON ({error})") from error
    if not isinstance(values, dict):
        raise ResultsError("no JSON object")
    return values


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text} is beyond what a number can hold")
    return number


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """One writer in a folder at a time, given its handle; the lock goes with the process, and leaves no file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def _settle(folder: int, target: Path) -> None:
    """Has the new name of a file written to the disk."""
    try:
        os.fsync(folder)
    except OSError as error:
        raise ResultsError(
            f"{target} has the new records, but the disk has not confirmed it ({error}): a power cut may take them. "
            "Look at the file and the disk before running again"
        ) from error


def replace_file(target: Path, content: bytes) -> None:
    """Writes a file whole, or leaves the earlier one as it was.

    Raises:
        OSError: if it cannot be written.
    """
    handle, part = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(handle, target.stat().st_mode & 0o777 if target.exists() else 0o644)
            os.fsync(handle)
        os.replace(part, target)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
