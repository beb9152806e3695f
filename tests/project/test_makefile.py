"""`make` comes first for a newcomer: it finds a Python, says when there is none, and keeps Jupyter local."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def make(root: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # These tests may run under `make test`, whose own flags are not theirs.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    } | variables
    command = ["make", *arguments]
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture
def old_python(tmp_path):
    """An interpreter that says it is too old."""
    script = tmp_path / "old-python"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    return script


def test_no_fitting_python_is_said_clearly(root, tmp_path, old_python):
    run = make(root, "check", f"VENV={tmp_path / 'venv'}", f"PYTHON=no-such-python {old_python}")
    assert run.returncode != 0
    assert "needs Python 3.11 or newer" in run.stderr
    assert "make PYTHON=" in run.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    "target",
    [
        "demo",
        "lab",
        "test",
        "test-unit",
        "test-end-to-end",
        "test-notebooks",
        "test-sglang",
        "refresh",
        "check",
        "soak",
    ],
)
def test_every_command_is_listed_and_makes_the_environment_first(root, tmp_path, target):
    assert f"\n{target}\t" in make(root, "help").stdout
    plan = make(root, "--dry-run", target, f"VENV={tmp_path / 'venv'}").stdout
    assert "--constraint constraints.txt --editable '.[dev]'" in plan


def test_servers_get_an_environment_of_their_own_unless_one_is_named(root, tmp_path):
    plan = make(root, "--dry-run", "test-sglang", f"SERVERS={tmp_path / 'servers'}").stdout
    assert f"{tmp_path}/servers/bin/python -m pip install --no-compile --editable '.[sglang]'" in plan
    assert plan.strip().endswith("-m sglang tests/serving")
    named = make(root, "--dry-run", "test-sglang", "CGLAB_SGLANG_PYTHON=/opt/sglang/bin/python").stdout
    assert ".[sglang]" not in named


def test_environment_is_not_installed_again_until_its_parts_change(root, tmp_path):
    stamp = tmp_path / ".installed"
    stamp.touch()
    assert "pip install" not in make(root, "--dry-run", "check", f"VENV={tmp_path}").stdout
    plan = make(root, "--dry-run", "check", f"VENV={tmp_path}", "--what-if=constraints.txt").stdout
    assert "pip install" in plan


def test_lab_stays_on_this_machine_and_keeps_its_token(root):
    plan = make(root, "--dry-run", "lab").stdout
    assert "jupyter lab --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb --ip=127.0.0.1" in plan
    assert "token" not in plan


def test_audit_asks_about_every_pin_from_an_environment_of_its_own_and_is_no_part_of_test(root, tmp_path):
    assert "\naudit\t" in make(root, "help").stdout
    plan = make(root, "--dry-run", "audit", f"AUDIT={tmp_path / 'audit'}").stdout.strip().splitlines()
    assert plan[-1].endswith(f"{tmp_path}/audit/bin/python scripts/audit.py")
    assert f"{tmp_path}/audit/bin/python -m pip install 'pip-audit" in plan[-2]
    assert "pip-audit" not in make(root, "--dry-run", "test").stdout
    (offline,) = (
        make(root, "--dry-run", "audit", f"ADVISORIES={tmp_path}", "--old-file", ".venv/.installed")
        .stdout.strip()
        .splitlines()[-1:]
    )
    assert offline.endswith(f'.venv/bin/python scripts/audit.py --advisories "{tmp_path}"')


def test_make_test_checks_then_runs_every_test_once(root):
    plan = make(root, "--dry-run", "test").stdout.strip().splitlines()
    unit, whole, notebooks = plan[-3:]
    for line, which in ((unit, "not end_to_end"), (whole, "end_to_end")):
        assert "-m pytest --timeout=300" in line and line.endswith("--ignore=tests/notebooks tests")
        assert f"-m '{which} and not soak and not sglang'" in line, "between them each test once"
    assert "-m pytest --timeout=300" in notebooks and notebooks.endswith(" notebooks tests/notebooks")
    assert any(line.endswith("lint-imports") for line in plan[:-3])


def test_soak_ends_with_guards_taken_away(root):
    plan = make(root, "--dry-run", "soak").stdout.strip().splitlines()
    assert plan[-2].endswith("-m pytest --timeout=7200 -m soak")
    assert plan[-1].endswith("python scripts/mutation_check.py")


def test_tests_run_side_by_side_a_notebook_in_one_piece_and_on_a_gpu_in_turn(root, tmp_path):
    gpu = tmp_path / "nvidia-smi"
    gpu.touch(mode=0o755)
    paths = {"cpu": "/usr/bin:/bin", "gpu": f"{tmp_path}:/usr/bin:/bin"}
    plans = {name: make(root, "--dry-run", "test", PATH=path).stdout for name, path in paths.items()}
    for distribution in ("worksteal", "loadfile notebooks"):
        assert f"--numprocesses=0 --dist={distribution} " in plans["gpu"]
        if not shutil.which("nvidia-smi", path=paths["cpu"]):
            assert f"--numprocesses=logical --maxprocesses=4 --dist={distribution} " in plans["cpu"]
