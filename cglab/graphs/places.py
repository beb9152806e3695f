"""Finds the user's own line in a stack: the deepest frame that is neither torch's nor the recorder's."""

from __future__ import annotations

import functools
import linecache
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

from cglab.errors import Place

_PACKAGE = Path(__file__).resolve().parent.parent
_RECORDER = tuple(f"{_PACKAGE / part}{os.sep}" for part in ("graphs", "ui", "commands"))
_TORCH = str(Path(torch.__file__).resolve().parent)
_STANDARD = sysconfig.get_path("stdlib")


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a file is neither torch's, Python's nor of those parts of this package that run a user's function."""
    inside = filename.startswith((*_RECORDER, _TORCH, "<frozen", "<string>", "<__array_function__"))
    return not inside and not (filename.startswith(_STANDARD) and "site-packages" not in filename)


def place_of_line(code: CodeType, line: int) -> Place:
    """A line of a function, from 1 on in its file."""
    return _place(code.co_filename, line, code.co_name)


def _place(filename: str, line: int, function: str) -> Place:
    return Place(filename, line, function, linecache.getline(filename, line).strip())


def place_of_stack(frame: FrameType | None) -> Place | None:
    """The innermost line of the user's code at or above ``frame``."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return _place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def _walk(traceback: TracebackType | None) -> Iterator[tuple[str, int, str]]:
    while traceback is not None:
        code = traceback.tb_frame.f_code
        yield code.co_filename, traceback.tb_lineno, code.co_name
        traceback = traceback.tb_next


def place_of_error(error: BaseException) -> Place | None:
    """The innermost line of the user's code that ``error`` passed through."""
    users = [step for step in _walk(error.__traceback__) if is_users(step[0])]
    return _place(*users[-1]) if users else None
