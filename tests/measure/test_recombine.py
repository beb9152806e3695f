"""Predicted steps: parts that are known are found again, nothing is predicted from itself, and the records bear it out."""

import itertools
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.errors import InputError
from cglab.lab.recorded import recorded
from cglab.measure.machine import Device
from cglab.measure.recombine import Recombination, StepPoint, between, broken_host_ms, step_points
from cglab.measure.recombine_checks import HELD_OUT, check
from cglab.measure.record import Record

SIZES = [(batch, 512) for batch in (1, 2, 4, 8, 16)] + [(batch, c) for batch in (1, 16) for c in (2048, 8192)]


def device_ms(batch, context):
    return 4.0 + 0.05 * batch + batch * context / 65536


def known_points(arms=("eager", "full", "breakable"), launch_ms=0.05):
    """Steps whose parts are as the model says, exactly: 300 launches, a gap of 0.2 ms, a host of 5 ms for breaks."""
    made = []
    for arm, (batch, context) in itertools.product(arms, SIZES):
        device = device_ms(batch, context)
        host = {"eager": 300 * launch_ms, "full": 0.0, "breakable": 5.0}[arm]
        launches = 300.0 if arm == "eager" else 2.0
        made.append(StepPoint(arm, batch, context, max(device, host) + 0.2, device, launches))
    return tuple(made)


@pytest.mark.parametrize(
    ("batch", "context"), [*SIZES, (3, 512), (12, 512), (1, 1000), (16, 4000), (6, 3000)]
)
@pytest.mark.parametrize(("arm", "host"), [("full", 0.0), ("breakable", 5.0)])
def test_steps_of_known_parts_are_found_at_recorded_sizes_and_between(arm, host, batch, context):
    told = Recombination(known_points(), 5.0).predict(arm, batch, context)
    assert told.step_ms == pytest.approx(max(device_ms(batch, context), host) + 0.2, rel=1e-6)
    assert told.low_ms == told.high_ms == told.step_ms and told.reason


def test_a_step_that_the_host_decides_has_a_range_and_no_number():
    cheap, dear = known_points(("eager",), 0.04), known_points(("eager", "full"), 0.08)
    told = Recombination(cheap + dear).predict("eager", 4, 512)
    assert told.step_ms is None
    assert told.low_ms == pytest.approx(300 * 0.04, rel=0.03) and told.high_ms == pytest.approx(
        300 * 0.08, rel=0.03
    )
    assert "the host decides" in told.reason


def test_an_eager_step_that_the_device_decides_is_predicted_as_a_captured_one():
    told = Recombination(known_points(("eager", "full"), 0.001)).predict("full", 16, 8192)
    points = known_points(("full",)) + tuple(
        StepPoint("eager", batch, 512, 15.0, 4.0, 300.0) for batch in (1, 2, 4)
    )
    long = tuple(
        StepPoint(arm, 16, 65536, 20.5, 20.3, 300.0 if arm == "eager" else 2.0) for arm in ("eager", "full")
    )
    found = Recombination(points + long).predict("eager", 16, 65536)
    assert told.step_ms is not None and found.step_ms == pytest.approx(20.5, rel=0.01)


@pytest.mark.parametrize(
    ("arm", "batch", "context", "why"),
    [
        ("full", 32, 512, "nothing is recorded around batch 32"),
        ("full", 1, 9000, "nothing is recorded around batch 1 at context 9000"),
        ("breakable", 1, 512, "with breaks is not recorded"),
    ],
)
def test_what_was_not_recorded_around_is_refused_and_never_extrapolated(arm, batch, context, why):
    told = Recombination(known_points()).predict(arm, batch, context)
    assert told.step_ms is None and told.low_ms is None and why in told.reason


def test_an_arm_without_another_step_and_an_unknown_one_are_refused():
    told = Recombination(known_points(("eager",))).predict("full", 4, 512)
    assert told.step_ms is None and "no other step of full" in told.reason
    with pytest.raises(InputError, match="breakable"):
        Recombination(()).predict("transformers", 1, 512)


def test_batches_far_apart_tell_nothing_about_one_between():
    assert between({1: 1.0, 16: 2.0}, 4, 4) is None
    assert between({1: 1.0, 16: 2.0}, 4) == pytest.approx(1.2)
    assert between({4: 1.0, 16: 2.0}, 10, 4) == 1.5
    assert between({4: 1.0}, 3) is None and between({4: 1.0}, 5) is None and between({}, 5) is None


@given(
    known=st.dictionaries(st.integers(1, 1000), st.floats(0.1, 100.0), min_size=2, max_size=8),
    at=st.integers(1, 1000),
)
def test_between_stays_between(known, at):
    found = between(known, at)
    assert (found is None) == (not min(known) <= at <= max(known))
    if found is not None:
        assert min(known.values()) - 1e-9 <= found <= max(known.values()) + 1e-9


@pytest.mark.parametrize("held_out", HELD_OUT)
def test_no_check_sees_what_it_predicts(held_out):
    points = known_points()
    spoilt = tuple(
        StepPoint(p.arm, p.batch, p.context, p.step_ms * 7, p.busy_ms * 7, p.launches)
        if p.size == (16, 2048) and (held_out != "combination" or p.arm == "full")
        else p
        for p in points
    )
    plain, other = (
        next(c for c in check(Recombination(each, 5.0)).made
             if (c.held_out, c.arm, c.batch, c.context) == (held_out, "full", 16, 2048))
        for each in (points, spoilt)
    )  # fmt: skip
    assert plain.predicted_ms == pytest.approx(other.predicted_ms, rel=1e-9)
    assert other.recorded_ms == pytest.approx(7 * plain.recorded_ms)


def test_checks_say_their_error_and_what_they_leave_out():
    checks = check(Recombination(known_points(), 5.0))
    assert checks.mean == pytest.approx(0.0, abs=1e-6) and "not predicted" in str(checks)
    frame = checks.as_frame()
    assert len(frame) == len(checks.made) and set(frame["held_out"]) == set(HELD_OUT)
    empty = check(Recombination(()))
    assert (empty.mean, empty.worst) == (None, None) and "no prediction" in str(empty)


def record(arm, **changes):
    facts = {
        "bench": "decode", "arm": arm, "device": Device("NVIDIA H200", "cuda"), "model": "qwen3-8b",
        "workload": {"batch": 1, "context": 512}, "metrics": {"step_ms": 5.0, "busy_ms": 4.0, "launches": 2.0},
    }  # fmt: skip
    return Record(**{**facts, **changes})


def test_only_whole_steps_of_the_model_on_a_gpu_are_points():
    records = [
        record("full"), record("transformers"), record("full", model="other"),
        record("full", device=Device("a processor", "cpu")), record("full", metrics={"step_ms": None}),
        record("full", workload={"fitted": "batch and context"}),
    ]  # fmt: skip
    assert step_points(records, "qwen3-8b", ("full",)) == (StepPoint("full", 1, 512, 5.0, 4.0, 2.0),)
    replays = [
        record("breakable", workload={"phase": phase}, metrics={"total_us": us})
        for phase, us in (("decode", 4000.0), ("decode", 6000.0), ("prefill", 9e9))
    ]
    assert broken_host_ms(replays, "qwen3-8b") == 5.0 and broken_host_ms(replays, "other") is None


def test_recorded_h200_steps_are_predicted_within_five_percent_in_the_mean_and_fifteen_at_worst():
    records = [
        each for bench in ("decode", "growth") for each in recorded(bench).records
        if each.workload.get("ops") == "compiled"
    ]  # fmt: skip
    for model in ("qwen3-8b", "qwen3-0.6b"):
        points = step_points(records, model, ("eager", "full", "breakable"))
        checks = check(Recombination(points, broken_host_ms(recorded("replay").records, model)))
        assert checks.mean <= 0.05 and checks.worst <= 0.15, (model, str(checks))
        captured = [each for each in checks.made if each.arm == "full" and each.held_out == "combination"]
        assert all(each.predicted_ms is not None for each in captured) and len(captured) >= 3
    assert median(checks.errors()) > 0  # a prediction that is exact has seen its answer
