"""``dsa_indexer_prep=auto``: each prefill step in T9 or T9b as recorded costs say, to the bit, with the reason counted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cglab
from cglab.graphs.coverage import Coverage, Miss, Reason
from cglab.lab.bucket_floor import bucket_floor
from cglab.lab.profiles import results_folder
from cglab.lab.selection_rule import recorded_rule
from cglab.lab.sparse_arms import ARMS, check_arms, toggled
from cglab.lab.sparse_prefill import SparseArm
from cglab.measure.record import make_record
from cglab.measure.records import append
from cglab.models.spans import Span
from cglab.runners.dsa_choice import SELECTION
from cglab.runners.dsa_policy import SelectionRule
from cglab.settings import KILL_SWITCHES

AUTO = SparseArm("breakable", preparation="auto")
RULE = SelectionRule(((0, 32), (16, 0), (64, 8)))
SIZES = {"max_batch": 4, "max_context": 96, "token_budget": 32, "buckets": (1, 2, 4)}
CPU = torch.device("cpu")


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """A lab on either device, in whose results nothing is recorded; and with a rule, if one is given."""
    monkeypatch.setenv("CGLAB_DATA", str(tmp_path))
    labs = []

    def open_one(rule=None, device="cpu", **options):
        lab = cglab.open("dsa-tiny", device=device, prefill_buckets=(4, 8, 16, 32), **SIZES | options)
        if rule is not None:
            lab.phases.selection = lambda: rule
        labs.append(lab)
        return lab

    yield open_one
    for lab in labs:
        lab.close()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_s3_steps_of_both_kinds_are_bitwise_those_of_the_arm_with_breaks(opened, device):
    floors = [bucket_floor(opened(device=device), arm).measured for arm in ARMS[1:]]
    lab = opened(RULE, device, bucket_floor=max(floors))
    _, found = check_arms(lab, (ARMS[0], AUTO))
    assert found.arm == "breakable, dsa_indexer_prep auto" and found.ok
    prefill, selection = found.coverage["prefill"], found.coverage[SELECTION]
    assert selection.captured > 0 and selection.misses["LIVE_EXTENT"] > 0, "some of both"
    assert selection.steps == prefill.steps and selection.captured < prefill.captured
    runner = lab.phases.prefill(dsa_indexer_prep="auto")
    assert {room for room, each in runner.recorded.items() if each.coverage().captured} == {0, 64}
    assert (
        runner.tries()
        == len(runner.memory())
        == len(runner.captured.memory())
        + sum(len(each.captured.memory()) for each in runner.recorded.values())
    )
    assert not any("break" in line for line in runner.recorded[0].captured.inspect(32))


def test_without_costs_the_break_stays_and_says_what_records_them(opened):
    lab = opened()
    lab.captures.dsa_indexer_prep = "auto"
    lab.generate([[3] * 30], 2)
    arm = AUTO.name
    assert lab.coverage("prefill")[arm].captured == lab.coverage("dsa_indexer_prep")[arm].captured == 1
    told = lab.coverage(SELECTION)[arm]
    assert told.captured == 0 and told.last_facts == {
        "LIVE_EXTENT": "30 tokens after 0 cached: no costs of this model on this kind of device are recorded; "
        "cglab bench dsa records them"
    }


def test_a_step_in_which_either_recording_is_made_is_not_timed(opened):
    lab = opened(SelectionRule(((0, 16),)), bucket_floor=1)
    lab.captures.dsa_indexer_prep = "auto"
    for token in range(3):
        for length in (12, 30):
            lab.generate([[token + length] * length], 1)
    spent = lab.times.groups().values()
    assert sum(each.steps for each in spent) == 6 and sum(each.timed for each in spent) == 4
    assert len(lab.phases.prefill().memory()) == 2


def test_a_size_is_captured_ahead_in_the_kinds_that_may_serve_it_and_all_is_given_back(opened):
    lab = opened(SelectionRule(((0, 16), (64, 8))))
    runner = lab.phases.prefill(dsa_indexer_prep="auto")
    made = [runner, *runner.recorded.values()]
    for rows, sizes in ((30, ([32], [], [])), (12, ([16, 32], [16], [])), (8, ([8, 16, 32], [8, 16], [8]))):
        runner.capture_for(rows)
        assert tuple(each.captured.captured_sizes for each in made) == sizes
    lab.close()
    assert not any(each.captured.captured_sizes for each in made)


@pytest.mark.parametrize("arm", ["dsa_attention", "dsa_indexer_prep"])
def test_a_kill_switch_leaves_nothing_to_choose(opened, monkeypatch, arm):
    switch = dict(zip(("dsa_attention", "dsa_indexer_prep"), KILL_SWITCHES, strict=False))[arm]
    monkeypatch.setenv(switch, "1")
    lab = opened(RULE)
    runner = lab.phases.prefill(dsa_indexer_prep="auto")
    assert runner.recorded == {} and switch in runner.room_for([Span(1, 0, 8)]).facts


def test_more_requests_than_the_axis_holds_keep_the_break_and_stay_captured(opened):
    runner = opened(RULE).phases.prefill(dsa_indexer_prep="auto")
    spans = [Span(1, 0, 1)] * runner.max_requests
    assert runner.room_for(spans) == 0
    assert runner.room_for([*spans, Span(1, 0, 1)]) == Miss(
        Reason.MORE_REQUESTS, "17 requests, the axis holds 16"
    )


def test_a_full_or_eager_prefill_asks_no_rule(opened):
    lab = opened()
    lab.phases.selection = None  # whoever asked would fail
    for mode in ("full", "eager"):
        with toggled(lab, SparseArm(mode, preparation="auto")):
            lab.generate([[5] * 20], 1)


@pytest.mark.parametrize(("whole", "limits"), [(8.0, ((64, 24),)), (12.0, ((64, 0),))])
def test_the_rule_is_read_from_records_of_this_model_on_this_kind_of_device(opened, whole, limits):
    lab = opened()

    def record(arm, ms, model="dsa-tiny", dtype="float32"):
        return make_record(
            bench="dsa_prefill", arm=arm, device=CPU, run="run", model=model, dtype=dtype, metrics={"instances": 3.0},
            samples={"ttft_ms": [ms, ms + 0.1] * 3},
            workload={
                "fresh": 12, "cached": 32, "concurrency": 2, "step": {"tokens": 24, "cached": 32, "requests": 2},
            },
        )  # fmt: skip

    rows = [record("graph", 10.0), record("whole", whole), record("whole", 1.0, model="dsa-24")]
    append(results_folder() / "dsa_prefill.jsonl", [*rows, record("whole", 1.0, dtype="bfloat16")])
    assert lab.phases.selection() == recorded_rule("dsa-tiny", torch.float32, CPU) == SelectionRule(limits)
    assert recorded_rule("dsa-24", torch.float32, CPU) == SelectionRule(), "one arm alone is no cost"


@given(
    limits=st.dictionaries(st.integers(0, 9), st.integers(0, 9)).map(
        lambda each: tuple(sorted(each.items()))
    ),
    tokens=st.integers(1, 12),
    cached=st.integers(0, 12),
)
def test_a_step_is_recorded_in_the_least_room_that_holds_it_or_not_at_all(limits, tokens, cached):
    rule = SelectionRule(limits)
    found = rule.room_for(tokens, cached)
    wide_enough = [room for room, _ in limits if room >= cached]
    if isinstance(found, Miss):
        assert not wide_enough or tokens > dict(limits)[min(wide_enough)]
        assert found.reason is Reason.LIVE_EXTENT and found == rule.why_break(tokens, cached)
    else:
        assert (
            found == min(wide_enough)
            and tokens <= rule.rooms[found]
            and rule.why_break(tokens, cached) is None
        )


def test_coverage_of_two_runners_is_that_of_all_their_steps():
    one, other = Coverage(), Coverage()
    one.hit("8", 8, 5)
    other.hit("8", 8, 7)
    one.miss(Miss(Reason.MORE_KEYS, "9 cached"), 3)
    both = one + other
    assert (both.captured, both.eager, both.live_rows["8"], both.last_facts) == (
        2,
        1,
        12,
        {"MORE_KEYS": "9 cached"},
    )
    assert both.latest == one.latest and (other + one).latest == one.latest
    assert one.captured == 1, "neither changes"
