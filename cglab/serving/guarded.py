"""A process that ends with its owner: when it is closed, at Ctrl-C, at exit, and when the owner is killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

GUARDIAN: Final = Path(__file__).parent / "scripts" / "guardian.py"
GRACE: Final = 10.0
"""Seconds from SIGTERM to SIGKILL."""
PATIENCE: Final = 20.0
"""Seconds beyond the grace that processes get to be gone, for a driver that is slow to give memory back."""


class GuardedProcess:
    """A command in a session of its own, under a guardian that outlives this process for as long as it takes.

    Should the guardian itself be killed, the process and its group go too; a part that left the group is then missed.

    Args:
        command: what to run, with its arguments.
        environment: all the variables that it gets.
        log: an open file for what it says.
        grace: seconds from SIGTERM to SIGKILL when it is ended; None for :data:`GRACE`.

    Attributes:
        pid: of the process itself; 0 if it could not be started.
    """

    pid: int

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: IO[bytes],
        grace: float | None = None,
    ) -> None:
        grace = GRACE if grace is None else grace
        # Its standard input is the pipe that ends it, so nothing of it is left however the next lines fail.
        guardian = subprocess.Popen(
            [sys.executable, "-I", str(GUARDIAN), str(grace), *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0, env=dict(environment),
            start_new_session=True,
        )  # fmt: skip
        self._guardian = guardian
        self._exit_codes: list[int] = []  # at most one; what ends the process writes it too
        try:
            self.pid = int(_report(guardian).readline() or 0)
        except BaseException:  # Ctrl-C: the guardian would end it all too, but nobody would wait for that
            _end(guardian, 0, grace + PATIENCE, [0], os.getpid())
            raise
        self._ended = weakref.finalize(
            self, _end, guardian, self.pid, grace + PATIENCE, self._exit_codes, os.getpid()
        )

    def exit_code(self, wait: float = 0.0) -> int | None:
        """How the process ended: its exit status, or the negative number of the signal; None while it runs.

        Args:
            wait: seconds to wait for its end; its end cuts them short.
        """
        unknown = not self._exit_codes and self._ended.alive
        if unknown and select.select([_report(self._guardian)], [], [], wait)[0]:
            self._exit_codes.append(_read_exit_code(self._guardian))
        return self._exit_codes[0] if self._exit_codes else None

    def end(self) -> None:
        """Ends the process and all that it started, and waits until they are gone. Again does nothing."""
        self._ended()


def _report(guardian: subprocess.Popen[bytes]) -> IO[Any]:
    assert guardian.stdout is not None  # noqa: S101 - it was asked for
    return guardian.stdout


def _read_exit_code(guardian: subprocess.Popen[bytes]) -> int:
    """What the guardian tells. One that tells nothing was killed, which takes the process along."""
    return int(_report(guardian).readline() or -signal.SIGKILL)


def _end(
    guardian: subprocess.Popen[bytes], pid: int, patience: float, exit_codes: list[int], owner: int
) -> None:
    """Also runs when the object is dropped and when the interpreter exits, so it holds no reference to it."""
    if os.getpid() != owner:
        return  # a fork of the owner exits
    assert guardian.stdin is not None  # noqa: S101 - it was asked for
    guardian.stdin.close()
    try:
        guardian.wait(patience)
    except subprocess.TimeoutExpired:
        guardian.kill()
        guardian.wait()
    if guardian.returncode and pid:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    if not exit_codes:
        exit_codes.append(_read_exit_code(guardian))
    _report(guardian).close()
