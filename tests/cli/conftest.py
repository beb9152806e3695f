"""Runs the command as a user does, and in this process where only its answer matters."""

import json
import subprocess
import sys

import pytest

from cglab.cli import main


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """The command's contract is the same on every device; the CPU is always there."""
    monkeypatch.setenv("CGLAB_DEVICE", "cpu")


@pytest.fixture
def command(environment, tmp_path):
    """Runs ``cglab`` in a process of its own, in an empty folder."""

    def run(*words, seconds=120, **variables):
        return subprocess.run(
            [sys.executable, "-m", "cglab", *words],
            env={**environment, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )

    return run


@pytest.fixture
def ask(capsys):
    """Runs ``cglab`` in this process; exit status, standard output and standard error."""

    def run(*words):
        capsys.readouterr()  # what was said before is another command's
        status = main([str(word) for word in words])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def ask_json(ask):
    """As ``ask``, with ``--json``: exit status and the value."""

    def run(*words):
        status, out, _ = ask(*words, "--json")
        return status, json.loads(out)

    return run


@pytest.fixture(scope="session")
def toured():
    """The main job on a small lab, two buckets of the shipped model: the tour and the progress it reported."""
    import cglab
    from cglab.commands.tour import run_tour

    said = []
    with cglab.open("pico-gqa", device="cpu", max_batch=2, max_context=96) as lab:
        return run_tour(lab, said.append), said


@pytest.fixture(scope="session")
def tour(toured):
    """What the main job found."""
    return toured[0]
