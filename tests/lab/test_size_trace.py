"""Traces of sizes: recorded from coverage, kept in files, refused where they are none."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cglab
from cglab.engine.generation import StepRecord
from cglab.errors import InputError, ResultsError
from cglab.graphs.coverage import Coverage, Miss, Reason
from cglab.lab.size_trace import SizeTrace, load_size_trace

STEPS = st.dictionaries(st.integers(1, 8192), st.integers(1, 10**9), min_size=1)
TRACE = SizeTrace("chat-8", {"decode": {2: 5, 1: 3}, "prefill": {512: 1}}, {"model": "pico-gqa"})


def test_coverage_of_a_captured_function_is_a_trace():
    with cglab.capture(lambda x: x * 2, slots={"x": cglab.Slot()}, buckets=(1, 2, 4)) as step:
        step(x=torch.ones(3))
        before = step.coverage().copy()
        for live in (1, 3, 3, 4, 9):  # 9 is above the largest bucket, and counts all the same
            step(x=torch.ones(live))
        trace = SizeTrace.from_coverage("toy", {"decode": step.coverage() - before}, model="none")
    assert trace.phases == {"decode": {1: 1, 3: 2, 4: 1, 9: 1}}
    assert trace.source == {"model": "none"}


def test_phases_without_a_step_and_empty_batches_are_left_out():
    counts = Coverage()
    with pytest.raises(InputError, match="no phase"):
        SizeTrace.from_coverage("nothing", {"decode": counts})
    counts.hit("4", 4, 3)
    counts.miss(Miss(Reason.EMPTY_BATCH), 0)
    assert SizeTrace.from_coverage("one", {"decode": counts, "prefill": Coverage()}).phases == {
        "decode": {3: 1}
    }


def test_the_steps_of_an_engine_are_a_trace():
    steps = [
        StepRecord("prefill", 2, 30, 0.1),
        StepRecord("decode", 2, 2, 0.1),
        StepRecord("decode", 2, 2, 0.1),
        StepRecord("decode", 1, 1, 0.1),
    ]
    assert SizeTrace.from_steps("short", steps).phases == {"prefill": {30: 1}, "decode": {2: 2, 1: 1}}
    with pytest.raises(InputError, match="no phase"):
        SizeTrace.from_steps("nothing", [])


@given(st.dictionaries(st.sampled_from(["decode", "prefill", "verify"]), STEPS, min_size=1))
def test_what_was_saved_is_read_again(tmp_path_factory, phases):
    folder = tmp_path_factory.mktemp("traces") / "made when needed"
    trace = SizeTrace("t-1", phases, {"load": {"count": 3, "lengths": [1, 2]}})
    assert trace.save(folder) == folder / "t-1.json"
    assert load_size_trace("t-1", folder) == trace
    assert sum(trace.as_frame()["steps"]) == sum(sum(steps.values()) for steps in phases.values())


def test_a_trace_lies_in_the_data_folder_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("CGLAB_DATA", str(tmp_path))
    assert TRACE.save() == tmp_path / "traces" / "chat-8.json"
    assert load_size_trace("chat-8") == TRACE
    with pytest.raises(
        ResultsError, match=r"'chat-9' is no trace in .* \(did you mean chat-8\?\); good names: chat-8"
    ):
        load_size_trace("chat-9")


def test_a_write_that_fails_leaves_the_earlier_trace(tmp_path, monkeypatch):
    TRACE.save(tmp_path)
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(ResultsError, match="No space left.*untouched"):
        SizeTrace("chat-8", {"decode": {1: 1}}).save(tmp_path)
    assert load_size_trace("chat-8", tmp_path) == TRACE
    assert [path.name for path in tmp_path.iterdir()] == ["chat-8.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(schema=2), "schema 2, this version reads 1"),
        (lambda values: values["phases"]["decode"].update({"0": 3}), "size 0 3 times"),
        (lambda values: values["phases"]["decode"].update({"4": 0}), "size 4 0 times"),
        (lambda values: values["phases"]["decode"].update({"4": 2.0}), "size 4 2.0 times"),
        (lambda values: values["phases"]["decode"].update({"four": 2}), "no trace of sizes"),
        (lambda values: values["phases"].clear(), "no phase"),
        (lambda values: values.update(phases=[]), "no trace of sizes"),
        (lambda values: values.pop("source"), "no trace of sizes"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path, change, message):
    path = TRACE.save(tmp_path)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ResultsError, match=message):
        load_size_trace("chat-8", tmp_path)


def test_a_file_that_was_cut_off_is_refused(tmp_path):
    path = TRACE.save(tmp_path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ResultsError, match="no trace of sizes"):
        load_size_trace("chat-8", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Chat 8", {"decode": {1: 1}}), "lower-case letters"),
        (("../chat", {"decode": {1: 1}}), "lower-case letters"),
        (("chat", {}), "no phase"),
        (("chat", {"decode": {}}), "no steps"),
        (("chat", {"decode": {0: 1}}), "size 0 1 times"),
        (("chat", {"decode": {True: 1}}), "size True 1 times"),
        (("chat", {"decode": {1.5: 1}}), "size 1.5 1 times"),
    ],
)
def test_wrong_traces_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        SizeTrace(*arguments)


def test_wrong_phases_and_sources_are_refused(tmp_path):
    with pytest.raises(InputError, match="no phase 'verify'; it has decode, prefill"):
        TRACE.steps("verify")
    with pytest.raises(InputError, match="no plain data"):
        SizeTrace("chat", {"decode": {1: 1}}, {"model": torch.ones(1)}).save(tmp_path)
    assert TRACE.steps("decode") == {1: 3, 2: 5}
