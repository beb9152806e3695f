"""The check of guards, on a package of three lines and on one guard of this one; `make soak` does them all."""

import pytest

pytestmark = pytest.mark.end_to_end

SOURCE = """
def cut(rows, live):
    return rows[:live] if live < len(rows) else rows
"""
TESTS = """
import pytest
from cglab.cutting import cut

def test_b32_padding_is_cut_off():
    assert cut([1, 2, 3], 2) == [1, 2]

def test_p05_nothing_to_cut():
    assert cut([1], 1) == [1]

@pytest.mark.gpu
def test_p11_on_a_gpu_alone(): ...
"""
TOML = """
[trim]
guard = "padding is cut off"
file = "cglab/cutting.py"
old = '''{old}'''
new = '''{new}'''
named = ["{named}"]
"""


@pytest.fixture
def script(root, monkeypatch):
    monkeypatch.syspath_prepend(root / "scripts")
    import mutation_check

    return mutation_check


@pytest.fixture
def checked(script, tmp_path, monkeypatch, capsys):
    """Checks one edit of a package of three lines: exit status, what was said, and whether its tree is as it was."""

    def check(*names, old="rows[:live]", new="rows[:]", named="B32", source=SOURCE):
        files = {
            "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['gpu: a device']\n",
            "cglab/__init__.py": "",
            "cglab/cutting.py": source,
            "tests/test_cutting.py": TESTS,
            "tests/mutations.toml": TOML.format(old=old, new=new, named=named),
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setenv(
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1"
        )  # they take longer to load than all the rest
        status = script.main(["--root", str(tmp_path), *names])
        assert {name: (tmp_path / name).read_text() for name in files} == files
        said = capsys.readouterr()
        return status, said.out + said.err

    return check


def test_an_edit_that_a_test_notices_is_caught(checked):
    status, said = checked("trim")
    assert status == 0
    assert "trim  caught      tests/test_cutting.py::test_b32_padding_is_cut_off\n" in said
    assert said.endswith("1 of 1 guards are missed when they are gone\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"old": "live < len(rows)", "new": "True", "named": "test_p05_nothing_to_cut"}, "survived 1 tests"),
        ({"old": "def cut", "new": "def cat"}, "pytest exited with 4"),  # there was no test that could fail
        ({"old": "rows[:size]"}, "its text is 0 times in cglab/cutting.py, not once"),
    ],
)
def test_an_edit_that_nobody_notices_or_that_does_not_apply_is_not_caught(checked, options, said):
    status, told = checked(**options)
    assert status == 1
    assert "trim  NOT CAUGHT  " in told and said in told
    assert "0 of 1 guards" in told


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [("rows", "", "4 times in cut.py, not once"), ("[:live]", "[:", "cut.py is no Python without it")],
)
def test_an_edit_applies_once_and_leaves_python(script, old, new, said):
    with pytest.raises(ValueError, match=said):
        script.Mutation("trim", "", "cut.py", old, new, ("B32",)).applied(SOURCE)


@pytest.mark.parametrize("named", ["B33", "P11", "test_of_that_name"])
def test_a_guard_without_a_test_that_runs_here_is_an_error(checked, named):
    status, said = checked(named=named)
    assert status == 1 and f"no test in tests/ that runs everywhere is named {named}" in said


def test_tests_that_fail_as_it_is_show_nothing(checked):
    status, said = checked(source=SOURCE.replace("[:live]", "[:]"), old="rows[:]", new="rows[1:]")
    assert status == 1 and "the tests do not pass as it is: tests/test_cutting.py::test_b32" in said


def test_a_guard_that_lacks_a_field_is_an_error_that_names_it(script, tmp_path, capsys):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/mutations.toml").write_text('[trim]\nfile = "cglab/cutting.py"\n')
    assert script.main(["--root", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "no check: trim of tests/mutations.toml: a field is missing or odd (KeyError('named'))" in told


def test_an_unknown_guard_is_an_error_that_lists_them(checked):
    assert checked("trimming") == (1, "'trimming' is no guard; there are: trim\n")


def test_every_guard_of_this_tree_still_is_where_its_edit_looks_for_it(script, root):
    mutations = script.read_mutations(root)
    known = script.all_tests(root / "tests")
    assert len(mutations) >= 20
    for mutation in mutations:
        source = (root / mutation.file).read_text()
        assert mutation.applied(source) != source
        assert mutation.tests(known)


@pytest.mark.slow
def test_one_guard_of_this_tree_is_missed_when_it_is_gone(script, capsys):
    assert script.main(["above-the-largest-bucket"]) == 0
    assert "1 of 1 guards" in capsys.readouterr().out
