"""The widget strip, cheapest first: the state, the view, what a browser sends, a real lab."""

import gc
import logging

import pytest
import torch
from ipywidgets.widgets.widget import _instances

import cglab
from cglab.errors import CaptureError, ClosedError, ToggleError
from cglab.ui.strip import PLOTLY, LabWorker, Strip, StripState, lab_strip


class FakeWorker:
    """Does as told: results by mode, errors where planted."""

    technique, mode, size, largest = "decode", "eager", 1, 8

    def __init__(self, make):
        self.make, self.calls, self.errors = make, [], {}

    def _called(self, *call):
        self.calls.append(call)
        if call[0] in self.errors:
            raise self.errors[call[0]]

    def choose(self, mode, size):
        self._called("choose", mode)

    def run(self, mode, size):
        self._called("run", mode, size)
        return self.make.compared(size, arms=("eager", "full" if mode == "eager" else mode), recorder="tape")


@pytest.fixture
def worker(make):
    return FakeWorker(make)


@pytest.fixture
def strip(worker, caplog):
    """A strip; nothing may be swallowed by a callback, which ipywidgets would only log (N05)."""
    with caplog.at_level(logging.WARNING, logger="traitlets"):
        made = Strip(worker)
        yield made
        made.close()
    assert [entry.getMessage() for entry in caplog.records] == []


def browser_sets(widget, **state):
    """The message of a browser in which the user changed a control."""
    widget._handle_msg({"content": {"data": {"method": "update", "state": state}}, "buffers": []})


def browser_clicks(button):
    """The message of a browser in which the user pressed a button."""
    event = {"method": "custom", "content": {"event": "click"}}
    button._handle_msg({"content": {"data": event}, "buffers": []})


def test_state_tells_apart_what_is_asked_and_what_is():
    state = StripState(requested="full", actual="eager")
    assert (state.requested, state.actual, state.running, state.error, state.result) == (
        "full", "eager", False, "", None,
    )  # fmt: skip
    with pytest.raises(Exception, match="fast"):
        state.requested = "fast"
    with pytest.raises(Exception, match="size"):
        state.size = 0


def test_choosing_captures_first_and_then_is_the_case(strip, worker):
    strip.state.requested = "full"
    assert worker.calls == [("choose", "full")]
    assert strip.state.actual == strip.mode.value == "full"
    assert strip.status.value == "decode runs full"


def test_a_browser_can_do_all_of_it(strip, worker):
    browser_sets(strip.mode, index=1)
    browser_sets(strip.size, value=3)
    browser_clicks(strip.start)
    assert worker.calls == [("choose", "breakable"), ("run", "breakable", 3)]
    assert "breakable" in strip.table.value and "bitwise" in strip.table.value
    (output,) = strip.plot.outputs
    assert output["data"][PLOTLY]["layout"]["title"]["subtitle"]["text"].startswith("CPU tape")
    assert output["data"]["text/plain"].startswith("bar eager: 1 point\nbar breakable: 1 point")


def test_a_size_beyond_the_lab_is_cut_to_its_largest(strip):
    browser_sets(strip.size, value=100)
    assert strip.state.size == 8


def test_every_control_has_a_name(strip):
    assert [strip.mode.description, strip.size.description, strip.start.description] == [
        "Decode mode", "Batch size", "Run",
    ]  # fmt: skip


def test_n05_a_mode_that_cannot_be_captured_flips_back_and_says_why(strip, worker):
    worker.errors["choose"] = CaptureError("attention <reads> the host")
    sent = []
    strip.mode.comm.send = lambda data=None, **_: sent.append(data)
    browser_sets(strip.mode, index=0)
    assert (strip.state.requested, strip.state.actual, strip.mode.value) == ("eager", "eager", "eager")
    assert 'role="alert"' in strip.error.value
    assert "CaptureError: attention &lt;reads&gt; the host" in strip.error.value
    assert worker.calls == [("choose", "full")]
    assert {"index": 2} in [{k: v for k, v in m["state"].items() if k == "index"} for m in sent]


def test_n05_an_error_of_a_run_is_shown_and_cleared_by_the_next_success(strip, worker):
    browser_clicks(strip.start)
    before = strip.table.value
    worker.errors["run"] = ValueError("batch 3 does not fit")
    browser_clicks(strip.start)
    assert "ValueError: batch 3 does not fit" in strip.error.value
    assert strip.table.value == before and not strip.state.running
    del worker.errors["run"]
    browser_clicks(strip.start)
    assert strip.error.value == ""


def test_n05_a_plot_that_fails_is_shown_too(strip, worker):
    result = worker.run("full", 1)
    object.__setattr__(result, "memory", None)
    worker.run = lambda mode, size: result
    browser_clicks(strip.start)
    assert "TypeError" in strip.error.value and not strip.state.running


def test_controls_are_disabled_while_work_is_under_way(strip, worker):
    seen = []
    plain = worker.run
    worker.run = lambda *call: (
        seen.append((strip.start.disabled, strip.mode.disabled, strip.status.value)), plain(*call),
    )[1]  # fmt: skip
    browser_clicks(strip.start)
    assert seen == [(True, True, "working ...")]
    assert (strip.start.disabled, strip.mode.disabled) == (False, False)


def test_an_interrupt_flips_back_and_frees_the_controls(strip, worker):
    worker.errors["choose"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        strip.state.requested = "full"
    assert (strip.state.requested, strip.state.running) == ("eager", False)


def test_close_leaves_no_widget_behind(worker):
    before = set(_instances)
    made = Strip(worker)
    browser_clicks(made.start)
    assert len(set(_instances) - before) > 10
    made.close()
    assert set(_instances) == before


@pytest.fixture(scope="module")
def lab():
    with cglab.open("pico-gqa", device="cpu", max_batch=2, max_context=32, buckets=[2]) as opened:
        yield opened


def test_a_real_lab_is_toggled_and_measured(lab):
    strip = lab_strip(lab)
    strip.state.requested = "breakable"
    assert (strip.state.error, lab.captures.decode) == ("", "breakable")
    strip.run()
    assert strip.state.error == "" and strip.state.result.parity["breakable"].ok
    strip.state.requested = "eager"
    strip.run()
    assert [arm.name for arm in strip.state.result.times.arms] == ["eager", "full", "breakable"]
    strip.close()


def test_prefill_steps_are_switched_and_measured_on_a_strip_of_their_own(lab):
    decode, strip = lab_strip(lab), lab_strip(lab, "prefill")
    assert (strip.mode.description, strip.size.description) == ("Prefill mode", "New tokens")
    assert strip.mode.value == lab.captures.prefill == "breakable"
    assert strip.size.value == lab.sizes.default("tokens") == 31
    browser_sets(strip.size, value=10_000)
    assert strip.state.size == 31  # a context of 32 keeps a place for the new token
    browser_sets(strip.size, value=11)
    browser_sets(strip.mode, index=0)
    assert (strip.state.error, lab.captures.prefill) == ("", "full")
    assert strip.status.value == "prefill runs full"
    assert lab.runner("full", "prefill").captured.captured_sizes == [12]
    browser_clicks(strip.start)
    assert strip.state.result.workload["tokens"] == 11 and strip.state.result.parity["full"].ok
    assert lab_strip(lab, "prefill") is not strip and not decode.start.disabled
    with pytest.raises(ToggleError, match="decode, prefill"):
        lab_strip(lab, "verify")


def test_n05_a_prefill_capture_that_fails_flips_back_though_buckets_are_captured_on_use(lab, monkeypatch):
    lab.captures.prefill = "eager"
    strip = lab_strip(lab, "prefill")
    monkeypatch.setitem(lab.phases._made, "prefill", {})
    monkeypatch.setattr("cglab.models.spans.PrefillAttention.__call__", lambda *_: torch.ones(()).item())
    strip.state.requested = "breakable"
    assert lab.captures.prefill == strip.state.actual == strip.mode.value == "eager"
    assert "CaptureError: breakable cannot be captured" in strip.state.error
    strip.close()


def test_n05_a_real_capture_that_fails_leaves_the_lab_s_toggle(lab, monkeypatch):
    lab.captures.decode = "eager"
    strip = lab_strip(lab)
    monkeypatch.setitem(lab.phases._made, "decode", {})
    monkeypatch.setattr(
        "cglab.models.decoder.Decoder.logits", lambda self, hidden: hidden * hidden.max().item()
    )
    strip.state.requested = "full"
    assert lab.captures.decode == strip.state.actual == strip.mode.value == "eager"
    assert "CaptureError: full cannot be captured" in strip.state.error
    assert "hidden.max().item()" in strip.state.error
    strip.close()


def test_n02_running_the_cell_again_leaves_one_strip_and_one_model():
    cell = (
        "lab = cglab.open('pico-gqa', device='cpu', max_batch=1, max_context=32)\n"
        "strip = lab_strip(lab)\nstrip = lab_strip(lab)"
    )
    names, before = {"cglab": cglab, "lab_strip": lab_strip}, len(_instances)
    counts = []
    for _ in range(3):
        exec(cell, names)
        gc.collect()
        labs = sum(type(item).__name__ == "Lab" for item in gc.get_objects())
        counts.append((labs, len(_instances) - before))
    names["lab"].close()
    names["strip"].close()
    assert len(set(counts)) == 1, counts
    assert len(_instances) == before


def test_a_lab_that_was_closed_or_is_gone_is_said():
    lab = cglab.open("pico-gqa", device="cpu", max_batch=1, max_context=32)
    strip = Strip(worker := LabWorker(lab))
    lab.close()
    browser_clicks(strip.start)
    assert "ClosedError: the lab on pico-gqa was closed" in strip.state.error
    del lab
    gc.collect()
    with pytest.raises(ClosedError, match="gone"):
        worker.choose("full", 1)
    strip.close()
