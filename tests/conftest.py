"""Fixtures and rules of the unit tests."""

import gc
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # A core for each worker and what it starts; read when torch is loaded.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# A shell that starts a command in the background has it, and what it starts, ignore Ctrl-C; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    # Read when a kernel is defined, so before anything imports one: without a device kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The GPU machine may have only what the notebooks need.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # A loaded machine is slow, and is no finding. Fixtures that examples share hold what examples leave as it was.
    unhurried = settings(
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.register_profile("local", unhurried)
    settings.register_profile("ci", unhurried, derandomize=True, print_blob=True)
    settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu``, with the reason, where there is no CUDA device.

    A test that is skipped never asks for its fixtures, so that they are there is looked at before.
    """
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    if lost := [f"{item.nodeid} ({name})" for item in marked for name in missing_fixtures(item)]:
        raise pytest.UsageError(
            f"tests that would only fail on a GPU, for fixtures not found: {', '.join(lost)}"
        )
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def missing_fixtures(item: pytest.Item) -> list[str]:
    """Arguments of a test that neither a fixture nor its parameters give."""
    if not isinstance(item, pytest.Function):
        return []
    given = {"request", *(item.callspec.params if hasattr(item, "callspec") else ())}
    return [name for name in item.fixturenames if name not in {*given, *item._fixtureinfo.name2fixturedefs}]


def seed_all() -> None:
    import numpy as np

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - code under test may use the global generator
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same seeds, so that an order of tests changes nothing."""
    seed_all()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef) -> Generator[None, object, object]:
    """Make what tests share from the same seeds, whichever of them asks first and when."""
    if fixturedef.scope == "function":
        return (yield)
    with torch.random.fork_rng(devices=[]):
        seed_all()
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def loaded_late() -> Generator[None]:
    """A capture brings in what torch loads late; the end of the process finds nothing frozen."""
    import cglab

    with cglab.capture(lambda x: x.sum(-1).relu(), slots={"x": cglab.Slot()}, buckets=(1,)) as captured:
        captured(x=torch.ones(1, 2))
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def frozen_heap(loaded_late) -> None:
    """Captures and closed labs collect garbage; what was imported is not worth looking through a thousand times.

    At every file anew: its imports are new (a compiler alone is half a million objects), and code under test thaws.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def cuda() -> torch.device:
    """The GPU; a test that takes it carries the marker ``gpu``."""
    return torch.device("cuda")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def environment(root) -> dict[str, str]:
    """A process's environment in which this checkout's package is found from every folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
