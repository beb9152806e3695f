"""The replay bench: the verbs' parts add up to what a step costs the host."""

import json
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cglab
from cglab.engine.workload import steady_decode
from cglab.lab import replay_bench
from cglab.lab.replay_bench import verb_metrics, verb_samples
from cglab.lab.tables import format_table

CPU = torch.device("cpu")
VERBS = (
    "derive", "live_size", "can_run", "plan", "decide", "load", "check", "replay", "trim", "bare", "total"
)  # fmt: skip
SPLIT = ("derive_us", "decide_us", "load_us", "check_us", "dispatch_us", "trim_us", "rest_us")


@pytest.fixture(scope="module")
def records():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_bench, "QUICK_SIZES", {"max_batch": 4, "max_context": 48, "token_budget": 16})
        points = (("decode", {"batch": 3, "context": 20}), ("prefill", {"tokens": 16}))
        patch.setattr(replay_bench, "QUICK_POINTS", points)
        patch.setattr(replay_bench, "ROUNDS", 1)
        patch.setattr(replay_bench, "QUICK_REPEATS", 3)
        yield list(replay_bench.replay(CPU, quick=True))


def test_every_point_has_both_arms_all_captured_and_bitwise(records):
    assert [(r.workload["phase"], r.arm, r.workload["bucket"], r.workload["padded"]) for r in records] == [
        ("decode", "full", 4, True), ("decode", "breakable", 4, True),
        ("prefill", "full", 16, False), ("prefill", "breakable", 16, False),
    ]  # fmt: skip
    for each in records:
        assert each.parity["verdict"] == "bitwise" and each.coverage["eager"] == 0
        assert set(each.samples) == {f"{verb}_us" for verb in VERBS}
        assert all(value > 0 for values in each.samples.values() for value in values)
        assert json.loads(each.as_line())["bench"] == "replay"


def test_the_parts_add_up_to_the_hosts_cost(records):
    for each in records:
        metrics = each.metrics
        assert sum(metrics[name] for name in SPLIT) == pytest.approx(metrics["host_us"])
        assert metrics["total_us"] == pytest.approx(metrics["bare_us"] + metrics["host_us"])
        assert "launches_outside" not in metrics, "no device records on a CPU"
    assert "no graph speed-ups" in format_table(records)


def calls_of(function, *_):
    """A time that is the same on every machine: how many functions were entered."""
    entered = []
    sys.setprofile(lambda _frame, event, _: entered.append(event) if event.endswith("call") else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(entered)


def test_a_decision_is_looked_up_and_not_made_again(monkeypatch):
    monkeypatch.setattr(replay_bench, "host_us", calls_of)
    with (
        cglab.open("pico-gqa", device="cpu", max_batch=4, max_context=32, buckets=[4]) as lab,
        steady_decode(lab.engine, 3, 16) as step,
    ):
        samples = verb_samples(lab.runner("full"), step, CPU)
    metrics = verb_metrics({verb: counts[0] for verb, counts in samples.items()})
    assert 0 < 3 * metrics["decide_us"] < metrics["first_decide_us"]


@given(st.lists(st.floats(0, 1e6), min_size=len(VERBS), max_size=len(VERBS)))
def test_nothing_of_a_step_is_counted_twice_or_lost(times):
    us = dict(zip(VERBS, times, strict=True))
    metrics = verb_metrics(us)
    assert metrics["bare_us"] + sum(metrics[name] for name in SPLIT) == pytest.approx(us["total"], abs=1e-3)


def test_a_step_that_runs_eager_has_a_total_and_no_verbs():
    with (
        cglab.open("pico-gqa", device="cpu", max_batch=3, max_context=32, buckets=[1]) as lab,
        steady_decode(lab.engine, 2, 16) as step,
    ):
        samples = verb_samples(lab.runner("full"), step, CPU, repeats=3)
    assert list(samples) == ["total"] and verb_metrics({"total": 7.0}) == {"total_us": 7.0}
