"""Test suites as benches, so that what passed on a GPU machine is recorded like any other result."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import torch

from cglab import settings
from cglab.errors import InputError, ResultsError
from cglab.measure.record import Record, make_record, new_run
from cglab.measure.tree import PACKAGE

ROOT = PACKAGE.parent
FOLDER = ROOT / "notebooks"
COUNTS = ("tests", "failures", "errors", "skipped")


def run_pytest(arguments: Sequence[str], device: torch.device, *, limit: float = 580.0) -> dict[str, float]:
    """Runs pytest on this repository in a process of its own.

    Args:
        arguments: what to run and how; the project's own ``addopts`` are left out.
        device: handed on as ``CGLAB_DEVICE``.
        limit: seconds until it is ended.

    Returns:
        Numbers of tests, failures, errors and skipped ones, and seconds.

    Raises:
        ResultsError: if no report came out of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-o", "addopts=", "--import-mode=importlib", "-q"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        started = time.perf_counter()
        try:
            ended = subprocess.run(
                command, cwd=ROOT, env={**os.environ, "CGLAB_DEVICE": device.type}, timeout=limit,
                stdout=sys.stderr, check=False,
            )  # fmt: skip
            suite = ElementTree.parse(report).getroot()
        except (subprocess.TimeoutExpired, OSError, ElementTree.ParseError) as error:
            raise ResultsError(
                f"pytest gave no report: {error}; run it by hand: {' '.join(command)}"
            ) from error
        suites = [suite] if suite.tag == "testsuite" else list(suite.iter("testsuite"))
        counts = {name: float(sum(int(each.get(name, 0)) for each in suites)) for name in COUNTS}
        return {**counts, "exit_status": float(ended.returncode), "seconds": time.perf_counter() - started}


def _record(bench: str, arguments: Sequence[str], device: torch.device) -> list[Record]:
    counts = run_pytest(arguments, device)
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    good = counts["exit_status"] == 0 and passed > 0
    return [
        make_record(
            bench=bench, arm="all", device=device, run=new_run(), model=settings.read_settings().model,
            metrics={**counts, "passed": passed, "ok": good}, command=["pytest", *arguments],
        )
    ]  # fmt: skip


def notebooks(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    names: Sequence[str] = (),
) -> list[Record]:
    """Notebooks under nbval, on the model of ``CGLAB_MODEL``.

    Args:
        device: where they run.
        quick: only the tour, unless others are named.
        progress: called once.
        names: beginnings of the names of those wanted, such as ``00``; all of them by default.

    Raises:
        InputError: for a name that no notebook begins with.
    """
    known = sorted(path.name for path in FOLDER.glob("*.ipynb"))
    for name in names:
        if not any(each.startswith(name) for each in known):
            raise InputError(f"no notebook is called {name}...; good names begin one of {', '.join(known)}")
    wanted = [name for name in known if not names or name.startswith(tuple(names))]
    progress("notebooks under nbval")
    paths = [f"{FOLDER.name}/{name}" for name in (wanted[:1] if quick and not names else wanted)]
    options = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=300"]
    rules = "--nbval-sanitize-with=tests/notebooks/sanitize.cfg"
    return _record("notebooks", [*paths, *options, rules], device)


def gpu_tests(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    only: str = "",
) -> list[Record]:
    """The tests that need a CUDA device.

    Args:
        device: where they run.
        quick: only those of the recording layer.
        progress: called once.
        only: an expression over their names, as pytest's ``-k`` takes it; the record tells it in its command.
    """
    progress("tests that need a CUDA device")
    layers = ("graphs",) if quick else ("graphs", "models", "runners", "engine", "measure", "lab")
    # Most of the time goes into starting processes and capturing, so a few workers share a device well.
    workers = ["-n", "6"] if find_spec("xdist") else []
    # By name as they end, so that a run that is cut short has told what failed.
    chosen = ["-k", only] if only else []
    paths = (f"tests/{layer}" for layer in layers)
    return _record("gpu-tests", ["-v", "-v", "-m", "gpu", *chosen, *workers, *paths], device)
