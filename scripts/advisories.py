"""What a checkout of PyPA's advisory database says of pins, for machines that cannot ask a service.

Advisories are OSV files, ``vulns/PACKAGE/ID.yaml``. What they say holds until the day of the newest one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)", re.MULTILINE)
MODIFIED = re.compile(r"^modified: [\"']?(\d{4}-\d{2}-\d{2})", re.MULTILINE)


def report(pins: str, database: Path) -> dict[str, Any]:
    """Pins with what is known of them, in the form of ``pip-audit --format json``; one that cannot be read is skipped.

    Args:
        pins: text of lines ``NAME==VERSION``.
        database: a checkout.

    Raises:
        OSError: if it is none.
    """
    folders = {canonicalize_name(each.name): each for each in (database / "vulns").iterdir()}
    found: list[dict[str, Any]] = []
    for name, version in PIN.findall(pins):
        pin: dict[str, Any] = {"name": name, "version": version}
        try:
            folder = folders.get(canonicalize_name(name))
            known = advisories(folder, name, Version(version)) if folder else ()
            found.append({**pin, "vulns": list(known)})
        except (yaml.YAMLError, InvalidVersion, LookupError, TypeError, AttributeError, ValueError) as error:
            found.append({**pin, "skip_reason": f"an advisory of {name} cannot be read: {error}"})
    return {"dependencies": found}


def advisories(folder: Path, name: str, version: Version) -> Iterator[dict[str, Any]]:
    """The advisories of a package that concern a version, each with the versions that mend it."""
    for file in sorted(folder.glob("*.yaml")):
        # Everything as text: a version such as 1.10 is no number.
        told = yaml.BaseLoader(file.read_text(encoding="utf-8")).get_single_data()
        if told.get("withdrawn"):
            continue
        ours = [
            each for each in told["affected"]
            if each["package"]["ecosystem"] == "PyPI"
            and canonicalize_name(each["package"]["name"]) == canonicalize_name(name)
        ]  # fmt: skip
        if any(concerns(each, version) for each in ours):
            events = [event for each in ours for span in each.get("ranges", ()) for event in ordered(span)]
            yield {"id": told["id"], "fix_versions": [event["fixed"] for event in events if "fixed" in event]}


def concerns(affected: Mapping[str, Any], version: Version) -> bool:
    """Whether a version is listed, or lies in a range of versions, as OSV defines it; without a build's label."""
    plain = Version(version.public)
    listed = (_version(each) for each in affected.get("versions", ()))  # some of old are none by PEP 440
    if plain in listed:
        return True
    return any(_within(span, plain) for span in affected.get("ranges", ()))


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _within(span: Mapping[str, Any], version: Version) -> bool:
    inside = False
    for event in ordered(span):
        ((kind, place),) = event.items()
        if kind == "introduced" and version >= Version(place):
            inside = True
        elif (kind == "fixed" and version >= Version(place)) or (
            kind == "last_affected" and version > Version(place)
        ):
            inside = False
    return inside


def ordered(span: Mapping[str, Any]) -> list[dict[str, str]]:
    """Events of a range of versions, oldest first; none of a range of commits."""
    events = span["events"] if span["type"] == "ECOSYSTEM" else []
    return sorted(events, key=lambda event: Version(next(iter(event.values()))))


def newest(database: Path) -> date:
    """When the newest advisory was written or changed.

    Raises:
        ValueError: if there is none.
    """
    days = [
        day for file in (database / "vulns").glob("*/*.yaml")
        for day in MODIFIED.findall(file.read_text(encoding="utf-8"))
    ]  # fmt: skip
    return date.fromisoformat(max(days))
