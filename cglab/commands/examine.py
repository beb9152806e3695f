"""``doctor FILE:FUNCTION``: loads a function of the user's and says what would break its capture."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from cglab.commands.console import FAILS, HOLDS, Outcome
from cglab.errors import InputError, no_such
from cglab.graphs.doctor import doctor

Args = tuple[Any, ...]
EXAMPLE = "def example_inputs(): return (torch.randn(4, 8),)"


def examine(options: Namespace) -> Outcome:
    """Examines one function; status 1 if something was found.

    Raises:
        InputError: if there is no such file or function, its inputs are missing, or it fails on them.
    """
    file, _, name = options.target.rpartition(":")
    path = Path(file)
    if not name or not path.is_file():
        raise InputError(f"{options.target!r} is no FILE:FUNCTION with an existing file; try model.py:step")
    module = _load(path)
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(no_such(f"function of {path}", name, _functions(module)))
    args, inputs = _inputs(module, function, name, path)
    with _users(f"{name} itself fails on these inputs", path, "; give inputs that it runs on"):
        report = doctor(function, *args, **inputs)
    text = f"{name} in {path}: {report}" if report.healthy else str(report)
    value = {"target": options.target, **report.as_value()}
    return Outcome(text, value, HOLDS if report.healthy else FAILS)


def _load(path: Path) -> ModuleType:
    # Known by a name of its own: a file called torch.py must not take the place of torch.
    spec = importlib.util.spec_from_file_location(f"cglab_doctor_of_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is no Python file; name one that ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import would, for dataclasses and pickles of the file
    sys.path.insert(0, str(path.resolve().parent))
    with _users(f"{path} cannot be loaded", path):
        spec.loader.exec_module(module)
    return module


def _inputs(module: ModuleType, function: Any, name: str, path: Path) -> tuple[Args, dict[str, Any]]:
    """Positional and keyword inputs: of ``example_inputs()``, or none for a function that needs none."""
    # A module's own call takes anything, its forward does not.
    try:
        signature = inspect.signature(getattr(function, "forward", function))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{name} in {path} does not say what it takes, as it is not written in Python; "
            f"call it in a function of yours and name that"
        ) from error
    example = getattr(module, "example_inputs", None)
    if example is None or not signature.parameters:
        given: Any = ()
    else:
        if not callable(example):
            raise InputError(
                f"example_inputs of {path} is a {type(example).__name__}; make it a function: {EXAMPLE}"
            )
        with _users(f"example_inputs() of {path} fails", path, f"; it takes no argument, as in: {EXAMPLE}"):
            given = example()
        if not isinstance(given, tuple | dict):
            raise InputError(
                f"example_inputs() of {path} gives a {type(given).__name__}; "
                f"give a tuple of positional or a dict of keyword inputs: {EXAMPLE}"
            )
    args, inputs = ((), given) if isinstance(given, dict) else (given, {})
    try:
        signature.bind(*args, **inputs)
    except TypeError as error:
        advice = f"example_inputs() of {path} must fit it" if example else f"define in {path}, say: {EXAMPLE}"
        raise InputError(f"{name}{signature} cannot be called ({error}); {advice}") from error
    return args, inputs


@contextmanager
def _users(what: str, path: Path, advice: str = "") -> Iterator[None]:
    """Runs code of the user's: however it ends, but for an interrupt, says nothing about a capture."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InputError(f"{what}: {_told(error, path)}{advice}") from error


def _functions(module: ModuleType) -> list[str]:
    own = inspect.getmembers(module, lambda value: getattr(value, "__module__", None) == module.__name__)
    return [name for name, value in own if inspect.isfunction(value)]


def _told(error: BaseException, path: Path) -> str:
    """Kind, message and, where it lies in the user's file, line of an error."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path.resolve())]
    return f"{type(error).__name__}: {error}" + (f", line {lines[-1]}" if lines else "")
