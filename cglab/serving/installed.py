"""Which SGLang is there and what it can be asked for: told by the version itself, never assumed.

SGLang is never imported here: it may live in another environment, with another torch, and is asked in a process of
its own. What it answers is kept for the rest of this process.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from cglab.errors import InputError, NotInstalledError
from cglab.settings import SGLANG_PYTHON, read_settings, user_path

DESCRIBE: Final = Path(__file__).parent / "scripts" / "describe.py"
NO_SGLANG: Final = 3  # exit status of it
DEADLINE: Final = 300.0  # seconds; it imports torch, which a cold disk makes slow
VENV: Final = Path(__file__).resolve().parents[2] / ".venv-sglang" / "bin" / "python"
HOW_TO_GET_IT: Final = (
    "`make test-sglang` makes an environment for it, `pip install 'cglab[sglang]'` brings it into this one, "
    f"and {SGLANG_PYTHON} names the Python of one that is elsewhere"
)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a server.

    Attributes:
        choices: its good values; None if any may be given.
        default: what it is when left out; None also where that is no plain value.
        takes_value: whether a value follows.
    """

    choices: tuple[str, ...] | None
    default: bool | float | str | None
    takes_value: bool


@dataclass(frozen=True, slots=True)
class Installed:
    """An SGLang that is there.

    Attributes:
        python: the interpreter that has it.
        version: its version.
        arguments: of its server, by every spelling (``--tp-size``, ``--tensor-parallel-size``).
        variables: names of environment variables that its source mentions.
        modules: its modules, by full name.
    """

    python: Path
    version: str
    arguments: Mapping[str, Argument] = field(repr=False)
    variables: frozenset[str] = field(repr=False)
    modules: frozenset[str] = field(repr=False)

    def argument(self, spelling: str) -> Argument:
        """The argument of a spelling.

        Raises:
            InputError: this version has no such argument; near matches are named.
        """
        if spelling not in self.arguments:
            raise InputError(
                f"SGLang {self.version} has no argument {spelling}{_near(spelling, self.arguments)}; "
                f"`{self.python} -m sglang.launch_server --help` lists them"
            )
        return self.arguments[spelling]

    def check_variable(self, name: str) -> None:
        """Nothing, if a variable means something to this version, or is none of SGLang's.

        Raises:
            InputError: it looks like one of SGLang's and this version knows none of that name: it would be ignored.
        """
        if name.startswith("SGLANG_") and name not in self.variables:
            raise InputError(
                f"SGLang {self.version} has no variable {name}{_near(name, self.variables)}; "
                "leave it out, or take a version that has it"
            )


def find_python(explicit: str | Path | None = None) -> Path:
    """The Python that starts servers.

    Args:
        explicit: taken before all else; then ``CGLAB_SGLANG_PYTHON``, the environment of ``make test-sglang``, and
            this interpreter if it has SGLang.

    Raises:
        NotInstalledError: there is none; the message says how to get it.
    """
    named = explicit or read_settings().sglang_python
    if named is not None:
        python = user_path(named)
        if not (python.is_file() and os.access(python, os.X_OK)):
            raise NotInstalledError(f"{python} is no Python that can be run; {HOW_TO_GET_IT}")
        return (
            python.absolute()
        )  # not resolved: the link into an environment is what makes it that environment
    if VENV.is_file():
        return VENV
    if find_spec("sglang") is not None:
        return Path(sys.executable)
    raise NotInstalledError(f"no SGLang on this machine; {HOW_TO_GET_IT}")


@lru_cache
def ask(python: Path) -> Installed:
    """What the SGLang of an interpreter can be asked for; takes seconds, once for each interpreter.

    Raises:
        NotInstalledError: it has no SGLang, or one that does not import; the message ends with what it said.
    """
    try:
        run = subprocess.run(
            [str(python), str(DESCRIBE)], capture_output=True, text=True, timeout=DEADLINE, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalledError(f"{python} does not say whether it has SGLang: {error}") from error
    if run.returncode == NO_SGLANG:
        raise NotInstalledError(f"{python} has no SGLang; {HOW_TO_GET_IT}")
    if run.returncode:
        said = (run.stderr.strip().splitlines() or ["nothing"])[-1]
        raise NotInstalledError(
            f"the SGLang of {python} does not import; it said: {said}; run {python} -m sglang.launch_server --help "
            "and mend that environment"
        )
    try:
        return _installed(python, json.loads(run.stdout.strip().splitlines()[-1]))
    except (ValueError, LookupError, TypeError) as error:
        raise NotInstalledError(
            f"{python} answers as no Python does: {run.stdout[-200:]!r}; {HOW_TO_GET_IT}"
        ) from error


def _installed(python: Path, answer: Mapping[str, Any]) -> Installed:
    arguments = {
        spelling: Argument(
            None if each["choices"] is None else tuple(each["choices"]), each["default"], each["takes_value"]
        )
        for spelling, each in answer["arguments"].items()
    }
    return Installed(
        python, answer["version"], arguments, frozenset(answer["variables"]), frozenset(answer["modules"])
    )


def _near(name: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, names, n=3, cutoff=0.7)
    return f"; did you mean {' or '.join(found)}?" if found else ""
