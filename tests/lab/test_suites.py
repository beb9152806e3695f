"""Test suites as benches: what is run, and what is recorded of it."""

import pytest
import torch

from cglab.errors import InputError, ResultsError
from cglab.lab import suites

CPU = torch.device("cpu")
SUITE = """
import pytest
def test_good(): pass
def test_bad(): assert False
@pytest.mark.skip
def test_left_out(): pass
"""


@pytest.fixture
def asked(monkeypatch):
    """What pytest was asked to run, without running it."""
    found = []

    def run(arguments, device):
        found.append([each for each in arguments if each.endswith(".ipynb")])
        return {
            "tests": 3.0,
            "failures": 0.0,
            "errors": 0.0,
            "skipped": 1.0,
            "exit_status": 0.0,
            "seconds": 1.0,
        }

    monkeypatch.setattr(suites, "run_pytest", run)
    return found


def test_all_notebooks_run_or_those_asked_for(asked):
    suites.notebooks(CPU)
    assert asked[-1] == sorted(f"notebooks/{path.name}" for path in suites.FOLDER.glob("*.ipynb"))
    (record,) = suites.notebooks(CPU, names=("00", "03"))
    assert asked[-1] == ["notebooks/00_start_here.ipynb", "notebooks/03_frozen_kv_mtp.ipynb"]
    assert record.metrics["passed"] == 2 and record.metrics["ok"] and record.command[1:3] == asked[-1]
    suites.notebooks(CPU, quick=True)
    assert asked[-1] == ["notebooks/00_start_here.ipynb"]
    suites.notebooks(CPU, quick=True, names=("00", "03"))
    assert len(asked[-1]) == 2, "those that are named are run"


def test_a_notebook_that_does_not_exist_is_refused_with_those_that_do(asked):
    with pytest.raises(InputError, match=r"no notebook is called 77.*00_start_here.ipynb"):
        suites.notebooks(CPU, names=("00", "77"))
    assert not asked


def test_a_suite_that_fails_is_counted_and_one_that_cannot_start_is_told(tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text(SUITE)
    counts = suites.run_pytest([str(path)], CPU)
    assert [counts[name] for name in suites.COUNTS] == [3, 1, 0, 1] and counts["exit_status"] == 1
    with pytest.raises(ResultsError, match="pytest gave no report"):
        suites.run_pytest(["--no-such-option"], CPU)
