"""What CONTRIBUTING.md says of the tree is so: its scripts, and the names in its instructions."""

import ast
import re

import pytest


@pytest.fixture(scope="module")
def contributing(root):
    return (root / "CONTRIBUTING.md").read_text(encoding="utf-8")


def first_line(path):
    told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return told.splitlines()[0].rstrip(".")


def test_every_script_stands_in_the_table_with_the_first_line_of_its_docstring(contributing, root):
    found = dict(re.findall(r"^\| `(\w+\.py)` \| (.+) \|$", contributing, re.MULTILINE))
    assert found == {path.name: first_line(path) for path in sorted((root / "scripts").glob("*.py"))}
    assert list(found) == sorted(found)


def test_files_and_targets_that_it_names_are_there(contributing, root):
    names = re.findall(r"`((?:cglab|tests|scripts|data|notebooks)/[\w./<>*-]*)`", contributing)
    missing = [name for name in names if "<" not in name and "*" not in name and not (root / name).exists()]
    assert len(names) > 20 and missing == []
    targets = set(re.findall(r"^([\w-]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", contributing)) <= targets
