"""Runs one server for an owner that may die at any moment, and leaves nothing of it behind.

    python guardian.py GRACE COMMAND...

Standard input is a pipe whose other end only the owner holds: when it closes, because the owner closed it or is gone,
every process of the server gets SIGTERM and, GRACE seconds later, SIGKILL. Standard output tells the owner the
server's process id and then its exit status, a line each; what the server says goes where standard error goes.

Runs alone, on the standard library of any Python from 3.10 on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

ON_LINUX = sys.platform.startswith("linux")
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
OWNER_CHECK = (
    1.0  # seconds; a forked child of the owner may hold the pipe open, so its id is looked at as well
)
CANNOT_START = 127  # as a shell says it


class OwnerIsGone:
    """Whether the owner closed the pipe, died, or somebody asked the guardian to end."""

    def __init__(self) -> None:
        self._owner = os.getppid()
        self._asked = False
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True

    def wait(self) -> bool:
        """Waits for something to happen, at most :data:`OWNER_CHECK` seconds."""
        ready, _, _ = select.select([0, self._wake], [], [], OWNER_CHECK)
        if self._wake in ready:
            os.read(self._wake, 4096)
        closed = 0 in ready and not os.read(0, 4096)
        return closed or self._asked or os.getppid() != self._owner


def descendants() -> list[int]:
    """Every process below this one. Only Linux tells; elsewhere the server's process group has to do."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(os.getpid(), ()))
    for each in found:
        found.extend(children.get(each, ()))
    return found


def signal_all(server: int, number: int) -> None:
    """Sends a signal to the server's group and to whatever left that group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(server, number)
    for each in descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, number)


def reap(statuses: dict[int, int]) -> bool:
    """Collects children that ended, with their exit status; False once there is none left."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        return False
    return True


def end(server: int, statuses: dict[int, int], grace: float) -> None:
    """Ends what is left; as orphans fall to this process, none is missed."""
    deadline = time.monotonic() + grace
    signal_all(server, signal.SIGTERM)
    while reap(statuses):
        if time.monotonic() >= deadline:
            signal_all(server, signal.SIGKILL)
        time.sleep(0.02)


def tell(number: int) -> None:
    """A line to the owner, if it is still there."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{number}\n".encode())


def die_with_guardian() -> None:
    """In the server, before it starts: a guardian that is killed takes the server along."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Exit status 0 once nothing of the server is left."""
    grace, command = float(arguments[0]), list(arguments[1:])
    gone = OwnerIsGone()
    if ON_LINUX:
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
    try:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, start_new_session=True,
            preexec_fn=die_with_guardian if ON_LINUX else None,  # noqa: PLW1509 - no threads here
        ).pid  # fmt: skip
    except OSError as error:
        sys.stderr.write(f"{command[0]} could not be started: {error}\n")
        tell(0)
        tell(CANNOT_START)
        return 0
    tell(server)
    statuses: dict[int, int] = {}
    while reap(statuses) and server not in statuses and not gone.wait():
        pass
    by_itself = server in statuses
    if by_itself:
        tell(statuses[server])
    end(server, statuses, grace)
    if not by_itself:
        tell(statuses[server])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
