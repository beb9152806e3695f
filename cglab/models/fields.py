"""Typed look-ups in a model's JSON files: every error names the file, the field and what is good."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cglab.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """Reads one JSON object.

    Raises:
        ModelError: if the file cannot be read or holds anything else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); fetch the file again") from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{path} holds a JSON {type(content).__name__}, an object is expected; fetch the file again"
        )
    return content


class Fields:
    """Typed look-ups in a configuration; every error names the file."""

    def __init__(self, content: Mapping[str, Any], path: Path) -> None:
        self.content, self.path = content, path

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least ``least``."""
        value = self._given(name, default)
        if type(value) is not int or value < least:
            raise self.malformed(name, value, "a positive integer" if least else "an integer from 0")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._given(name, default)
        # JSON as Python reads it has NaN, infinities and integers beyond every float.
        if type(value) not in (int, float) or not 0 < value < sys.float_info.max:
            raise self.malformed(name, value, "a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; false where it is not given."""
        value = self._given(name, default=False)
        if type(value) is not bool:
            raise self.malformed(name, value, "true or false")
        return value

    def tokens(self, name: str) -> tuple[int, ...]:
        """One token id, a list of them, or none."""
        value = self._given(name, [])
        ids = value if isinstance(value, list) else [value]
        if any(type(token) is not int or token < 0 for token in ids):
            raise self.malformed(name, value, "a token id or a list of token ids")
        return tuple(ids)

    def names(self, name: str) -> list[str] | None:
        """A list of names, or none."""
        value = self._given(name, None)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(item, str) for item in value)
        ):
            raise self.malformed(name, value, "a list of names")
        return value

    def rotary(self) -> Fields:
        """Base and scaling of the rotary embedding, in the form of transformers 5 or of earlier ones."""
        merged = {"rope_theta": self.content.get("rope_theta")}
        for name in ("rope_scaling", "rope_parameters"):
            section = self._given(name, {})
            if not isinstance(section, dict):
                raise self.malformed(name, section, "an object")
            merged |= section
        return Fields(merged, self.path)

    def require(self, name: str, value: object, good: Sequence[object]) -> None:
        """Refuses what the decoder does not compute."""
        if value not in good:
            choices = ", ".join(map(str, good))
            raise ModelError(
                f"{self.path}: {name} is {value}; supported: {choices}; open a model that has one of these"
            )

    def _given(self, name: str, default: Any) -> Any:
        value = self.content.get(name)
        return default if value is None else value

    def malformed(self, name: str, value: object, good: str) -> ModelError:
        """What to raise for a field that is missing or wrong."""
        fact = "missing" if value is None else repr(value)
        return ModelError(f"{self.path}: {name} is {fact}, {good} is expected; fetch the file again")


def draft_fields(folder: str | Path, architecture: str) -> Fields:
    """The ``config.json`` of a draft model of one kind.

    Raises:
        ModelError: if it is missing, cannot be read, or is of another kind.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json: the folder of a draft is expected; check the path")
    fields = Fields(read_json(path), path)
    found = fields.names("architectures") or ["missing"]
    fields.require("architectures", found[0], [architecture])
    return fields
