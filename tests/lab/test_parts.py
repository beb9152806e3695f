"""A step taken apart: segments and breaks in order, each timed alone, the step itself untouched."""

import pytest
import torch

import cglab
from cglab.errors import ClosedError, InputError, ToggleError
from cglab.lab import steps
from cglab.lab.comparison import TAPE_NOTE
from cglab.lab.parts import step_parts


@pytest.fixture(scope="module")
def lab():
    with cglab.open("pico-gqa", device="cpu", max_batch=2, max_context=64, prefill_buckets=[16]) as opened:
        yield opened


@pytest.fixture(scope="module")
def parts(lab):
    return step_parts(lab, tokens=12, requests=2, repeats=3)


def test_a_breakable_prefill_has_a_break_in_each_layer_and_a_segment_around_each(lab, parts):
    layers = lab.config.num_layers
    assert parts.kinds("breakable") == ["segment", "break"] * layers + ["segment"]
    assert {part.name for part in parts.arms["breakable"] if part.kind == "break"} == {"_prefill"}
    assert parts.kinds("full") == ["segment"]
    recorded = lab.runner("breakable", "prefill").captured.inspect(16)
    assert sum(part.operations or 0 for part in parts.arms["breakable"]) == len(recorded) - layers


def test_table_and_text_say_what_the_parts_are(lab, parts):
    frame = parts.as_frame()
    assert frame["arm"].tolist() == ["breakable"] * (2 * lab.config.num_layers + 1) + ["full"]
    assert frame["part"].tolist()[:3] == [1, 2, 3] and frame["part"].iloc[-1] == 1
    assert frame["operations"].isna().tolist() == [part == "break" for part in frame["kind"]]
    assert (frame["time_us"] > 0).all()
    assert parts.title == "One prefill step of pico-gqa, tokens 12, cached 0, requests 2: segments and breaks"
    assert f"breakable: {lab.config.num_layers} x break" in str(parts) and TAPE_NOTE in str(parts)


def test_p56_taking_a_step_apart_leaves_the_runner_and_the_result_as_they_were(lab):
    runner = lab.runner("breakable", "prefill")
    with steps.fixed_step(lab.engine, "prefill", {"tokens": 12}, lab.sizes) as step:
        before = runner.run(step.live, **step.inputs).clone()
    step_parts(lab, arms=["breakable"], tokens=12, repeats=1)
    assert runner.live.spans == () and lab.engine.idle
    with steps.fixed_step(lab.engine, "prefill", {"tokens": 12}, lab.sizes) as step:
        assert torch.equal(runner.run(step.live, **step.inputs), before)


def test_decode_steps_have_parts_too(lab):
    parts = step_parts(lab, "decode", batch=2, context=9, repeats=1)
    assert parts.kinds("breakable").count("break") == lab.config.num_layers


@pytest.mark.parametrize(
    ("arms", "tokens", "told"),
    [(["eager"], 12, "backend_eager"), (["breakable"], 3, "waste_ceiling"), (["full"], 40, "above_limit")],
)
def test_a_step_that_runs_eager_has_no_parts_and_the_reason_is_said(lab, arms, tokens, told):
    with pytest.raises(InputError, match=told):
        step_parts(lab, arms=arms, tokens=tokens)
    assert lab.engine.idle


def test_bad_names_are_refused_and_a_closed_lab_says_so():
    lab = cglab.open("pico-gqa", device="cpu", max_batch=1, max_context=32)
    with pytest.raises(ToggleError, match="good values"):
        step_parts(lab, arms=["fast"])
    lab.close()
    with pytest.raises(ClosedError):
        step_parts(lab)
