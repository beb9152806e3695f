"""What loads, scrapes and parity need of a running server: an address, its health and its last words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from cglab.errors import ServerError

KEYS: Final = ("OPENAI_API_KEY", "API_KEY")
"""Variables that SGLang's clients send as a key; the first as ``Bearer``."""


class Answer(Protocol):
    """An HTTP answer, as httpx gives it."""

    @property
    def text(self) -> str:
        """The body as text."""
        ...


class Install(Protocol):
    """Where a server's SGLang is."""

    @property
    def python(self) -> Path:
        """The interpreter that has it."""
        ...

    @property
    def version(self) -> str:
        """Its version, such as ``0.5.23``."""
        ...


class Endpoint(Protocol):
    """A running server, or a stand-in for it."""

    @property
    def url(self) -> str:
        """Such as ``http://127.0.0.1:30000``."""
        ...

    @property
    def key(self) -> str | None:
        """What it must be asked with; None for a server without a key."""
        ...

    @property
    def installed(self) -> Install:
        """The SGLang that it runs."""
        ...

    @property
    def log(self) -> Path:
        """What it printed so far."""
        ...

    def alive(self) -> bool:
        """Whether its process runs."""
        ...

    def log_tail(self, lines: int = 12) -> list[str]:
        """The last lines of its log."""
        ...

    def get(self, path: str) -> Answer:
        """Asks it; raises ``ServerError`` if it does not answer, or refuses."""
        ...

    def post(self, path: str, json: Any = None) -> Answer:
        """Sends JSON; raises ``ServerError`` if it does not answer, or refuses."""
        ...


def read_json(server: Endpoint, path: str, answer: Answer) -> dict[str, Any]:
    """The object that a server answered with; its key, which SGLang tells in several places, is blanked.

    Args:
        server: that answered.
        path: what was asked, for the message.
        answer: what it said.

    Raises:
        ServerError: if it is no JSON object.
    """
    text = without_key(server.key, answer.text)
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise odd(server, f"{path} was answered with something else than a JSON object: {text[:200]!r}")
    return value


def without_key(key: str | None, text: str) -> str:
    """What a server said, fit to be quoted or kept: its key is blanked, if it has one."""
    return text if key is None else text.replace(key, "***")


def with_key(server: Endpoint, variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process that asks a server: its key, where SGLang's clients look for one, and nobody else's."""
    others = {name: value for name, value in variables.items() if name not in KEYS}
    return others if server.key is None else {**others, KEYS[0]: server.key}


def odd(server: Endpoint, fact: str) -> ServerError:
    """The error for a server that lives and does not do what it was asked."""
    return ServerError(
        f"{fact}; its last lines:", fault="an answer of another form", log_lines=server.log_tail()
    )
