"""Fixtures and rules of the unit tests."""

import importlib.util
import os
import random
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # A core for each worker and what it starts; read when torch is loaded.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    # Read when a kernel is defined, so before anything imports one: without a device kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The GPU machine may have only what the notebooks need.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("local", deadline=None)
    settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu``, with the reason, where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same seeds, so that an order of tests changes nothing."""
    import numpy as np

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - code under test may use the global generator
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parent.parent
