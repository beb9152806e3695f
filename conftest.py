"""What holds for every pytest run in this repository, unit tests and notebooks alike."""

import os

import pytest

# Before torch is imported, here and in the notebooks' kernels: one thread makes sums repeat bit for bit.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make the sanitize file absolute, or pytest started in a sub-folder fails in every cell."""
    rules = getattr(config.option, "nbval_sanitize_with", None)  # absent where nbval is not installed
    if rules:
        config.option.nbval_sanitize_with = str(config.rootpath / rules)


def pytest_report_header() -> str:
    """Say what the checks of environment.yml leave out."""
    return "environment.yml: parsed and compared with pyproject.toml; the conda solve itself is not run"
