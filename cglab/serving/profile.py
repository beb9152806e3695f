"""A server's own profile, read by the lab's trace reader: what ran on the device, and how long it waited.

A profiled run is never a timed one: the profiler's own cost falls on every step.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from cglab.errors import InputError, ResultsError, ServerError
from cglab.measure.trace import Trace
from cglab.measure.trace_file import load_trace
from cglab.serving.endpoint import Endpoint
from cglab.serving.workload import Body

_RANK = re.compile(r"-((?:[A-Z]+-\d+-?)+)\.trace\.json(?:\.gz)?$")
_POLL = 0.25


def profile(
    server: Endpoint,
    bodies: Sequence[Body],
    folder: str | Path,
    *,
    activities: Sequence[str] = ("CPU", "GPU"),
    deadline: float = 300.0,
) -> dict[str, Trace]:
    """Sends requests one by one while every rank of a server is profiled.

    Args:
        server: on this machine, with nothing else to do.
        bodies: what to send, as ``/generate`` takes it; a few requests make traces of tens of megabytes.
        folder: where the server writes its traces; each profile in a folder of its own below it.
        activities: ``CPU`` alone for a server on a CPU.
        deadline: seconds to wait for the traces once the profile has ended.

    Returns:
        A trace by rank, such as ``TP-0``. Times in microseconds, as the reader gives them.

    Raises:
        InputError: without requests.
        ServerError: if the server does not answer, or no whole trace is there within the deadline.
    """
    if not bodies:
        raise InputError("a profile without requests shows nothing; give at least one body")
    place = Path(folder).resolve() / f"profile-{time.time_ns()}"
    place.mkdir(parents=True)
    server.post("/start_profile", {"output_dir": str(place), "activities": list(activities)})
    try:
        for body in bodies:
            server.post("/generate", body)
    finally:
        if server.alive():
            server.post("/stop_profile")
    return _collect(server, place, deadline)


def _collect(server: Endpoint, place: Path, deadline: float) -> dict[str, Trace]:
    """Every rank's trace, once the files are whole: they are written while they can be seen."""
    ends = time.monotonic() + deadline
    problem: Exception = ResultsError(f"no trace in {place}")
    while time.monotonic() < ends:
        files = sorted(place.rglob("*.trace.json*"))
        sizes = [file.stat().st_size for file in files]
        time.sleep(_POLL)
        if files and sizes == [file.stat().st_size for file in files]:
            try:
                return {_rank(file): load_trace(file) for file in files}
            except ResultsError as error:
                problem = error
        if not server.alive():
            break
    raise ServerError(
        f"no whole trace of the profile within {deadline:g} s ({problem}); the server's last lines:",
        fault="no profile", log_lines=server.log_tail(),
    )  # fmt: skip


def _rank(file: Path) -> str:
    match = _RANK.search(file.name)
    return file.name if match is None else match[1]
