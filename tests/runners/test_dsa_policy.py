"""The gates of sparse prefill and the bucket floor: pure functions, over all that they can be asked."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.graphs.buckets import sglang_prefill
from cglab.graphs.coverage import Coverage, Miss, Reason
from cglab.measure.published import load_published
from cglab.models.sparse import Breaks
from cglab.runners.dsa_policy import (
    NON_GOALS,
    coverage_of_part,
    floor_by_rule,
    gates,
    measured_floor,
)
from cglab.settings import DSA_ATTENTION_SWITCH, DSA_INDEXER_SWITCH

FLAGS = ("attention", "preparation", "selection", "experts")
SWITCHES = ((), (DSA_ATTENTION_SWITCH,), (DSA_INDEXER_SWITCH,), (DSA_ATTENTION_SWITCH, DSA_INDEXER_SWITCH))
sizes = st.lists(st.integers(1, 99), min_size=1, max_size=9, unique=True).map(sorted)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_every_combination_of_toggles_and_switches_is_one_that_can_be_recorded(switches):
    """``Breaks`` refuses what S3 does not have; whatever is asked for, what is not possible stays a break."""
    for flags in product((True, False), repeat=len(FLAGS)):
        asked = dict(zip(FLAGS, flags, strict=True))
        parts = gates(**asked, switches=switches)
        breaks = parts.breaks
        assert breaks.attend == (not asked["attention"] or DSA_ATTENTION_SWITCH in switches)
        assert breaks.prepare >= breaks.attend and breaks.experts != asked["experts"]
        assert breaks.select or (asked["selection"] and breaks == Breaks(select=False))
        for each in (parts.attend, parts.prepare):
            assert each is None or each.reason in (
                Reason.KILL_SWITCH,
                Reason.BACKEND_EAGER,
                Reason.NEEDS_ATTENTION,
            )


def test_every_break_says_why():
    assert gates().select == Miss(Reason.LIVE_EXTENT)
    assert gates(switches=[DSA_INDEXER_SWITCH]).prepare == Miss(Reason.KILL_SWITCH, f"{DSA_INDEXER_SWITCH}=1")
    alone = gates(attention=False)
    assert alone.attend == Miss(Reason.BACKEND_EAGER)
    assert alone.prepare == Miss(Reason.NEEDS_ATTENTION, f"attention is a break: {alone.attend}")
    whole = gates(selection=True, experts=False)
    assert whole.select == Miss(Reason.BACKEND_EAGER, "experts are a break")
    assert gates(selection=True).breaks == Breaks(select=False)


def test_p81_below_the_floor_all_is_a_break_and_keeps_a_reason_of_its_own():
    parts = gates(preparation=False, selection=True)
    small = parts.below(96, 80)
    assert small.breaks == Breaks(select=True, prepare=True, attend=True)
    assert small.attend == Miss(Reason.BELOW_FLOOR, "bucket 80, floor 96")
    assert small.prepare == parts.prepare and parts.below(96, 96) is parts


def test_p81_s3_s_floor_is_96_on_a_gb300_and_on_an_h200():
    grid = sglang_prefill(8192)
    stated = {row["name"]: row["value"] for row in load_published()["s3-stated-figures"]["rows"]}
    assert stated["bucket floor on GB300"] == 96
    for processors in (130, 132, 148, 152, 160, 161):
        assert floor_by_rule(grid, processors // 2) == 96
    assert floor_by_rule(grid, 162 // 2) == 112 and floor_by_rule(grid, 128 // 2) == 80


@given(sizes, st.integers(0, 120))
def test_the_rule_s_floor_has_only_steps_of_more_rows(buckets, rows):
    floor = floor_by_rule(buckets, rows)
    shortest = {bucket: before + 1 for before, bucket in zip([0, *buckets], buckets, strict=False)}
    assert floor in (*buckets, buckets[-1] + 1)
    assert all((shortest[bucket] > rows) == (bucket >= floor) for bucket in buckets)


@given(sizes, st.data())
def test_the_measured_floor_is_the_first_from_which_none_differs(buckets, data):
    differing = data.draw(st.sets(st.sampled_from(buckets)))
    floor = measured_floor(buckets, differing)
    assert not any(bucket >= floor for bucket in differing)
    below = [bucket for bucket in buckets if bucket < floor]
    assert not below or below[-1] in differing


def test_a_part_is_covered_where_it_is_recorded_and_missed_with_the_bucket_s_reason_elsewhere():
    counts = Coverage()
    for size, live in ((16, 12), (16, 9), (4, 3)):
        counts.hit(f"{size}/prefill", size, live)
    counts.miss(Miss(Reason.ABOVE_LIMIT, "40 tokens, captured up to 16"), 40)
    part = coverage_of_part(counts, lambda size: gates().below(8, size).attend)
    assert (part.captured, part.eager, part.steps) == (2, 2, counts.steps)
    assert part.reasons == {"ABOVE_LIMIT": 1, "BELOW_FLOOR": 1}
    assert part.last_facts["BELOW_FLOOR"] == "bucket 4, floor 8"
    assert part.padding == {"16/prefill": pytest.approx(1 - 21 / 32)}
    assert counts.captured == 3, "the prefill's own counts are as they were"


def test_s3_s_other_gates_are_named_with_what_the_lab_has_instead():
    assert len(NON_GOALS) == 7 and all(why for why in NON_GOALS.values())
