"""A process of SGLang that computes decode steps when it is asked to: no server, no scheduler, its ModelRunner alone.

It stays up between its turns, so that other arms can take theirs on the same device; a process that waits for a line
uses no device. What it is asked lies in ``scripts/token_latency.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from cglab.errors import ServerError
from cglab.serving.arm import SHIM, plain_environment
from cglab.serving.diagnosis import NEXT_STEP, Fault, describe_exit, diagnose
from cglab.serving.guarded import GuardedProcess
from cglab.serving.installed import Installed
from cglab.serving.scrape import GraphCapture, captures

SCRIPT: Final = Path(__file__).with_name("scripts") / "token_latency.py"
READY_SECONDS: Final = 400.0
"""Until it has loaded its weights, compiled its kernels and captured; a first start on a machine takes minutes."""
ANSWER_SECONDS: Final = 120.0
SHOWN: Final = 12


class TokenWorker:
    """A running process; a context manager that ends it.

    Args:
        installed: the SGLang that it runs.
        arguments: of ``sglang.benchmark.one_batch``, the server's among them.
        on_cpu: what a CPU without AMX needs is put on its path.

    Attributes:
        facts: what it told of itself: ``attention`` backend, ``torch`` version, ``tokens`` of its cache.
        ready_s: seconds from its start until it answered.

    Raises:
        ServerError: it ended, or said nothing in time; with the end of its log.
    """

    def __init__(
        self,
        installed: Installed,
        arguments: Sequence[str],
        *,
        on_cpu: bool = False,
        deadline_s: float = READY_SECONDS,
    ) -> None:
        self.installed = installed
        self._folder = Path(tempfile.mkdtemp(prefix="cglab-token-"))
        self.log = self._folder / "worker.log"
        environment = plain_environment(os.environ) | {"HF_HUB_OFFLINE": "1"}
        if on_cpu:
            paths = (str(SHIM), environment.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        address = str(self._folder / "socket")
        started = time.monotonic()
        with socket.socket(socket.AF_UNIX) as listener, self.log.open("xb") as log:
            listener.bind(address)
            listener.listen()
            command = (str(installed.python), str(SCRIPT), address, *arguments)
            self._process = GuardedProcess(command, environment=environment, log=log)
            try:
                self._lines = self._accept(listener, started + deadline_s).makefile("rw", encoding="utf-8")
                self.facts = self._answer()
            except BaseException:  # Ctrl-C too
                self._process.end()
                raise
        self.ready_s = time.monotonic() - started

    @property
    def captured(self) -> tuple[GraphCapture, ...]:
        """What it has captured, by its log."""
        return captures(self.log.read_text(encoding="utf-8", errors="replace"), {})

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """Asks for one thing and waits for the answer.

        Raises:
            ServerError: it ended, or gave no answer in time.
        """
        try:
            self._lines.write(json.dumps({"do": do, **what}) + "\n")
            self._lines.flush()
        except OSError as error:
            raise self._failure(f"takes no order ({error})") from error
        return self._answer()

    def close(self) -> None:
        """Ends it; its log goes with it. Again does nothing."""
        self._lines.close()
        self._process.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self, listener: socket.socket, deadline: float) -> socket.socket:
        listener.settimeout(0.25)
        while time.monotonic() < deadline:
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                if self._process.exit_code() is not None:
                    raise self._failure("ended before it was ready") from None
                continue
            connection.settimeout(ANSWER_SECONDS)
            return connection
        raise self._failure("was not ready in time")

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.readline()
        except OSError as error:  # a timeout among them
            raise self._failure(f"gave no answer within {ANSWER_SECONDS:g} s") from error
        if not line:
            raise self._failure("ended instead of answering")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self, fact: str) -> ServerError:
        """The error for a fact, with what its log and its exit status tell; the log stays."""
        code = self._process.exit_code(2.0)
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        fault = Fault.SILENT if code is None else diagnose(lines, code).fault
        ended = "" if code is None else f"; it ended with {describe_exit(code)}"
        return ServerError(
            f"SGLang {self.installed.version} {fact}{ended}; {NEXT_STEP[fault]}. The log is {self.log}; its end:",
            fault=fault, log_lines=lines[-SHOWN:],
        )  # fmt: skip
