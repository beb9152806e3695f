"""The n-gram look-up draft: the longest suffix decides, the latest occurrence of it, and it invents nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.engine.lookup_draft import lookup_draft
from cglab.errors import InputError


def test_the_longest_suffix_decides_before_a_later_shorter_one():
    assert lookup_draft([1, 2, 3, 50, 51, 52, 9, 3, 60, 1, 2, 3], 3) == [50, 51, 52]
    assert lookup_draft([1, 2, 3, 50, 51, 52, 9, 3, 60, 1, 2, 3], 3, longest=1) == [60, 1, 2]


def test_of_equally_long_matches_the_last_one_is_taken():
    assert lookup_draft([4, 70, 4, 80, 81, 4], 2) == [80, 81]


def test_a_loop_is_continued_and_new_text_is_not_drafted():
    assert lookup_draft([5, 6, 5, 6, 5], 3) == [6, 5]
    assert lookup_draft([1, 2, 3, 4], 3) == lookup_draft([1], 3) == lookup_draft([], 3) == []


@given(text=st.lists(st.integers(0, 3), max_size=40), count=st.integers(1, 5), longest=st.integers(1, 6))
def test_a_draft_is_what_followed_an_earlier_occurrence_of_the_longest_suffix(text, count, longest):
    def earlier(size):
        return [start for start in range(len(text) - size) if text[start : start + size] == text[-size:]]

    draft = lookup_draft(text, count, longest=longest)
    size = max((size for size in range(1, longest + 1) if size < len(text) and earlier(size)), default=0)
    if not size:
        assert draft == []
    else:
        after = earlier(size)[-1] + size
        assert draft == text[after : after + count] and draft


@pytest.mark.parametrize(("count", "longest"), [(0, 4), (3, 0)])
def test_a_look_up_of_nothing_is_refused(count, longest):
    with pytest.raises(InputError, match="give 1 or more"):
        lookup_draft([1, 1], count, longest=longest)
