"""Imports go down only, and the contract that says so bites."""

import subprocess
import sys
from pathlib import Path

import pytest


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", command, "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_imports_go_down_only(root):
    run = lint_imports(root)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("lab", "import cglab.graphs", True),
        ("graphs", "import cglab.lab", False),
        ("graphs", "def late():\n    import cglab.lab", False),
        ("errors", "import cglab.settings", False),
        ("unheard_of", "", False),
    ],
)
def test_the_contract_catches_a_planted_import(tmp_path, root, module, source, allowed):
    (tmp_path / "pyproject.toml").write_text((root / "pyproject.toml").read_text())
    package = tmp_path / "cglab"
    package.mkdir()
    for name in ("__init__", "errors", "settings", "notebook", "graphs", "lab"):
        (package / f"{name}.py").touch()
    (package / f"{module}.py").write_text(source)
    run = lint_imports(tmp_path)
    assert (run.returncode == 0) == allowed, run.stdout + run.stderr
