"""Which processes there are, and whether they are gone."""

import contextlib
import os
import time
from pathlib import Path


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody collected yet has."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_for(what, seconds=200.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """Every process below one."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *descendants(child))]
