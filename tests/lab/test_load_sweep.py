"""Loads by the arms of a toggle: the same work for all, in turns; and how busy one run kept the device, over time."""

import math

import pytest

import cglab
from cglab.engine.load import Load
from cglab.errors import InputError, ToggleError
from cglab.lab.comparison import TAPE_NOTE
from cglab.lab.load_sweep import load_sweep
from cglab.ui.plots import summary


@pytest.fixture(scope="module")
def lab():
    options = {"max_batch": 4, "max_context": 64, "buckets": [1, 4], "prefill_buckets": [16, 48]}
    with cglab.open("pico-gqa", device="cpu", **options) as opened:
        yield opened


@pytest.fixture(scope="module")
def swept(lab):
    return load_sweep(lab, [Load(3, 1, 12, 1), Load(4, 2, 3, (1, 2), shared_prefix=16)], instances=3)


def test_every_arm_answers_the_same_requests_alike_and_the_toggle_is_as_it_was(lab, swept):
    assert lab.captures.prefill == "breakable"
    for point in swept.points:
        assert {arm: len(runs) for arm, runs in point.runs.items()} == {"eager": 3, "breakable": 3}
        assert len({run.result.payload for runs in point.runs.values() for run in runs}) == 1
        assert point.parity("breakable").verdict == "bitwise"
        assert [len(instance) for instance in point.ttft("breakable")] == [point.load.count] * 3


def test_no_run_that_is_kept_waited_for_a_capture(swept):
    assert {run.captured_buckets for point in swept.points for run in point.runs["breakable"]} == {0}


def test_eager_steps_are_counted_by_reason(swept):
    assert set(swept.eager_steps("eager")) == {"BACKEND_EAGER"}
    # Prompts of 12 fit a bucket; 3 new tokens, and 3 of each of two requests, would be padded to more than twice that.
    assert set(swept.eager_steps("breakable")) == {"WASTE_CEILING"}


def test_the_table_equals_the_figure(swept):
    frame, figure = swept.as_frame(), swept.plot()
    assert frame[["prompt_tokens", "cached", "concurrency", "arm", "tokens"]].values.tolist() == [
        ["12", 0, 1, "eager", "reference"], ["12", 0, 1, "breakable", "bitwise"],
        ["3", 16, 2, "eager", "reference"], ["3", 16, 2, "breakable", "bitwise"],
    ]  # fmt: skip
    assert frame["captured"].tolist()[:2] == ["0/9", "9/9"] and frame["verdict"].isna().tolist()[::2] == [
        True,
        True,
    ]
    assert (frame["low_ms"] <= frame["ttft_ms"]).all() and (frame["ttft_ms"] <= frame["high_ms"]).all()
    drawn = {(trace.name, float(height)) for trace in figure.data for height in trace.y}
    assert drawn == set(zip(frame["arm"], frame["ttft_ms"], strict=True))
    assert [note.text for note in figure.layout.annotations] == ["12 tokens", "3 tokens<br>after 16 cached"]
    assert TAPE_NOTE in figure.layout.title.subtitle.text and "3 turns" in figure.layout.title.subtitle.text


@pytest.mark.parametrize("loads", [[], [Load(2, 1, 4, 0)], [Load(2, 1, 4, (0, 3))]])
def test_loads_without_a_first_token_are_refused(lab, loads):
    with pytest.raises(InputError, match="new_tokens from 1"):
        load_sweep(lab, loads)


def test_a_run_that_fails_leaves_the_toggle_as_it_was(lab):
    with pytest.raises(InputError, match="do not fit"):
        load_sweep(lab, [Load(1, 1, 4, 1, shared_prefix=640)], ("full", "eager"))
    assert lab.captures.prefill == "breakable"
    with pytest.raises(ToggleError, match="good values"):
        load_sweep(lab, [Load(1, 1, 4, 1)], ("eager", "fast"))


def test_occupancy_of_its_windows_adds_up_to_that_of_the_run(lab):
    run = lab.load(Load(6, 3, (4, 30), (2, 6)))
    frame = run.occupancy_frame(windows=9)
    assert len(run.segments) == len(run.steps)
    assert frame["start_s"].iloc[0] == 0 and frame["end_s"].iloc[-1] == pytest.approx(run.result.seconds)
    assert frame["all"].fillna(0).mean() == pytest.approx(run.occupancy)
    phases = frame[["prefill", "decode"]].fillna(0)
    assert phases.sum(axis=1).tolist() == pytest.approx(frame["all"].fillna(0).tolist())
    figure = run.plot_occupancy(windows=9)
    assert summary(figure) == (
        "bar prefill: 9 points\nbar decode: 9 points\naxes: time since the first request (s); forward occupancy (%)"
    )
    assert [trace.name for trace in figure.data if trace.marker.pattern.shape] == ["prefill"]


def test_s4_a_window_in_which_nothing_ran_is_no_number_and_no_bar(lab):
    run = lab.load(Load(1, 1, 4, 1))
    late = run.__class__(**{**vars(run), "segments": ()})
    assert all(math.isnan(value) for value in late.occupancy_frame(3)["all"])
    assert late.plot_occupancy(windows=3).data == ()
    with pytest.raises(InputError, match="0 windows"):
        run.occupancy_frame(0)
