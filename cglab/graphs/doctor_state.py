"""Python state that a function reaches: what of it a call changes, and at which line.

A replay runs no Python, so a counter stands still and a list stops growing. What a call changed is seen by looking
before and after; the line, only if something was, by one more run that looks after every line of the user's.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cglab.errors import Place
from cglab.graphs.breaks import capturing
from cglab.graphs.places import is_users, place_of_line

MOST_ENTRIES = 20_000
"""Entries that are looked at; a function that reaches more is looked at in part, and that is told."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

Read = Callable[[], Any]
Part = tuple[str, Read | None, Any]
"""Suffix of the name, how to look at it (None for what no call changes), and what it holds."""


@dataclass(frozen=True, slots=True)
class State:
    """Entries of the Python state, each with a way to look at it: its content if plain, else which object it is.

    Attributes:
        entries: by name, such as ``counter.steps`` or ``cache.keys``.
        whole: whether everything that is reached is among them.
    """

    entries: dict[str, Read]
    whole: bool

    def look(self) -> dict[str, Any]:
        """What the entries hold now."""
        return {name: read() for name, read in self.entries.items()}

    def only(self, names: set[str]) -> State:
        """Some of the entries."""
        return State({name: read for name, read in self.entries.items() if name in names}, self.whole)

    def changed(self, before: Mapping[str, Any]) -> set[str]:
        """Names of entries that do not hold what they held."""
        return {name for name, read in self.entries.items() if read() != before[name]}


def reached(roots: Mapping[str, Any]) -> State:
    """The Python state that can be reached from ``roots``: attributes, containers, closures and globals by name.

    Objects of Python's and torch's own are not looked into, but for modules, without their parameters: a tensor that is
    written in place is data. The global generators of Python and NumPy are entries too, and so is torch's seed.

    Args:
        roots: a function, and what it is given.
    """
    entries: dict[str, Read] = {
        "random's generator": lambda: hash(random.getstate()),
        "numpy.random's generator": _numpy_state,
        "torch's seed": torch.initial_seed,
    }
    seen: set[int] = set()
    waiting = deque(roots.items())  # what is near comes first
    while waiting and len(entries) < MOST_ENTRIES:
        name, value = waiting.popleft()
        if id(value) in seen or isinstance(value, (*_PLAIN, Tensor, type, ModuleType)):
            continue
        seen.add(id(value))
        for key, read, inner in islice(_parts(value), MOST_ENTRIES):
            if read is not None:
                entries[f"{name}{key}"] = read
            waiting.append((f"{name}{key}", inner))
    return State(entries, not waiting)


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Tensors that an object leads to, however deep: in Python's containers, closures, and objects of the user's."""
    seen: set[int] = set()
    waiting = [value]
    while waiting and len(seen) < MOST_ENTRIES:
        item = waiting.pop()
        if isinstance(item, Tensor):
            yield item
        elif id(item) not in seen and not isinstance(
            item, (*_PLAIN, type, ModuleType, FunctionType, MethodType)
        ):
            seen.add(id(item))
            waiting += [inner for _, _, inner in _parts(item)]


def _parts(value: Any) -> Iterator[Part]:
    """What one object leads to."""
    if isinstance(value, MethodType):
        yield "", None, value.__func__
        yield "", None, value.__self__
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, partial):
        for inner in (value.func, value.args, value.keywords):
            yield "", None, inner
    elif isinstance(value, dict):
        yield from _of_table(value, "[{!r}]")
    elif isinstance(value, list | tuple | set | deque):
        yield " (length)", partial(len, value), None
        if isinstance(value, list | tuple):
            for index, item in enumerate(value):
                yield f"[{index}]", partial(_item, value, index), item
    elif isinstance(value, CellType):
        yield "", partial(_held, value), _content(value)
    elif hasattr(value, "__dict__") and (isinstance(value, nn.Module) or _is_of_users(type(value))):
        own = vars(value)
        for name, item in own.get("_modules", {}).items():
            yield f".{name}", None, item
        yield from _of_table(own, ".{}", skip=("_parameters", "_buffers", "_modules"))
        for method in vars(type(value)).values():
            yield "", None, method if isinstance(method, FunctionType) else None


def _numpy_state() -> tuple[bytes, int]:
    _, keys, place, *_ = np.random.get_state()  # noqa: NPY002 - the generator that everybody shares
    return np.asarray(keys).tobytes(), int(place)


def _of_function(function: FunctionType) -> Iterator[Part]:
    if not is_users(function.__code__.co_filename):
        return
    yield "", None, getattr(function, "__wrapped__", None)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f"'s {name}", partial(_held, cell), _content(cell)
    space = function.__globals__
    for name in _names(function.__code__):
        if name in space:
            yield f"'s {name}", partial(_entry, space, name), space[name]
    for index, item in enumerate(function.__defaults__ or ()):
        yield f"'s default {index}", None, item


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function and those within it look up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _of_table(table: dict[Any, Any], form: str, skip: tuple[str, ...] = ()) -> Iterator[Part]:
    yield " (length)", partial(len, table), None
    for key, item in list(table.items()):
        if key not in skip:
            yield form.format(key), partial(_entry, table, key), item


def _token(value: Any) -> Any:
    """Equal for the same plain value, and for the same object and no other."""
    if isinstance(value, float):
        return float, value.hex()
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


def _entry(table: dict[Any, Any], key: Any) -> Any:
    return _token(dict.get(table, key))  # not what a class of the user's makes of it


def _held(cell: CellType) -> Any:
    return _token(_content(cell))


def _item(items: list[Any] | tuple[Any, ...], index: int) -> Any:
    return _token(items[index]) if index < len(items) else None


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_of_users(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return is_users(getattr(module, "__file__", None) or "")


def lines_that_change(
    function: Callable[[], Any], state: State, progress: Callable[[], int]
) -> list[tuple[str, Place, int]]:
    """Runs ``function`` and says where each entry of ``state`` changes first.

    What breaks change is live, and fine; so is what changes before the first line of the user's.

    Args:
        function: the run.
        state: the entries to look at.
        progress: how many operations have run.

    Returns:
        Name, the user's line, and how many operations came before that, in order of execution.
    """
    now = state.look()
    found: dict[str, tuple[str, Place, int]] = {}
    line: tuple[CodeType, int, int] | None = None
    live = True

    def settle() -> None:
        for name in state.changed(now):
            now[name] = state.entries[name]()
            if live and line is not None:
                code, number, at = line
                found.setdefault(name, (name, place_of_line(code, number), at))

    def look(frame: FrameType, *_event: Any) -> Any:
        nonlocal line, live
        if not is_users(frame.f_code.co_filename):
            return None
        settle()
        line, live = (frame.f_code, frame.f_lineno, progress()), capturing()
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        function()
    finally:
        sys.settrace(before)
    settle()
    return list(found.values())
