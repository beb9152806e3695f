"""The tracked tree names no machine, no package index and nobody's way of working, and keeps house rules."""

import ast
import re
import subprocess
import warnings
from pathlib import Path

import pytest

# Put together from halves, so that this file does not name them itself.
HOSTS = [
    "pypi" + ".org",
    "python" + "hosted.org",
    "pytorch" + ".org/whl",
    "npm" + "js.org",
    "deb.deb" + "ian.org",
]
HOSTS += ["conda.ana" + "conda.org", "repo.ana" + "conda.com"]
WORDS = ["cla" + "ude", "co-authored" + "-by", "this ses" + "sion", "anth" + "ropic"]
FORBIDDEN = re.compile("|".join(map(re.escape, HOSTS + WORDS)), re.IGNORECASE)
OWN_PATH = re.compile(r"(?<![\w.~/$)}-])/(?:home|root|work|Users)/\w")
LONGEST_FILE = 300  # lines
MOST_BYTES = 30 << 20  # of all tracked files: the whole tree is carried to a GPU machine, often


def offences(text: str) -> list[str]:
    return FORBIDDEN.findall(text) + OWN_PATH.findall(text)


def tracked(root: Path, *patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns], cwd=root, capture_output=True, text=True, check=True
    )
    return [path for name in listed.stdout.split("\0") if name and (path := root / name).is_file()]


def test_no_tracked_file_names_a_host_a_machine_or_its_making(root):
    found = {}
    for path in tracked(root):
        content = path.read_bytes()
        if b"\0" not in content and (words := offences(content.decode())):
            found[str(path.relative_to(root))] = words
    assert found == {}


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("https://" + HOSTS[0] + "/simple", True),
        ("open('/ho" + "me/ada/cglab')", True),
        ('File "/wo' + 'rk/main/cglab/x.py"', True),
        ("Co-Authored" + "-By: someone", True),
        ("/.wo" + "rk/ and ~/wo" + "rk/x and data/wo" + "rk/y", False),
        ("with captured.capture_session(stream):", False),
    ],
)
def test_the_search_finds_what_it_should_and_only_that(text, bad):
    assert bool(offences(text)) == bad


def test_modules_are_short_and_open_with_what_they_are_for(root):
    for path in tracked(root, "cglab/*.py"):
        source = path.read_text()
        assert len(source.splitlines()) <= LONGEST_FILE, path
        assert not source.strip() or ast.get_docstring(ast.parse(source)), path


def test_all_files_together_are_small(root):
    sizes = {str(path.relative_to(root)): path.stat().st_size for path in tracked(root)}
    largest = sorted(sizes, key=sizes.__getitem__)[-10:]
    assert sum(sizes.values()) < MOST_BYTES, largest


def test_a_warning_of_the_library_is_an_error():
    with pytest.raises(UserWarning, match="careful"):
        warnings.warn_explicit("careful", UserWarning, "cglab/graphs/x.py", 1, module="cglab.graphs.x")
