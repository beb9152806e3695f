"""Tables in Markdown: as many cells as columns whatever is in them, numbers to the right."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.lab.markdown import between, number, table


@given(st.lists(st.lists(st.text("a|\n-1.", max_size=6), min_size=2, max_size=2), max_size=4))
def test_no_text_ends_its_cell_or_its_row(rows):
    lines = table(("one", "two"), rows).split("\n")
    assert len(lines) == 2 + len(rows)
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in lines)


@pytest.mark.parametrize(
    ("cells", "right"),
    [
        (["1.50", "-"], True),
        (["1,000", "-0.25"], True),
        (["-", "-"], False),
        (["1.50", "bitwise"], False),
        (["3 of 4", "4 of 4"], False),
    ],
)
def test_a_column_of_numbers_stands_to_the_right(cells, right):
    rule = table(("name", "value"), [("a", cell) for cell in cells]).splitlines()[1]
    assert rule == ("| --- | ---: |" if right else "| --- | --- |")


def test_a_number_or_ratio_without_both_sides_is_a_dash():
    assert [number(3), number(3.0, 2.0), number(None), number(3.0, None)] == ["3.00", "1.50", "-", "-"]


def test_only_what_stands_between_the_markers_is_replaced():
    assert between("a\n<b>\nold\n<e>\nz", "<b>", "<e>", "new") == "a\n<b>\nnew\n<e>\nz"
