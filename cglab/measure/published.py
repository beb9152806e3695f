"""The tables of the five source documents (S0 to S4), as data.

``data/published/`` holds one JSON file a table: ``id``, ``source``, ``title``, ``machine``, ``columns`` (each
a ``name`` and a ``unit``) and ``rows``, each an object with every column and its own ``source``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cglab.errors import ResultsError
from cglab.settings import read_settings

if TYPE_CHECKING:
    import pandas

SOURCES = ("S0", "S1", "S2", "S3", "S4")

_NEEDED = {"id": str, "source": str, "title": str, "machine": str, "columns": list, "rows": list}


def load_published(folder: str | Path | None = None) -> dict[str, dict[str, Any]]:
    """Reads and checks every published table, by default those of the data folder.

    Returns:
        Tables by id, in order of their ids.

    Raises:
        ResultsError: if the folder holds no tables, or a table lacks a part, a row a column, or a row its
            source.
    """
    folder = read_settings().data / "published" if folder is None else Path(folder)
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ResultsError(f"no published tables in {folder}; they come with a clone of the repository")
    tables: dict[str, dict[str, Any]] = {}
    for file in files:
        try:
            table = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ResultsError(f"cannot read the published table {file}: {error}") from error
        fault = _fault(table)
        if fault is None and table["id"] in tables:
            fault = f"a second table {table['id']!r}"
        if fault is not None:
            raise ResultsError(f"{file} is no published table: {fault}")
        tables[table["id"]] = table
    return dict(sorted(tables.items()))


def published_frame(table: Mapping[str, Any]) -> pandas.DataFrame:
    """A table as a frame: one column per published column, its unit in ``attrs["units"]``, and ``source``."""
    import pandas

    names = [column["name"] for column in table["columns"]]
    frame = pandas.DataFrame(table["rows"], columns=[*names, "source"])
    frame.attrs.update(
        id=table["id"],
        title=table["title"],
        units={each["name"]: each.get("unit") for each in table["columns"]},
    )
    return frame


def _fault(table: Any) -> str | None:
    if not isinstance(table, dict):
        return "not an object"
    for name, kind in _NEEDED.items():
        if not isinstance(table.get(name), kind):
            return f"{name!r} must be a {kind.__name__}"
    names = {column.get("name") for column in table["columns"] if isinstance(column, dict)}
    if None in names or len(names) != len(table["columns"]):
        return "every column needs a name of its own"
    for number, row in enumerate(table["rows"]):
        if not isinstance(row, dict) or not names <= row.keys() or row.get("source") not in SOURCES:
            return f"row {number} needs every column and a source out of {', '.join(SOURCES)}"
    return (
        None
        if table["source"] in SOURCES
        else f"source {table['source']!r} is not out of {', '.join(SOURCES)}"
    )
