"""``doctor FILE:FUNCTION``: loads a function of the user's and says what would break its capture."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from cglab.commands.console import FAILS, HOLDS, Outcome
from cglab.errors import CglabError, InputError
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
        raise InputError(f"{path} has no function {name!r}; it has {', '.join(_functions(module)) or 'none'}")
    args, inputs = _inputs(module, function, name, path)
    try:
        report = doctor(function, *args, **inputs)
    except CglabError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{name} itself fails on these inputs: {_told(error, path)}; give inputs that it runs on"
        ) from error
    text = f"{name} in {path}: {report}" if report.healthy else str(report)
    value = {"target": options.target, **report.as_value()}
    return Outcome(text, value, HOLDS if report.healthy else FAILS)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is no Python file; name one that ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # as an import would, for dataclasses and pickles of the file
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except CglabError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{path} cannot be loaded: {_told(error, path)}") from error
    return module


def _inputs(module: ModuleType, function: Any, name: str, path: Path) -> tuple[Args, dict[str, Any]]:
    """Positional and keyword inputs: of ``example_inputs()``, or none for a function that needs none."""
    # A module's own call takes anything, its forward does not.
    signature = inspect.signature(getattr(function, "forward", function))
    example: Callable[[], Any] | None = getattr(module, "example_inputs", None)
    if example is None or not signature.parameters:
        given: Any = ()
    else:
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
