"""Turns that are kept: what is read is what was written, and only whole rounds are gone on from."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cglab.engine.load import Load
from cglab.errors import InputError, RecordError
from cglab.lab.arm_turns import TIMES, Turn, figures, verdicts
from cglab.lab.dsa_recorded import Earlier
from cglab.lab.kept_turns import RATES, kept_rounds, turn_of, turn_record
from cglab.measure.record import Record
from cglab.measure.records import ResultsWarning

CPU, ARMS, ASKED = torch.device("cpu"), ("none", "T8", "T8+T9"), Load(4, 2, 12, 3).as_dict()
MS = st.floats(0.001, 1e6)
TURNS = st.lists(st.lists(st.integers(0, 511), min_size=1, max_size=4), min_size=1, max_size=4).flatmap(
    lambda outputs: st.builds(
        Turn,
        st.fixed_dictionaries({name: st.lists(MS, min_size=1, max_size=4) for name in (*TIMES, "round")}),
        st.fixed_dictionaries({name: st.floats(0, 1e6) for name in RATES}),
        st.just("as sent"), st.just(outputs),
    )
)  # fmt: skip


def turn(ms=1.0, payload="as sent"):
    return Turn(
        {name: [ms, ms] for name in (*TIMES, "round")}, dict.fromkeys(RATES, 1.0), payload, [[1, 2], [3]]
    )


def record(arm="none", number=0, run="first", *, of=None, workload=ASKED):
    return turn_record(
        of or turn(), bench="dsa_ablation", arm=arm, number=number, device=CPU, run=run, workload=workload
    )


WRITTEN = {(arm, n, run): record(arm, n, run) for arm in ARMS for n in range(3) for run in ("a", "b")}


@settings(max_examples=25, deadline=None)
@given(made=TURNS)
def test_a_turn_that_is_read_is_the_one_that_was_written(made):
    line = json.loads(record(of=made).as_line())
    assert turn_of(Record.from_dict(line)) == made


@given(st.lists(st.sampled_from(sorted(WRITTEN)), unique=True))
def test_only_whole_rounds_without_a_gap_are_gone_on_from_and_of_each_the_newest(written):
    found = kept_rounds(Earlier(tuple(WRITTEN[each] for each in written)), "dsa_ablation", ARMS, ASKED)
    whole = [
        {run for run in "ab" if all((arm, number, run) in written for arm in ARMS)} for number in range(3)
    ]
    assert len(found) == next((n for n, runs in enumerate(whole) if not runs), 3)
    for number, by_arm in enumerate(found):
        assert set(by_arm) == set(ARMS)
        (run,) = {each.run for each in by_arm.values()}
        assert run in whole[number] and {each.workload["round"] for each in by_arm.values()} == {number}


def test_the_newest_round_is_taken_and_none_of_another_load():
    both = [WRITTEN[arm, 0, run] for run in ("b", "a") for arm in ARMS]
    (found,) = kept_rounds(Earlier(tuple(both)), "dsa_ablation", ARMS, ASKED)
    assert {each.run for each in found.values()} == {"a"}
    assert kept_rounds(Earlier(tuple(both)), "dsa_ablation", ARMS, {**ASKED, "seed": 1}) == []


@pytest.mark.parametrize(
    "name", ["samples.round_ms", "samples.output_tokens", "metrics.errors", "workload.round"]
)
def test_a_turn_without_what_it_is_read_for_is_no_part_of_a_round(name):
    values = json.loads(record("T8").as_line())
    part, field = name.split(".")
    del values[part][field]
    odd = Record.from_dict(values)
    with pytest.raises(RecordError, match=name):
        turn_of(odd)
    kept = Earlier((record("none"), odd, record("T8+T9")))
    with pytest.warns(ResultsWarning, match=name):
        assert kept_rounds(kept, "dsa_ablation", ARMS, ASKED) == []


def test_lengths_that_do_not_make_the_tokens_are_told():
    values = json.loads(record().as_line())
    values["samples"]["output_lengths"] = [2.0, 2.0]
    with pytest.raises(RecordError, match="4 of them, as lengths say"):
        turn_of(Record.from_dict(values))


def test_kept_turns_and_new_ones_give_one_figure_and_one_verdict():
    runs = {"none": [turn(10.0)] * 3, "T8": [turn(8.0), turn_of(record(of=turn(8.0))), turn(8.0)]}
    told = figures(runs["T8"]) | verdicts(runs, "T8")
    assert (told["ttft_ms"], told["instances"], told["errors"]) == (8.0, 3.0, 3.0)
    assert (told["ttft_verdict"], told["ttft_ratio"], told["tokens_equal"]) == ("faster", 0.8, True)
    with pytest.raises(InputError, match="sent different requests"):
        verdicts(runs | {"T8": [turn(8.0, payload="other")] * 3}, "T8")
