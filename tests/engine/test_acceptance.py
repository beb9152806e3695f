"""What is accepted of a draft, and what is said about it: on the host, without a model."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.engine.acceptance import AcceptLengths, committed, countable, greedy_path, pinned_path
from cglab.engine.speculation import Speculation
from cglab.errors import InputError
from tests.engine.stand_in import VOCABULARY, next_token

CHAIN = [-1, 0, 1, 2]


def spoken(context, count):
    """What the stand-in target says after a context."""
    tokens = list(context)
    while len(tokens) < len(context) + count:
        tokens.append(next_token(tokens))
    return tokens[len(context) :]


@st.composite
def drafts(draw):
    """A context and a random tree after it: tokens, parents, and what the target chooses after each node."""
    context = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4))
    tokens, parents, paths = [context[-1]], [-1], [[]]
    for _ in range(draw(st.integers(1, 8))):
        parent = draw(st.integers(0, len(tokens) - 1))
        taken = {tokens[node] for node, other in enumerate(parents) if other == parent}
        free = sorted(set(range(VOCABULARY)) - taken)
        if not free:
            continue
        true = next_token(context + paths[parent])
        token = true if true in free and draw(st.booleans()) else draw(st.sampled_from(free))
        tokens.append(token)
        parents.append(parent)
        paths.append([*paths[parent], token])
    return context, tokens, parents, [next_token(context + path) for path in paths], paths


@given(drafts(), st.integers(0, 9))
def test_what_is_committed_is_what_plain_decoding_says_and_as_much_of_it_as_was_drafted(draft, deepest):
    context, tokens, parents, chosen, paths = draft
    path = greedy_path(chosen, tokens, parents, deepest)
    new = committed(path, chosen, tokens)
    assert new == spoken(context, len(new))
    assert path[0] == 0 and all(parents[node] == before for before, node in pairwise(path))
    right = [each for each in paths if len(each) <= deepest and each == spoken(context, len(each))]
    assert len(path) - 1 == max(map(len, right)), "the longest right path, as far as it counts"


@given(drafts(), st.integers(0, 9))
def test_b75_b77_nodes_that_are_too_deep_are_placeholders(draft, deepest):
    _, _, parents, _, paths = draft
    assert countable(parents, deepest) == sum(1 <= len(path) <= deepest for path in paths)
    assert countable(CHAIN, deepest) == min(deepest, 3)


def test_b71_a_placeholder_is_never_accepted_however_right_it_looks():
    right = [5, 6, 0, 0], [4, 5, 6, 0]
    assert [len(greedy_path(*right, CHAIN, deepest)) for deepest in range(5)] == [1, 2, 3, 4, 4]
    assert committed(greedy_path(*right, CHAIN, 1), *right) == [5, 6]


def test_of_branches_the_one_that_the_target_takes_is_followed():
    chosen, tokens, parents = [7, 1, 8, 9, 2, 3], [4, 6, 7, 5, 8, 9], [0, 0, 0, 1, 2, 4]
    assert greedy_path(chosen, tokens, parents, 3) == [0, 2, 4]
    assert committed([0, 2, 4], chosen, tokens) == [7, 8, 2]


@given(st.floats(1, 8), st.integers(1, 60))
def test_pinned_lengths_keep_their_mean_and_differ_by_one(mean, count):
    lengths = [len(pinned_path(mean, number, 7)) for number in range(count)]
    assert set(lengths) <= {int(mean), int(mean) + 1}
    assert abs(sum(lengths) - count * mean) < 1 + 1e-6
    assert pinned_path(mean, 0, 7) == list(range(lengths[0]))


def test_pinned_commits_real_drafts_whatever_the_target_says():
    chosen, tokens = [10, 20, 30, 40], [1, 2, 3, 4]
    assert committed(pinned_path(3.0, 5, 3), chosen, tokens) == [2, 3, 30]
    assert committed(pinned_path(3.0, 5, 1), chosen, tokens) == [2, 20], (
        "placeholders count here no more than there"
    )
    assert Counter(len(pinned_path(3.13, number, 3)) for number in range(100)) == {3: 87, 4: 13}


def test_three_flavours_of_accept_length_have_three_names():
    accepted = AcceptLengths()
    for length in (4, 1, 1, 2):
        accepted.verified(length, 3, 0)
    accepted.verified(1, 0, 3)
    accepted.completed(7, 3)  # the prompt's own token counts, and two that a limit cut do not
    accepted.completed(4, 2)
    accepted.completed(1, 0)
    assert accepted.tokens_per_pass == 9 / 5
    assert accepted.accept_rate == 4 / 12
    assert accepted.completion_per_pass == (7 / 3 + 4 / 2) / 2
    assert accepted.distribution == {1: 3 / 5, 2: 1 / 5, 3: 0, 4: 1 / 5}
    assert str(accepted) == "1.800 tokens per verify pass (5 passes), drafts accepted: 4 of 12"
    plain = accepted.as_dict()
    assert plain["passes"] == 5 and plain["requests"] == 2 and plain["placeholders"] == 3


def test_accept_lengths_add_up_and_subtract():
    accepted = AcceptLengths()
    accepted.verified(3, 3, 0)
    before = accepted.copy()
    accepted.verified(2, 3, 0)
    accepted.verified(3, 3, 0)
    accepted.completed(5, 2)
    since = accepted - before
    assert since.passes == {2: 1, 3: 1} and since.completions == {(5, 2): 1} and since.correct == 3
    assert since + before == accepted and before.passes == {3: 1}


def test_no_pass_has_no_length():
    none = AcceptLengths()
    assert none.tokens_per_pass is none.accept_rate is none.completion_per_pass is None
    assert none.distribution == {} and str(none) == "no verify pass"


def test_pinned_lengths_are_told_as_such_and_kept_apart():
    pinned = AcceptLengths(3.13)
    pinned.verified(3, 3, 0)
    assert "pinned at 3.13" in str(pinned) and pinned.as_dict()["pinned"] == 3.13
    with pytest.raises(InputError, match=r"pinned at 3.13 and at None are no one number"):
        pinned + AcceptLengths()
    with pytest.raises(InputError, match="keep them apart"):
        AcceptLengths(2.0) - pinned


@pytest.mark.parametrize(
    ("sizes", "width"),
    [((), 4), ((1,), 2), ((3, 3), 10), ((3, 3, 22), 22), ((3, 3, 2), 2), ((1, 3), 4), ((3, 1, None, 4.0), 4)],
)
def test_a_draft_has_a_token_for_each_step_and_branch_unless_told_otherwise(sizes, width):
    speculation = Speculation(*sizes)
    assert (speculation.width, speculation.lookahead) == (width, width - 1)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"topk": True}, "topk must be a whole number"),
        ({"steps": 2.0}, "got 2.0"),
        ({"tokens": 5}, "5 tokens cannot be verified after 3 steps with topk 1; give 4 to 4"),
        ({"topk": 3, "tokens": 23}, "give 2 to 22"),
        ({"tokens": "4"}, "'4' tokens"),
        ({"pinned": 4.5}, "commits 1 to 4 tokens, pinned=4.5"),
        ({"pinned": 0.9}, "commits 1 to 4"),
        ({"pinned": True}, "pinned=True"),
        ({"pinned": "3"}, "pinned='3'"),
        ({"pinned": float("nan")}, "pinned=nan"),
        ({"pinned": 2.0, "topk": 2}, "pin acceptance with topk=1"),
    ],
)
def test_a_draft_that_cannot_be_is_refused(sizes, told):
    with pytest.raises(InputError, match=told):
        Speculation(**sizes)
