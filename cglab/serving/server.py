"""A running SGLang server: started on loopback, asked over HTTP, and gone without a trace when it is closed.

    with launch(ServerArm("eager", "pico-gqa", device="cpu"), log_folder="out") as server:
        print(server.get("/server_info").json()["version"])

It runs in a session of its own under a guardian process, so that it ends with the ``with`` block, at Ctrl-C, when the
interpreter exits, and also when a notebook's kernel is killed. It has a key that is made for it and ends with it, so
that nobody else on the machine can ask it.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import httpx

from cglab.errors import ClosedError, PortTakenError, ServerError
from cglab.serving.arm import KEY, LOOPBACK, ServerArm, command, takes_key
from cglab.serving.diagnosis import NEXT_STEP, Diagnosis, Fault, describe_exit, diagnose
from cglab.serving.endpoint import without_key
from cglab.serving.guarded import GuardedProcess
from cglab.serving.installed import Installed, ask, find_python

POLL: Final = 0.25  # seconds between two looks at a server that starts
SHOWN, SEARCHED = 12, 400  # last lines of a log in a message, and those that a reason is looked for in
TAIL_BYTES: Final = 1 << 18
UNAUTHORIZED: Final = 401
WIDEST: Final = 300  # letters of a log's line in a message


class RunningServer:
    """A server that was started; :func:`launch` makes it.

    Attributes:
        arm: what it was started as.
        installed: the SGLang that it runs.
        url: its address, on loopback.
        port: its port.
        pid: its process id.
        argv: its command line.
        key: what a request must have as ``Authorization: Bearer``; None where SGLang refuses to have one.
        log: file with all that it said; only its owner reads it, as a process of the server may tell the key.
        started_s: seconds from its start to its first healthy answer; None before that.
    """

    def __init__(
        self,
        arm: ServerArm,
        installed: Installed,
        port: int,
        process: GuardedProcess,
        log: Path,
        argv: Sequence[str],
        key: str | None,
    ) -> None:
        self.arm = arm
        self.installed = installed
        self.port = port
        self.url = f"http://{LOOPBACK}:{port}"
        self.log = log
        self.argv = tuple(argv)
        self.key = key
        self.pid = process.pid
        self.started_s: float | None = None
        self._process = process
        self._closed = False
        # Whatever proxy the machine is told to use is not for loopback.
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._client = httpx.Client(base_url=self.url, headers=headers, trust_env=False)

    def alive(self) -> bool:
        """Whether its process runs."""
        return not self._closed and self._process.exit_code() is None

    def log_tail(self, lines: int = SHOWN) -> list[str]:
        """The last lines of its log that say something, oldest first, its key blanked."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            text = without_key(self.key, file.read().decode(errors="replace"))
        return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]

    def get(self, path: str, *, timeout: float = 30.0) -> httpx.Response:
        """Asks for a path such as ``/server_info``.

        Args:
            path: from the root.
            timeout: seconds for the whole answer to begin, and between its parts.

        Raises:
            ServerError: it died, gave no answer in time, or refused; with the end of its log.
            ClosedError: it was closed.
        """
        return self._ask("GET", path, None, timeout)

    def post(self, path: str, json: Any = None, *, timeout: float = 600.0) -> httpx.Response:
        """Sends JSON to a path such as ``/generate``.

        Raises:
            ServerError: as :meth:`get`.
            ClosedError: it was closed.
        """
        return self._ask("POST", path, json, timeout)

    def close(self) -> None:
        """Ends it and all its processes, and waits until they are gone; again does nothing. The log stays."""
        self._closed = True
        self._client.close()
        self._process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "alive" if self.alive() else "dead"
        return f"RunningServer({self.arm.name}, SGLang {self.installed.version}, {self.url}, {state})"

    def wait_until_healthy(self, deadline_s: float) -> None:
        """Waits for the first healthy answer.

        Raises:
            ServerError: it died first, or was not healthy in time.
        """
        started = time.monotonic()
        while (left := started + deadline_s - time.monotonic()) > 0:
            if self._process.exit_code(min(POLL, left)) is not None:
                raise self._failure("did not start", Fault.DIED)
            try:
                if self._client.get("/health", timeout=min(5.0, left)).is_success:
                    self.started_s = time.monotonic() - started
                    return
            except httpx.TransportError:
                continue  # nobody listens yet
        raise self._failure(f"was not healthy after {deadline_s:g} s", Fault.LATE)

    def _ask(self, method: str, path: str, json: Any, timeout: float) -> httpx.Response:
        if self._closed:
            raise ClosedError(f"the server of arm {self.arm.name} was closed; launch it again")
        try:
            answer = self._client.request(method, path, json=json, timeout=timeout)
        except httpx.TransportError as error:
            # A connection breaks a moment before the process is gone.
            self._process.exit_code(2.0)
            fact = f"gave no answer to {method} {path} ({type(error).__name__})"
            raise self._failure(fact, Fault.SILENT) from error
        if not answer.is_success:
            said = without_key(self.key, answer.text)[:WIDEST]
            if answer.status_code == UNAUTHORIZED:
                said = "it wants another key than the lab gave it, as where a file of --config names one"
            fact = f"refused {method} {path} with status {answer.status_code}: {said}"
            raise self._failure(fact, Fault.REFUSED)
        return answer

    def _failure(self, fact: str, while_alive: Fault) -> ServerError:
        """The error for a fact, with what the log and the exit status tell if it died."""
        exit_code = self._process.exit_code()
        found = Diagnosis(while_alive)
        if exit_code is not None:
            fact += f"; it ended with {describe_exit(exit_code)}"
            found = diagnose(self.log_tail(SEARCHED), exit_code)
        sign = f" ({found.sign.strip()[:WIDEST]})" if found.sign else ""
        return ServerError(
            f"the server of arm {self.arm.name} {fact}. Most likely: {found.fault}{sign}; {NEXT_STEP[found.fault]}. "
            f"The log is {self.log}; its last lines:",
            fault=found.fault, log_lines=[line[:WIDEST] for line in self.log_tail()],
        )  # fmt: skip


def launch(
    arm: ServerArm, *, log_folder: str | os.PathLike[str], deadline_s: float = 600.0, port: int | None = None
) -> RunningServer:
    """Starts an arm's server and waits until it is healthy.

    Args:
        arm: what to start.
        log_folder: made if it is not there; the log is ``NAME-1.log`` or the next free number.
        deadline_s: seconds until it must be healthy. Loading a large model and capturing takes minutes.
        port: where it listens on loopback; None for a free one.

    Returns:
        The server; a context manager that closes it.

    Raises:
        NotInstalledError: there is no SGLang.
        InputError: the arm asks for what this version does not have; ModelError and ToggleError are such.
        PortTakenError: something listens on the port.
        ServerError: it died or was not healthy in time; no process of it is left.
    """
    installed = ask(find_python(arm.python))
    chosen = free_port() if port is None else check_port(port)
    what = command(arm, installed, chosen)
    # In hex: in base 64 one of 64 begins with "-", which SGLang takes for an option.
    key = secrets.token_hex(32) if takes_key(arm) else None
    environment = {**what.environment, **({} if key is None else {KEY: key})}
    with _next_log(Path(log_folder), arm.name) as log:
        process = GuardedProcess(what.argv, environment=environment, log=log)
        path = Path(log.name)
    server = RunningServer(arm, installed, chosen, process, path, what.argv, key)
    try:
        server.wait_until_healthy(deadline_s)
    except BaseException:  # Ctrl-C too
        server.close()
        raise
    return server


def free_port() -> int:
    """A port of loopback on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> int:
    """``port`` if a server can listen there.

    Raises:
        PortTakenError: something listens there already, the system keeps it to itself, or it is no port: 0 would be
            any, and nobody would know which.
    """
    if port < 1:
        raise PortTakenError(f"port {port} is none; leave port out and a free one is taken")
    with socket.socket() as probe:
        # As the server will: what an earlier one left half closed is not in its way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            raise PortTakenError(
                f"port {port} of {LOOPBACK} cannot be had ({error}); leave port out and a free one is taken"
            ) from error
    return port


def _next_log(folder: Path, name: str) -> IO[bytes]:
    """A new file that its owner alone reads, as its folder if it is new: the logs of earlier instances stay."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    number = 1
    while True:
        try:
            return open(
                (folder / f"{name}-{number}.log").absolute(), "xb", opener=partial(os.open, mode=0o600)
            )
        except FileExistsError:
            number += 1
