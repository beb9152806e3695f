"""Accept length on held-out prompts: by the counting rule, better than look-up, and not below its record."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cglab
from cglab.errors import InputError, ModelError
from cglab.lab.accept_bench import (
    LOOK_UP,
    Counted,
    accept,
    counted_passes,
    counted_texts,
    drafted_passes,
    looked_up_passes,
    told,
)
from cglab.lab.drafting import SHIPPED
from cglab.lab.prompts import held_out
from cglab.measure.records import load

CPU = torch.device("cpu")
FEW = 18  # two prompts of every length
SLACK = 0.1


@given(st.lists(st.integers(1, 4), max_size=20), st.integers(0, 60))
def test_passes_count_while_all_that_they_draft_lies_within_what_counts(lengths, counted):
    kept = counted_passes(lengths, counted, 3)
    assert kept == lengths[: len(kept)]
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    assert [start + 3 < counted for start in starts[: len(kept)]] == [True] * len(kept)
    assert len(kept) == len(lengths) or starts[len(kept)] + 3 >= counted


def test_a_look_up_is_right_about_what_was_said_before_and_nothing_else():
    assert looked_up_passes(Counted([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6, 9, 9, 8, 7]), 3) == [4, 1]
    assert looked_up_passes(Counted([1], [2, 3, 4, 5, 6]), 3) == [1, 1]
    assert looked_up_passes(Counted([1], [2, 3, 4]), 3) == []


def test_the_three_flavours_are_told_apart():
    accepted = told([[4, 1], [2]], 3)
    assert accepted.tokens_per_pass == 7 / 3 and accepted.accept_rate == 4 / 9
    assert accepted.completion_per_pass == (6 / 2 + 3 / 1) / 2
    assert accepted.distribution == {1: 1 / 3, 2: 1 / 3, 3: 0, 4: 1 / 3}


@pytest.mark.slow
def test_the_shipped_draft_is_not_worse_than_recorded(root):
    records = [r for r in load(root / "data/results").records if r.bench == "accept" and r.arm == SHIPPED]
    if not records:
        pytest.skip("no accept length is recorded yet")
    samples, texts = records[-1].samples, held_out(FEW)
    sizes = {"device": CPU, "max_batch": FEW, "buckets": [FEW], "max_context": 512}
    with cglab.open("pico-gqa", **sizes) as plain:
        counted = counted_texts(plain, texts, int(records[-1].workload["new_tokens"]))
    with cglab.open("pico-gqa", draft=SHIPPED, **sizes) as lab:
        found = told(drafted_passes(lab, counted, 3), 3).tokens_per_pass
    assert found > sum(samples["committed"][:FEW]) / sum(samples["passes"][:FEW]) - SLACK


def test_the_bench_records_both_drafts_on_the_same_texts():
    drafted, looked_up = accept(CPU, quick=True)
    assert (drafted.arm, looked_up.arm) == (SHIPPED, LOOK_UP)
    assert drafted.metrics["tokens_per_pass"] > looked_up.metrics["tokens_per_pass"] >= 1
    for record in (drafted, looked_up):
        assert len(record.samples["passes"]) == record.workload["prompts"]
        assert sum(record.samples["passes"]) == record.metrics["passes"]
        assert sum(record.metrics[f"share_{length}"] for length in range(1, 5)) == pytest.approx(1)
    assert drafted.metrics["tokens_counted"] == looked_up.metrics["tokens_counted"]


def test_the_bench_counts_a_block_as_long_as_it_is():
    drafted, looked_up = accept(CPU, quick=True, draft="random-block", prompts=2)
    for record in (drafted, looked_up):
        assert record.workload["draft_steps"] == 7 and "ok" not in record.metrics
        assert sum(record.metrics[f"share_{length}"] for length in range(1, 9)) == pytest.approx(1)


def test_a_model_without_held_out_prompts_says_so(tmp_path):
    with pytest.raises(ModelError, match="no held-out prompts"):
        held_out(1, str(tmp_path))


@pytest.mark.parametrize("asked", [{"prompts": 0}, {"prompts": -70}, {"prompts": 10_000}, {"new_tokens": 0}])
def test_numbers_that_nothing_is_counted_with_are_refused(asked):
    with pytest.raises(InputError, match="there are 72 held-out prompts; give 1 to 72"):
        next(accept(CPU, quick=True, **asked))
