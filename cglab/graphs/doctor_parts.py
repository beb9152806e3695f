"""What one Python object leads to, and how to look at what a call may change of it.

Objects are read as Python itself keeps them, past methods of the user's: those may raise, or change what is looked at.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from cglab.graphs.places import is_users

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types whose objects are their value, and lead nowhere."""

_METHODS = (FunctionType, property, staticmethod, classmethod, cached_property)

DEEPEST = 3
"""Levels of nested containers that are compared by value; what lies deeper is by identity."""

Read = Callable[[], Any]
Part = tuple[str, Read | None, Any]
"""Suffix of the name, how to look at it (None for what no call changes), and what it holds."""


def parts(value: Any) -> Iterator[Part]:
    """What one object leads to.

    Args:
        value: anything; only what is Python's own, and objects and classes of the user's, lead anywhere.
    """
    if isinstance(value, MethodType):
        yield "", None, value.__func__
        yield "", None, value.__self__
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, CellType):
        yield "", partial(_held, value), _content(value)
    elif isinstance(value, type):
        yield from _of_class(value)
    elif isinstance(value, (partial, *_METHODS)):
        for name in ("func", "args", "keywords", "fget", "fset", "__func__"):
            yield "", None, getattr(value, name, None)
    else:
        yield from _of_container(value)
        if isinstance(value, nn.Module | SimpleNamespace) or _is_of_users(type(value)):
            yield from _of_object(value)


def token(value: Any, depth: int = DEEPEST) -> Any:
    """Equal for the same plain value, for containers that hold the same, and else for the same object and no other.

    Args:
        value: anything.
        depth: levels of containers to compare by value.
    """
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, PLAIN):
        return type(value), value
    if depth and type(value) in (tuple, list, torch.Size):
        return type(value), tuple(token(item, depth - 1) for item in value)
    if depth and type(value) in (set, frozenset):
        return type(value), frozenset(token(item, depth - 1) for item in value)
    if depth and type(value) is dict:
        return dict, tuple((token(key, 0), token(item, depth - 1)) for key, item in value.items())
    return id(value)


def _of_function(function: FunctionType) -> Iterator[Part]:
    # What a decorator of Python's or torch's wraps may be the user's.
    yield "", None, getattr(function, "__wrapped__", None)
    if not is_users(function.__code__.co_filename):
        return
    if vars(function):
        yield from _of_table(vars(function), ".{}".format, skip=("__wrapped__",))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f"'s {name}", partial(_held, cell), _content(cell)
    space = function.__globals__
    for name in dict.fromkeys(_names(function.__code__)):
        if name in space:
            yield f"'s {name}", partial(_entry, space, name), space[name]
    for index, item in enumerate(function.__defaults__ or ()):
        yield f"'s default {index}", None, item
    for name, item in (function.__kwdefaults__ or {}).items():
        yield f"'s default {name}", None, item


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function and those within it look up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _of_class(kind: type) -> Iterator[Part]:
    """Attributes and methods of a class of the user's, and of those that it inherits from."""
    for base in kind.__bases__:
        yield "'s base", None, base
    if not _is_of_users(kind):
        return
    for name, item in list(vars(kind).items()):
        if isinstance(item, _METHODS):
            yield f".{name}", None, item
        elif not (name.startswith("__") and name.endswith("__")):  # those are Python's own notes
            yield f".{name}", partial(_of_namespace, kind, name), item


def _of_object(value: Any) -> Iterator[Part]:
    yield "'s class", None, type(value)
    own = _attributes(value)
    kept = ("_parameters", "_buffers", "_modules") if isinstance(value, nn.Module) else ()
    for name, item in own["_modules"].items() if kept else ():
        yield f".{name}", None, item
    yield from _of_table(own, ".{}".format, skip=kept)
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items() if _is_of_users(kind) else ():
            if isinstance(slot, MemberDescriptorType):
                yield f".{name}", partial(_of_slot, slot, value), _slotted(slot, value)


def _of_container(value: Any) -> Iterator[Part]:
    if isinstance(value, dict):
        yield from _of_table(value, _bracketed)
    elif isinstance(value, list | tuple):
        plain: Any = list if isinstance(value, list) else tuple
        yield " (length)", partial(plain.__len__, value), None
        for index, item in enumerate(plain.__iter__(value)):
            yield f"[{index}]", partial(_item, plain, value, index), item
    elif isinstance(value, set):
        yield " (items)", lambda: frozenset(map(token, set.__iter__(value))), None
    elif isinstance(value, deque):
        yield " (items)", lambda: tuple(map(token, deque.__iter__(value))), None
        for item in deque.__iter__(value):
            yield "[...]", None, item
    elif isinstance(value, bytearray):
        yield " (content)", partial(bytes, value), None
    elif isinstance(value, np.ndarray):
        yield " (content)", lambda: (value.shape, hash(np.ndarray.tobytes(value))), None


def _of_table(
    table: dict[Any, Any], form: Callable[[Any], str], skip: tuple[str, ...] = ()
) -> Iterator[Part]:
    yield " (length)", partial(dict.__len__, table), None
    for key, item in list(dict.items(table)):
        if key not in skip:
            yield form(key), partial(_entry, table, key), item


def _bracketed(key: Any) -> str:
    try:
        return f"[{key!r}]"
    except Exception:  # noqa: BLE001 - whatever the user's own raises; the name is only for telling
        return f"[a {type(key).__name__}]"


def _entry(table: dict[Any, Any], key: Any) -> Any:
    return token(dict.get(table, key))  # not what a class of the user's makes of it


def _of_namespace(kind: type, name: str) -> Any:
    return token(vars(kind).get(name))


def _held(cell: CellType) -> Any:
    return token(_content(cell))


def _item(plain: Any, items: Any, index: int) -> Any:
    return token(plain.__getitem__(items, index)) if index < plain.__len__(items) else None


def _of_slot(slot: MemberDescriptorType, value: Any) -> Any:
    return token(_slotted(slot, value))


def _slotted(slot: MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value, type(value))
    except AttributeError:  # not assigned yet
        return None


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _attributes(value: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:  # all of it is in slots
        return {}
    return found


def _is_of_users(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return is_users(getattr(module, "__file__", None) or "")
