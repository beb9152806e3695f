"""Every pitfall and public report is a named test, or there is a reason why not; tests/README.md says which."""

import re

import pytest

from scripts import cited_table

KNOWN = """
B01 = { title = "The first one", source = "somewhere #1" }
P02 = { title = "The second one", source = "some_runner" }
N03 = { title = "The third one", source = "elsewhere #3", why_not = "There are no widgets." }
"""
HOLD = """
import pytest

@pytest.mark.gpu
def test_b01_the_first_is_held(): ...

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_p02_b01_both_are_held(device): ...

def test_something_else(): ...
"""
PAGE = f"# Tests\n\n{cited_table.BEGIN}\n{cited_table.END}\n\nThe end.\n"


@pytest.fixture
def written(tmp_path):
    """Makes a folder of tests with these files, and writes or checks its table."""

    def write(*arguments, known=KNOWN, page=PAGE, **files):
        for name, text in {"cited.toml": known, "README.md": page}.items():
            (tmp_path / name).write_text(text)
        for name, text in (files or {"hold": HOLD}).items():
            (tmp_path / f"test_{name}.py").write_text(text)
        status = cited_table.main(["--tests", str(tmp_path), *arguments])
        return status, (tmp_path / "README.md").read_text()

    return write


def test_the_table_of_this_repository_is_fresh_and_no_id_is_without_a_test_or_a_reason(capsys):
    assert cited_table.main(["--check"]) == 0, capsys.readouterr().err


def test_a_table_says_who_holds_what_and_where_it_runs(written):
    status, page = written()
    assert status == 0
    assert "3 ids: 2 held by 2 tests, 1 without one." in page
    first, second = "[the first is held](test_hold.py) (GPU)", "[both are held](test_hold.py)"
    assert f"| B01 | The first one | somewhere #1 | {first}; {second} |" in page
    assert f"| P02 | The second one | SGLang: `some_runner` | {second} |" in page
    assert "| N03 | The third one | elsewhere #3 | **none**: There are no widgets. |" in page
    assert page.startswith("# Tests\n") and page.endswith("\n\nThe end.\n")
    assert written(page=page) == (0, page), "again changes nothing"


def test_a_bar_in_a_title_opens_no_column(written):
    _, page = written(known=KNOWN.replace("The third one", "a | b"))
    assert r"| N03 | a \| b | elsewhere #3 | **none**: There are no widgets. |" in page


def test_a_file_that_is_marked_as_a_whole_is_told_too(written):
    _, page = written(hold="import pytest\npytestmark = [pytest.mark.soak]\n" + HOLD)
    assert "[the first is held](test_hold.py) (GPU, soak)" in page


@pytest.mark.parametrize(
    ("known", "test", "said"),
    [
        (KNOWN, "def test_p99_of_nothing(): ...", "P99 is no id of tests/cited.toml"),
        (KNOWN, "def test_p2_without_its_zero(): ...", "P2 is no id of tests/cited.toml"),
        (KNOWN, "def test_n03_there_are(): ...", "N03 has a why_not, and test_n03_there_are holds it"),
        (KNOWN + 'B05 = { title = "x", source = "y" }', "", "B05 has no test"),
        (KNOWN + "B05 = {", "", "no table"),
        (KNOWN + 'B01 = { title = "twice", source = "y" }', "", "no table"),
        (KNOWN + 'B05 = { source = "y" }', "", "B05 of tests/cited.toml lacks a title or a source"),
        (KNOWN + 'B05 = "x"', "", "B05 of tests/cited.toml lacks a title or a source"),
        (KNOWN, "def test_(:", "test_hold.py"),
    ],
)
def test_what_does_not_add_up_is_an_error_and_writes_nothing(written, capsys, known, test, said):
    status, page = written(known=known, hold=HOLD + test)
    assert status == 1 and page == PAGE
    assert said in capsys.readouterr().err


def test_an_old_table_is_an_error_with_the_way_to_a_new_one(written, capsys):
    _, page = written()
    assert written("--check", page=page)[0] == 0
    more = HOLD + "def test_b01_one_more(): ..."
    assert written("--check", page=page, hold=more) == (1, page)
    assert "run scripts/cited_table.py" in capsys.readouterr().err


@pytest.mark.parametrize("page", ["# Tests", PAGE + cited_table.BEGIN, cited_table.END + cited_table.BEGIN])
def test_a_page_without_its_markers_is_left_alone(written, capsys, page):
    assert written(page=page) == (1, page)
    assert "once each and in this order" in capsys.readouterr().err


def test_pitfalls_are_numbered_without_a_gap_and_every_id_has_two_digits(root):
    ids = re.findall(r"^(\w+) =", (root / "tests" / "cited.toml").read_text(), re.MULTILINE)
    assert all(re.fullmatch(r"[BNP]\d\d", each) for each in ids)
    assert [each for each in ids if each[0] == "P"] == [f"P{number:02}" for number in range(1, 87)]
