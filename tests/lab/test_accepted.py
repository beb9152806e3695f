"""Runs of drafts side by side, and outputs prompt by prompt."""

from collections import Counter

import pytest

from cglab.engine.acceptance import AcceptLengths
from cglab.engine.generation import Generation, Timings
from cglab.errors import InputError
from cglab.graphs.coverage import Coverage
from cglab.lab.accepted import Accepted, prompt_parity


def run(tokens, accepted=None):
    timings = Timings(1.0, [0.01, 0.03, 0.02], [1, 1, 1], [0.5], [1.0])
    return Generation(
        [""] * len(tokens), tokens, ["length"] * len(tokens), timings, Coverage(), accepted=accepted
    )


def test_the_frame_tells_each_flavour_by_its_own_name_and_the_shares_by_length():
    told = AcceptLengths(
        passes=Counter({1: 1, 3: 3}), correct=6, proposed=12, completions=Counter({(10, 4): 1})
    )
    (row,) = Accepted({"topk 1": run([[1]], told)}).as_frame().to_dict("records")
    assert (row["tokens_per_pass"], row["accept_rate"], row["completion_per_pass"]) == (2.5, 0.5, 2.5)
    assert (row["share of 1"], row["share of 2"], row["share of 3"]) == (0.25, 0.0, 0.75)
    assert row["step_ms"] == pytest.approx(20)


def test_a_plain_run_has_no_accept_length_and_is_refused_by_name():
    with pytest.raises(InputError, match="plain drafted nothing; open the model with draft="):
        Accepted({"plain": run([[1]])})


def test_prompts_part_where_the_first_token_differs_or_one_ends():
    found = prompt_parity(run([[1, 2, 3], [4, 5], [6], [7, 8]]), run([[1, 2, 3], [4, 9], [6, 7], [0, 8]]))
    assert (found.total, found.matched, found.departed) == (4, 1, (1, 1, 0))
    assert str(found) == "1 of 4 prompts equal; they part after 1, 1, 0 tokens"
    assert str(prompt_parity(run([[1]]), run([[1]]))) == "1 of 1 prompts equal"


def test_other_numbers_of_prompts_are_not_compared():
    with pytest.raises(InputError, match="2 outputs and 1 cannot be compared"):
        prompt_parity(run([[1], [2]]), run([[1]]))
