"""Which flag or variable of SGLang drives each of the lab's toggles, by version, or why none does. Pure.

The table is what the known versions have, as read in their source. What is installed has the last word: a switch that
it does not know is not available, whatever the table says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cglab.errors import ToggleError, no_such
from cglab.serving.installed import Installed

TECHNIQUES: Final[Mapping[str, str]] = {
    "decode": "T1", "verify": "T2", "draft_loop": "T3", "seed_step": "T4", "draft_sampler": "T5", "prefill": "T6",
    "pp_prefill": "T7", "dsa_attention": "T8", "dsa_indexer_prep": "T9", "draft_extend": "T10",
}  # fmt: skip
"""The lab's toggles with the techniques that they drive."""


@dataclass(frozen=True, slots=True)
class Switch:
    """How a version is told a toggle's value.

    Attributes:
        name: a flag (``--...``) or an environment variable.
        values: what it is set to, by the toggle's value.
        note: what else it does or needs; empty if nothing.
    """

    name: str
    values: Mapping[str, str]
    note: str = ""

    @property
    def is_flag(self) -> bool:
        """Whether it is an argument of the command line."""
        return self.name.startswith("--")

    def as_dict(self) -> dict[str, Any]:
        """For ``cglab techniques --json``."""
        kind = "flag" if self.is_flag else "environment"
        return {kind: self.name, "values": dict(self.values), **({"note": self.note} if self.note else {})}


@dataclass(frozen=True, slots=True)
class Missing:
    """Why a version has no switch for a toggle."""

    reason: str

    def as_dict(self) -> dict[str, Any]:
        """For ``cglab techniques --json``."""
        return {"none": self.reason}


_BACKENDS: Final = {"full": "full", "breakable": "breakable", "eager": "disabled"}
_DECODE: Final = Switch(
    "--cuda-graph-backend-decode", _BACKENDS, "one switch for decode, verify and the draft's graphs together"
)
_PREFILL: Final = "--cuda-graph-backend-prefill"
_EAGER_DSA: Final = Missing("attention and indexer run eagerly, as breaks of the prefill graph")
_BOTH: Final[Mapping[str, Switch | Missing]] = {
    "decode": _DECODE,
    "verify": _DECODE,
    "draft_loop": _DECODE,
    "seed_step": Missing("the seed step is the first pass inside the one graph of the draft loop"),
    "draft_sampler": Switch(
        "SGLANG_DFLASH_EAGER_DRAFT_SAMPLER",
        {"graph": "0", "eager": "1"},
        "with --speculative-algorithm DFLASH",
    ),
    "prefill": Switch(_PREFILL, _BACKENDS),
    "dsa_attention": _EAGER_DSA,
    "dsa_indexer_prep": _EAGER_DSA,
    "draft_extend": Missing("the NextN model has no list of layers to capture, so its prefill stays eager"),
}

KNOWN: Final[Mapping[str, Mapping[str, Switch | Missing]]] = {
    "0.5.16": {
        **_BOTH,
        "pp_prefill": Missing("its prefill graphs take no proxy tensors of an earlier stage"),
    },
    "0.5.23": {
        **_BOTH,
        "pp_prefill": Switch(
            _PREFILL,
            {"off": "disabled", "breakable": "breakable"},
            "with --pp-size 2 or more; up to 8192 tokens",
        ),
    },
}
"""By version, then by toggle."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What toggles come to for one version.

    Attributes:
        arguments: flags and their values, in the order of the toggles.
        environment: variables.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def switch(toggle: str, installed: Installed) -> Switch | Missing:
    """How an installed version is told a toggle, asked of that version.

    Raises:
        ToggleError: for an unknown toggle.
    """
    if toggle not in TECHNIQUES:
        raise ToggleError(no_such("toggle", toggle, TECHNIQUES))
    found = KNOWN[_nearest(installed.version)][toggle]
    if isinstance(found, Missing):
        return found
    if not found.is_flag:
        known = found.name in installed.variables
        return found if known else Missing(f"not available in {installed.version}: no variable {found.name}")
    argument = installed.arguments.get(found.name)
    if argument is None:
        return Missing(f"not available in {installed.version}: no argument {found.name}")
    good = {
        mine: theirs
        for mine, theirs in found.values.items()
        if argument.choices is None or theirs in argument.choices
    }
    return Switch(found.name, good, found.note)


def settings(toggles: Mapping[str, str], installed: Installed) -> Settings:
    """Flags and variables that set toggles.

    Raises:
        ToggleError: a toggle or value is unknown, this version has no switch for it, or two toggles that one switch
            drives are to have different values.
    """
    names: dict[str, tuple[str, str]] = {}
    for toggle, value in toggles.items():
        found = switch(toggle, installed)
        if isinstance(found, Missing):
            raise ToggleError(
                f"{toggle} ({TECHNIQUES[toggle]}) has no switch in SGLang {installed.version}: {found.reason}; "
                "leave it out of the arm"
            )
        if value not in found.values:
            raise ToggleError(
                f"{toggle}={value!r} is no setting of SGLang {installed.version}; "
                f"good values: {', '.join(found.values)}"
            )
        theirs = found.values[value]
        other, before = names.setdefault(found.name, (toggle, theirs))
        if before != theirs:
            raise ToggleError(
                f"{other} and {toggle} are one switch in SGLang ({found.name}), "
                f"so they cannot be {before} and {theirs}; give both the same value"
            )
    flags = [part for name, (_, value) in names.items() if name.startswith("--") for part in (name, value)]
    return Settings(
        tuple(flags), {name: value for name, (_, value) in names.items() if not name.startswith("--")}
    )


def rows(installed: Installed | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """The whole table: technique id, then version, then ``flag`` or ``environment`` with ``values``, or ``none``.

    Args:
        installed: its version's column is what it says itself.
    """
    table = {
        technique: {version: known[toggle].as_dict() for version, known in KNOWN.items()}
        for toggle, technique in TECHNIQUES.items()
    }
    if installed is not None:
        for toggle, technique in TECHNIQUES.items():
            table[technique][installed.version] = switch(toggle, installed).as_dict()
    return table


def _nearest(version: str) -> str:
    """The newest known version that is not newer, else the oldest known one."""
    older = [known for known in KNOWN if _numbers(known) <= _numbers(version)]
    return max(older, key=_numbers) if older else min(KNOWN, key=_numbers)


def _numbers(version: str) -> tuple[int, ...]:
    """``0.5.16.post1`` is (0, 5, 16)."""
    leading = []
    for part in version.split("."):
        if not part.isdigit():
            break
        leading.append(int(part))
    return tuple(leading)
