"""What loads, scrapes and parity need of a running server: an address, its health and its last words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from cglab.errors import ServerError


class Answer(Protocol):
    """An HTTP answer, as httpx gives it."""

    @property
    def status_code(self) -> int:
        """HTTP status."""
        ...

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

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        ...

    def get(self, path: str) -> Answer:
        """Asks it; raises ``ServerError`` if it does not answer."""
        ...

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Tells it; raises ``ServerError`` if it does not answer."""
        ...


def read_json(answer: Answer, path: str) -> Any:
    """The JSON of an answer.

    Args:
        answer: of a server.
        path: what was asked, for the message.

    Raises:
        ServerError: for another status than 200, or a body that is no JSON.
    """
    if answer.status_code != 200:
        raise ServerError(f"{path} answered with status {answer.status_code}: {answer.text[:500]}")
    try:
        return json.loads(answer.text)
    except ValueError as error:
        raise ServerError(f"{path} answered with something else than JSON: {answer.text[:200]!r}") from error
