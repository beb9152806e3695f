"""A Python that has the stand-in for SGLang, so that all but the real servers runs in seconds."""

import contextlib
import os
import stat
import sys
from pathlib import Path

import pytest

from cglab.serving import guarded, server
from cglab.serving.arm import ServerArm
from cglab.serving.installed import ask
from tests.serving.processes import descendants, gone

FAKE = Path(__file__).parent / "fake"


def make_python(folder: Path, version: str = "0.5.23") -> Path:
    """A Python whose SGLang is the stand-in, of some version."""
    site = folder / "site"
    (site / f"sglang-{version}.dist-info").mkdir(parents=True)
    (site / f"sglang-{version}.dist-info" / "METADATA").write_text(f"Name: sglang\nVersion: {version}\n")
    python = folder / "python"
    path = os.pathsep.join([str(FAKE), str(site)])
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{path}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


@pytest.fixture(scope="session")
def fake_python(tmp_path_factory):
    return make_python(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="session")
def installed(fake_python):
    return ask(fake_python)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    """The stand-in has a child that ignores SIGTERM: nobody needs to wait ten seconds for it."""
    monkeypatch.setattr(guarded, "GRACE", 0.3)


@pytest.fixture
def pids(tmp_path):
    """The process ids of the stand-in and of its two children, once it is there."""
    return lambda: [int(each) for each in (tmp_path / "pids").read_text().split()]


@pytest.fixture
def make_arm(tmp_path, fake_python):
    """An arm of the stand-in; ``mode`` is how it misbehaves."""

    def make(mode: str = "", **options) -> ServerArm:
        environment = {
            "FAKE_PIDS": str(tmp_path / "pids"),
            "SGLANG_FAKE": mode,
            **options.pop("environment", {}),
        }
        return ServerArm("fake", "pico-gqa", environment=environment, python=fake_python, **options)

    return make


@pytest.fixture
def launch(tmp_path, make_arm):
    """Starts the stand-in, and ends it with the test."""
    with contextlib.ExitStack() as stack:

        def start(mode: str = "", *, deadline_s: float = 200.0, port: int | None = None, **options):
            arm = make_arm(mode, **options)
            return stack.enter_context(
                server.launch(arm, log_folder=tmp_path / "logs", deadline_s=deadline_s, port=port)
            )

        yield start


@pytest.fixture(scope="session")
def real_server(tmp_path_factory):
    """One real server on the CPU for all tests that only ask it; in its end, its processes and port are looked for."""
    arm = ServerArm("real", "pico-gqa", device="cpu", arguments=("--dtype", "float32"))
    with server.launch(arm, log_folder=tmp_path_factory.mktemp("real"), deadline_s=400) as started:
        family = [started.pid, *descendants(started.pid)]
        yield started
    assert len(family) >= 3  # with scheduler and detokenizer
    assert all(map(gone, family))
    assert server.check_port(started.port)
