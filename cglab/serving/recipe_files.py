"""Recipes from the files that hold them: ``data/recipes/*.toml``, each a source document's."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from cglab.errors import InputError, no_such
from cglab.serving.recipes import VARIANTS, Arm, Draft, Point, Recipe, Variant
from cglab.settings import read_settings


def load_recipes(folder: str | Path | None = None) -> dict[str, Recipe]:
    """Every recipe by name, by default of the data folder.

    Raises:
        InputError: if a file is no recipe, or there are none.
    """
    return {file.stem: _read(file) for file in _files(folder)}


def _files(folder: str | Path | None) -> list[Path]:
    where = read_settings().data / "recipes" if folder is None else Path(folder)
    files = sorted(where.glob("*.toml"))
    if not files:
        raise InputError(f"no recipes in {where}; they come with a clone of the repository")
    return files


def find_recipe(name: str, folder: str | Path | None = None) -> Recipe:
    """A recipe by its name or its source, such as ``s3`` or ``S3``.

    Raises:
        InputError: if there is none; a file that is no recipe is told only then, as it may be the one.
    """
    files, broken = _files(folder), None
    for file in files:
        try:
            recipe = _read(file)
        except InputError as error:
            broken = broken or error
            continue
        if name.lower() in (recipe.name.lower(), recipe.source.lower()):
            return recipe
    raise broken or InputError(no_such("recipe", name, [file.stem for file in files]))


def _read(file: Path) -> Recipe:
    try:
        told = tomllib.loads(file.read_text(encoding="utf-8"))
        variants = {name: _variant(told.pop(name)) for name in VARIANTS if name in told}
        return _make(Recipe, {**told, "name": file.stem, "variants": variants})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{file} is no recipe: {error}") from error


def _variant(told: Mapping[str, Any]) -> Variant:
    values = {"environment": {}, "declared": (), **told}
    values["arms"] = tuple(_make(Arm, {"toggles": {}, "environment": {}, **arm}) for arm in told["arms"])
    values["points"] = tuple(_make(Point, {"published": {}, **each}) for each in told["points"])
    if "draft" in told:
        values["draft"] = _make(Draft, {"config": {}, **told["draft"]})
    return _make(Variant, values)


def _make(kind: Any, values: Mapping[str, Any]) -> Any:
    """A part of a recipe; lists become tuples, and a misspelt name is an error."""
    names = [each.name for each in fields(kind)]
    if unknown := sorted(set(values) - set(names)):
        raise InputError(
            f"{unknown[0]!r} is no field of a {kind.__name__.lower()}; it has {', '.join(names)}"
        )
    needed = [
        each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING
    ]
    if lacking := [name for name in needed if name not in values]:
        raise InputError(
            f"a {kind.__name__.lower()} needs {', '.join(lacking)} as well; the shipped files have them all"
        )
    return kind(
        **{
            name: tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
            for name, value in values.items()
        }
    )
