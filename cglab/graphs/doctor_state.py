"""Python state that a function reaches: what of it a call changes, and at which line.

A replay runs no Python, so a counter stands still and a list stops growing. What a call changed is seen by looking
before and after; the line, only if something was, by one more run that looks after every line of the user's.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cglab.errors import Place
from cglab.graphs.breaks import capturing
from cglab.graphs.doctor_parts import PLAIN, Read, parts
from cglab.graphs.places import is_users, place_of_line

MOST_ENTRIES = 20_000
"""Entries that are looked at; a function that reaches more is looked at in part, and that is told."""


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


def reached(roots: Iterable[tuple[str, Any]]) -> State:
    """The Python state that can be reached from ``roots``: attributes, containers, closures and globals by name.

    Objects of Python's and torch's own are not looked into, but for modules, without their parameters: a tensor that is
    written in place is data. The global generators of Python and NumPy are entries too, and so are torch's seed and
    default dtype.

    Args:
        roots: a function, and what it is given, each with a name; two may have the same.
    """
    entries: dict[str, Read] = {
        "random's generator": lambda: hash(random.getstate()),
        "numpy.random's generator": _numpy_state,
        "torch's seed": torch.initial_seed,
        "torch's default dtype": torch.get_default_dtype,
    }
    seen: set[int] = set()
    waiting = deque(roots)  # what is near comes first
    while waiting and len(entries) < MOST_ENTRIES:
        name, value = waiting.popleft()
        if id(value) in seen or isinstance(value, (*PLAIN, Tensor, ModuleType)):
            continue
        seen.add(id(value))
        for key, read, inner in islice(parts(value), MOST_ENTRIES):
            if read is not None:
                entries[_unlike(f"{name}{key}", entries)] = read
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
            item, (*PLAIN, type, ModuleType, FunctionType, MethodType)
        ):
            seen.add(id(item))
            waiting += [inner for _, _, inner in parts(item)]


def _unlike(name: str, entries: Mapping[str, Read]) -> str:
    """The name, marked where another entry has it: neither may hide the other."""
    while name in entries:
        name += "'"
    return name


def _numpy_state() -> tuple[bytes, int]:
    _, keys, place, *_ = np.random.get_state()  # noqa: NPY002 - the generator that everybody shares
    return np.asarray(keys).tobytes(), int(place)


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

    def enter(frame: FrameType, *_event: Any) -> Any:
        nonlocal line, live
        if not is_users(frame.f_code.co_filename):
            return None
        settle()
        caller = line, live

        def look(frame: FrameType, event: str, _value: Any) -> Any:
            nonlocal line, live
            settle()
            # Once a callee has returned, its caller's line goes on: seen.append(soft(x)) appends only then.
            line, live = caller if event == "return" else (_at(frame), capturing())
            return look

        line, live = _at(frame), capturing()
        return look

    def _at(frame: FrameType) -> tuple[CodeType, int, int]:
        return frame.f_code, frame.f_lineno, progress()

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        function()
    finally:
        sys.settrace(before)
    settle()
    return list(found.values())
