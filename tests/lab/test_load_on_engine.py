"""The closed-loop load on the real engine: the same work for every arm, timings in order, occupancy of its segments."""

import pytest

import cglab
from cglab.engine.load import Load, drive
from cglab.engine.requests import Request
from cglab.errors import InputError
from cglab.measure.latency import latency
from cglab.measure.occupancy import OccupancyMeter, occupancy

LOAD = Load(7, 3, (2, 20), (0, 9), shared_prefix=16, seed=3)


@pytest.fixture(scope="module")
def lab():
    with cglab.open("pico-gqa", device="cpu", max_batch=4, max_context=128, buckets=[1, 4]) as opened:
        opened.captures.prefill = "eager"
        yield opened


def test_arms_get_byte_identical_requests_and_answer_alike(lab):
    results = {}
    for arm in ("eager", "full", "full"):  # the second time, earlier prompts are not hits
        lab.captures.decode = arm
        results.setdefault(arm, []).append(drive(lab.engine, LOAD, lab.config.vocab_size))
    (eager,), (full, again) = results.values()
    assert eager.payload == full.payload == again.payload
    assert eager.outputs == full.outputs == again.outputs
    reused = [each.reused_tokens for each in full.requests if each.token_times]
    assert reused == [each.reused_tokens for each in again.requests if each.token_times]
    assert set(reused) == {16}
    assert lab.engine.idle


def test_timings_are_in_order_and_occupancy_is_of_the_engines_segments(lab):
    engine, meter, segments = lab.engine, OccupancyMeter(every=0.005), []
    engine.segments.drain()

    def gather(_):
        drained = engine.segments.drain()
        segments.extend(drained)
        meter.batch_done(drained, engine.now())

    started = engine.now()
    result = drive(engine, LOAD, lab.config.vocab_size, after_step=gather)
    for each in result.requests:
        if each.token_times:
            times = [each.arrived_at, each.admitted_at, *each.token_times]
            assert times == sorted(times) and each.token_times[-1] == each.finished_at
            assert each.ttft >= each.queueing >= 0
    found = latency(result)
    assert (found.completed, found.errors, found.in_flight) == (7, 0, 0)
    assert 0 < found.concurrency <= 3
    assert {each.kind for each in segments} == {"decode", "prefill"} and not engine.segments.dropped
    assert 0 < occupancy(segments, started, engine.now()) < 100
    assert 0 < meter.value <= 100


def test_a_load_leaves_the_engine_idle_whatever_ends_it(lab):
    endless = Load(4, 2, 5, 100)
    cut = drive(lab.engine, endless, lab.config.vocab_size, seconds=1e-6)
    assert {each.finish for each in cut.requests} == {None} and cut.unsent == 2 and lab.engine.idle
    empty = drive(lab.engine, Load(3, 1, 5, 0), lab.config.vocab_size)
    assert [each.finish for each in empty.requests] == ["length"] * 3 and lab.engine.idle

    def broken(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive(lab.engine, endless, lab.config.vocab_size, after_step=broken)
    assert lab.engine.idle
    too_long = drive(lab.engine, Load(2, 1, 5, 9999), lab.config.vocab_size)
    assert (
        all("do not fit" in each.error for each in too_long.ended("error"))
        and len(too_long.ended("error")) == 2
    )


def test_requests_of_others_are_not_disturbed(lab):
    other = Request(0, [5, 6, 7], 2)
    lab.engine.submit(other)
    with pytest.raises(InputError, match="requests of others"):
        drive(lab.engine, LOAD, lab.config.vocab_size)
    while not lab.engine.idle:
        lab.engine.step()
    assert other.finish == "length"
