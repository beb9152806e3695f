"""The package's state as git names it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cglab.errors import ResultsError
from cglab.measure.tree import PACKAGE, is_dirty, tree_hash

EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


def git(folder, *words):
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True, env=environment
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A commit with names that sort oddly, an executable, a link, and folders within folders."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    package = tmp_path / "cglab"
    for name in ("a.py", "a/b.py", "a-b.py", "a0.py", "deep/er/x.txt", "é.py", "z"):
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"content of {name}\n")
    (package / "run.sh").write_text("#!/bin/sh\n")
    (package / "run.sh").chmod(0o755)
    (package / "link").symlink_to("a.py")
    (package / "empty.py").touch()
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "x")
    return tmp_path


def test_equals_what_git_says(checkout):
    assert tree_hash(checkout / "cglab") == git(checkout, "rev-parse", "HEAD:cglab")
    assert is_dirty(checkout / "cglab") is False


def test_compiled_files_and_empty_folders_do_not_count(checkout):
    package = checkout / "cglab"
    wanted = tree_hash(package)
    for name in (
        "__pycache__/a.cpython-311.pyc",
        "deep/b.pyc",
        "deep/__pycache__/c.pyc",
        ".ipynb_checkpoints/n",
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(b"x")
    (package / "nothing" / "inside").mkdir(parents=True)
    assert tree_hash(package) == wanted


def test_every_change_counts(checkout):
    package = checkout / "cglab"
    seen = {tree_hash(package)}

    def changed():
        assert is_dirty(package) is True
        before = len(seen)
        seen.add(tree_hash(package))
        return len(seen) == before + 1

    (package / "a.py").write_text("other\n")
    assert changed()
    (package / "a0.py").chmod(0o755)
    assert changed()
    (package / "new.txt").write_text("new\n")
    assert changed()
    (package / "z").unlink()
    assert changed()


def test_works_without_git(checkout):
    wanted = git(checkout, "rev-parse", "HEAD:cglab")
    shutil.rmtree(checkout / ".git")
    assert tree_hash(checkout / "cglab") == wanted
    assert is_dirty(checkout / "cglab") is None


def test_this_package_equals_what_git_says_when_clean():
    try:
        changes = git(PACKAGE, "status", "--porcelain", "--", ".")
        head = git(PACKAGE, "rev-parse", "HEAD:./")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not in a git checkout")
    assert (tree_hash() == head) is (changes == "")
    assert is_dirty() is (changes != "")


def test_empty_and_missing_folders(tmp_path):
    assert tree_hash(tmp_path) == EMPTY_TREE
    with pytest.raises(ResultsError, match="missing"):
        tree_hash(Path(tmp_path, "missing"))
