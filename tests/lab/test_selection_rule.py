"""Where the selection is recorded (T9b): the rule on costs that are made up, so that each is known to win or lose."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cglab.graphs.coverage import Reason
from cglab.lab.selection_rule import SelectionRule, StepCost, selection_rule, step_costs
from cglab.measure.record import make_record

VERDICTS = {"faster": 0.8, "no difference": 1.01, "slower": 1.3}
"""What T9b takes of T9's time, for each verdict of S3's rule."""


def cost(tokens, cached, verdict):
    """A point with three instances in each arm that do not overlap where the arms differ."""
    breaks = [[10.0, 10.1], [10.0, 10.2], [9.9, 10.0]]
    made = StepCost(tokens, cached, breaks, [[ms * VERDICTS[verdict] for ms in each] for each in breaks])
    assert made.verdict == verdict
    return made


def test_the_selection_is_recorded_up_to_the_most_tokens_that_won_for_each_room():
    rule = selection_rule([
        cost(512, 0, "faster"), cost(2048, 0, "no difference"), cost(4096, 0, "faster"), cost(8192, 0, "slower"),
        cost(1024, 32768, "faster"), cost(4096, 32768, "no difference"),
        cost(1024, 131072, "slower"), cost(4096, 131072, "faster"),
    ])  # fmt: skip
    assert rule == SelectionRule(((0, 4096), (32768, 1024), (131072, 0)))
    assert str(rule) == (
        "the selection is recorded up to 4096 tokens with room for 0 cached, up to 1024 tokens with room for 32768 cached"
    )
    assert rule.why_break(2048, 0) is None and rule.why_break(1024, 20000) is None
    for tokens, cached, facts in (
        (8192, 0, "8192 tokens after 0 cached: with room for 0 it won up to 4096"),
        (2048, 1, "2048 tokens after 1 cached: with room for 32768 it won up to 1024"),
        (16, 131073, "16 tokens after 131073 cached: no room for that many was measured"),
    ):
        miss = rule.why_break(tokens, cached)
        assert miss.reason is Reason.LIVE_EXTENT and miss.facts == facts


def test_of_two_points_with_one_step_the_worse_counts():
    assert selection_rule([cost(512, 0, "faster"), cost(512, 0, "slower")]).limits == ((0, 0),)
    assert str(selection_rule([])) == "the selection is recorded nowhere"


@settings(max_examples=30)
@given(
    grid=st.dictionaries(
        st.tuples(st.integers(1, 9), st.integers(0, 3)), st.sampled_from(sorted(VERDICTS)), min_size=1
    )
)
def test_the_rule_is_slower_nowhere_and_leaves_out_no_win_below_which_nothing_lost(grid):
    costs = [cost(tokens, cached, verdict) for (tokens, cached), verdict in grid.items()]
    rule = selection_rule(costs)
    for each in costs:
        recorded = rule.why_break(each.tokens, each.cached) is None
        below = {
            other.verdict for other in costs if other.cached == each.cached and other.tokens <= each.tokens
        }
        assert not recorded or "slower" not in below
        assert recorded or each.verdict != "faster" or "slower" in below


def record(arm, ms, run="run", *, cached=32768, verdict="bitwise"):
    """One arm at a point of three instances."""
    return make_record(
        bench="dsa_prefill", arm=arm, device=torch.device("cpu"), run=run, metrics={"instances": 3.0},
        samples={"ttft_ms": [ms, ms + 0.1] * 3}, parity={"verdict": verdict},
        workload={
            "fresh": 512, "cached": cached, "concurrency": 4,
            "step": {"tokens": 2048, "cached": cached, "requests": 4},
        },
    )  # fmt: skip


@pytest.mark.parametrize("whole", [8.0, 12.0])
def test_costs_are_read_from_records_by_instance(whole):
    (found,) = step_costs([
        record("breaks", 1.0), record("graph", 10.0), record("whole", whole), record("graph", 1.0, cached=0),
    ])  # fmt: skip
    assert (found.tokens, found.cached) == (2048, 4 * 32768)
    assert found.selecting == [[10.0, 10.1]] * 3 and found.whole == [[whole, whole + 0.1]] * 3
    assert found.verdict == ("faster" if whole < 10 else "slower") and not found.corrupted


def test_arms_of_several_runs_are_no_cost_and_of_whole_runs_the_newest_counts():
    first, second = (
        [record("graph", 10.0, run), record("whole", ms, run)] for run, ms in (("1", 8.0), ("2", 12.0))
    )
    ended = record("graph", 99.0, "3")
    assert step_costs([record("graph", 10.0, "0"), record("whole", 8.0, "00")]) == []
    (found,) = step_costs([*first, *second, ended])
    assert found.selecting[0] == [10.0, 10.1] and found.whole[0] == [12.0, 12.1]


@pytest.mark.parametrize("wrong", ["graph", "whole"])
def test_where_bits_differed_the_selection_is_not_recorded_however_fast(wrong):
    arms = {"graph": 10.0, "whole": 8.0}
    made = [record(arm, ms, verdict="corrupted" if arm == wrong else "bitwise") for arm, ms in arms.items()]
    (found,) = step_costs(made)
    assert found.verdict == "faster" and selection_rule([found]).limits == ((4 * 32768, 0),)
    larger = cost(4096, 4 * 32768, "faster")
    assert selection_rule([found, larger]).limits == ((4 * 32768, 0),), "nor is a larger step trusted"
