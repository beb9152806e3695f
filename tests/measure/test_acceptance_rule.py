"""What of a greedy continuation counts: up to its end of text and to where it only repeats."""

from hypothesis import given
from hypothesis import strategies as st

from cglab.measure.acceptance_rule import counted_length, distinct_ngrams, periodic_from

tokens = st.lists(st.integers(0, 3), max_size=60)


@given(
    head=st.lists(st.integers(10, 99), unique=True, max_size=30),
    loop=st.lists(st.integers(100, 199), unique=True, min_size=1, max_size=20),
    rest=st.integers(0, 40),
)
def test_the_first_pass_of_a_loop_counts_and_its_repeats_do_not(head, loop, rest):
    repeats = max(len(loop), 16) + rest
    text = head + loop + [loop[index % len(loop)] for index in range(repeats)]
    assert periodic_from(text) == len(head) + len(loop)


@given(text=tokens, least=st.integers(1, 20))
def test_what_repeats_does_so_to_the_end_and_nothing_shorter_would_do(text, least):
    first = periodic_from(text, least)

    def repeats(start):
        return any(
            len(text) - start >= max(period, least)
            and all(text[index] == text[index - period] for index in range(start, len(text)))
            for period in range(1, start + 1)
        )

    assert first == next(filter(repeats, range(len(text))), len(text))


def test_a_repetition_that_ends_again_or_is_short_counts():
    assert periodic_from([7] * 40 + [8]) == 41
    assert periodic_from(list(range(50)) + [49] * 15) == 65
    assert periodic_from(list(range(50)) + [49] * 16) == 50
    # Forty tokens and again only 20 of them: not yet a whole period.
    assert periodic_from([*range(40), *range(20)]) == 60


def test_a_text_counts_up_to_its_end_with_the_end_itself():
    text = [*range(5, 30), 0, *[3] * 30]
    assert counted_length(text, ends=(0,)) == 26
    assert counted_length(text) == 27
    assert counted_length([], ends=(0,)) == 0


def test_distinct_ngrams_are_a_share():
    assert distinct_ngrams(range(20)) == distinct_ngrams([1, 2, 3]) == 1.0
    assert distinct_ngrams([5] * 13) == 1 / 10
    assert distinct_ngrams([1, 2, 1, 2, 1], size=2) == 2 / 4
