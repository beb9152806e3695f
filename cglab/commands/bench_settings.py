"""``bench NAME --set NAME=VALUE``: settings of a bench in words, so that every record's command can be run again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

import torch

from cglab.errors import InputError, nearest

COMMON = ("device", "quick", "progress")
"""What every bench takes, and has options of its own for."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRUTHS = {"true": True, "false": False}


def read_settings_of(bench: Callable[..., Any], words: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments of a bench from words such as ``seed=2`` or ``dtypes=float32,bfloat16``.

    Args:
        bench: the function that will be called with them; its annotations say what a value is.
        words: each a name, an equals sign and a value; a list's members are separated by commas.

    Returns:
        The arguments by name.

    Raises:
        InputError: for a word without name, a name that the bench does not have or that is set twice, or a value
            of another kind.
    """
    hints = get_type_hints(bench)
    names = settings_of(bench)
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in names:
            known = ", ".join(f"{each}={good}" for each, good in names.items()) or "no settings"
            raise InputError(f"{word!r} is no setting of this bench{nearest(name, names)}; it has {known}")
        if name in found:
            raise InputError(f"{name} is set twice; give a list's members in one word: {name}=A,B")
        found[name] = _value(name, value, hints[name])
    return found


def settings_of(bench: Callable[..., Any]) -> dict[str, str]:
    """The settings of a bench, and how a value of each is written."""
    hints = get_type_hints(bench)
    names = inspect.signature(bench).parameters
    return {name: _good(hints[name]) for name in names if name in hints and name not in COMMON}


def refuse_decided(decided: Sequence[str], given: Mapping[str, Any]) -> None:
    """Stops a quick run whose settings would have no effect, and whose record's command would say otherwise.

    Args:
        decided: settings that a quick run decides itself.
        given: those that were set.

    Raises:
        InputError: naming the first of both.
    """
    if idle := [name for name in decided if name in given]:
        raise InputError(
            f"{idle[0]} would have no effect: a quick run of this bench decides {', '.join(decided)}; "
            f"leave --quick or {idle[0]} out"
        )


def _kind(hint: Any) -> tuple[type, bool]:
    """What a value is, and whether there may be several; None beside it is what leaving it out means."""
    options = [each for each in get_args(hint) if each is not type(None)]
    if type(None) in get_args(hint) and len(options) == 1:
        hint = options[0]
    many = get_origin(hint) is Sequence
    return (get_args(hint)[0] if many else hint), many


def _value(name: str, text: str, hint: Any) -> Any:
    kind, many = _kind(hint)
    words = text.split(",") if many else [text]
    if "" in words:
        raise InputError(f"{name}={text} has an empty value in it; good values are {_good(hint)}")
    try:
        values = [_reader(kind)(word) for word in words]
    except (KeyError, ValueError):
        raise InputError(f"{name}={text}: good values are {_good(hint)}") from None
    return tuple(values) if many else values[0]


def _reader(kind: type) -> Callable[[str], Any]:
    named: Mapping[type, Mapping[str, Any]] = {torch.dtype: DTYPES, bool: TRUTHS}
    return named[kind].__getitem__ if kind in named else kind


def _good(hint: Any) -> str:
    """How a value is written, for people."""
    kind, many = _kind(hint)
    texts = {torch.dtype: "|".join(DTYPES), bool: "|".join(TRUTHS), int: "N", str: "NAME"}
    return texts.get(kind, kind.__name__.upper()) + ("[,...]" if many else "")
