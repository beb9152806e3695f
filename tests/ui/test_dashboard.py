"""The workspace's widgets, cheapest first: the view, what a browser sends and is sent, a real lab."""

import gc
import json
import logging
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from ipywidgets.widgets.widget import Widget, _instances

import cglab
from cglab.engine.generation import StepRecord
from cglab.errors import CaptureError, ClosedError, ToggleError
from cglab.lab.techniques import TECHNIQUES
from cglab.ui.controls import PLOTLY
from cglab.ui.dashboard import Dashboard, lab_dashboard
from cglab.ui.lab_bench import LabBench
from cglab.ui.sections import HEADINGS, Results, compared_step, loaded, profiled
from cglab.ui.workspace import Workload, Workspace

MESSAGES_OF_A_TOGGLE = 8
"""The radio buttons, their echo, two notes of what runs, the status line coming and going."""


class FakeBench:
    title, default, largest = "a stand-in", Workload(2, 32, 4), Workload(8, 128, 64)

    def __init__(self, make):
        self.make, self.calls, self.errors = make, [], {}

    def _called(self, *call):
        self.calls.append(call)
        if call[0] in self.errors:
            raise self.errors[call[0]]

    def modes(self):
        return {name: "eager" if "eager" in each.values else "off" for name, each in TECHNIQUES.items()}

    def unavailable(self):
        return {"draft_extend": "needs a <NextN> layer"}

    def choose(self, name, mode, workload):
        self._called("choose", name, mode)

    def run(self, name, modes, workload, watch):
        self._called("run", name, modes[name], workload)
        profile = self.make.profiled(eager=self.make.eager_trace(), full=self.make.full_trace())
        sections = compared_step(self.make.compared(recorder="tape")) | {"timeline": profiled(profile)}
        steps = (StepRecord("decode", 2, 2, 0.01),) * 2
        runs = {arm: [replace(self.make.loaded(arm), steps=steps)] * 3 for arm in ("eager", "full")}
        sections |= loaded(runs)
        return Results("One decode step", {"full": "bitwise", "breakable": "corrupted"}, sections, profile)


@pytest.fixture
def bench(make):
    return FakeBench(make)


@pytest.fixture
def board(bench, caplog):
    """A dashboard; nothing may be swallowed by a callback, which ipywidgets would only log (N05)."""
    with caplog.at_level(logging.WARNING, logger="traitlets"):
        made = Dashboard(Workspace({"fake": lambda: bench}, toggles=tuple(TECHNIQUES)))
        assert made.wait(10)
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


@contextmanager
def sent_messages(monkeypatch):
    """What any widget sends meanwhile, as states by the kind of widget."""
    sent, plain = [], Widget._send

    def send(widget, msg, buffers=None):
        sent.append((type(widget).__name__, msg.get("state", msg)))
        plain(widget, msg, buffers)

    with monkeypatch.context() as patched:
        patched.setattr(Widget, "_send", send)
        yield sent


def test_a_browser_chooses_sizes_and_runs(board, bench):
    browser_sets(board.toggles.modes["decode"], index=1)
    browser_sets(board.sizes["batch"], value=3)
    browser_sets(board.sizes["prompt"], value=100_000)
    board.wait(10)
    browser_clicks(board.start)
    assert board.wait(10)
    assert bench.calls == [
        ("choose", "decode", "breakable"),
        ("run", "decode", "breakable", Workload(3, 128, 4)),
    ]
    assert "runs <b>breakable</b>" in board.toggles.notes["decode"].value


def test_every_section_has_a_heading_and_every_figure_a_table(board):
    board.run()
    board.wait(10)
    panel = board.results
    assert "<h4" in panel.texts["step"].value
    for name in (each for each in HEADINGS if each != "checks"):  # of predictions only
        assert HEADINGS[name] in panel.texts[name].value
        assert "<table" in panel.tables[name].value and "<details>" in panel.tables[name].value
        (output,) = panel.plots[name].outputs
        assert output["data"][PLOTLY]["data"] and "axes:" in output["data"]["text/plain"]
    assert "eager 40 tokens a second, full 40 tokens a second" in panel.texts["users"].value
    assert "parity bitwise" in panel.headline.value and "parity corrupted" in panel.headline.value
    assert "tok_s" in panel.tables["users"].value and "ttft_low_ms" in panel.tables["users"].value


def test_a_window_of_the_timeline_is_drawn_from_the_trace(board, bench):
    board.run()
    board.wait(10)
    calls, before = len(bench.calls), board.results.plots["timeline"].outputs
    browser_sets(board.results.window, value=[0.0, 0.25])
    (output,) = board.results.plots["timeline"].outputs
    low, high = output["data"][PLOTLY]["layout"]["xaxis"]["range"]
    assert (low, high) == (0.0, pytest.approx(0.25 * board.workspace.results.profile.length_us))
    assert (output,) != before and len(bench.calls) == calls


def test_every_control_has_a_name_and_a_toggle_says_what_it_needs(board):
    named = [*board.toggles.modes.values(), *board.sizes.values(), board.source, board.technique, board.start,
             board.halt, board.progress, board.results.window]  # fmt: skip
    assert all(widget.description for widget in named)
    assert [widget.description for widget in board.toggles.modes.values()][:2] == ["T1 decode", "T2 verify"]
    assert "needs any model" in board.toggles.notes["decode"].value
    assert "needs a &lt;NextN&gt; layer" in board.toggles.notes["draft_extend"].value
    assert board.toggles.modes["draft_extend"].disabled and not board.toggles.modes["decode"].disabled
    assert 'role="status"' in board.status.value


def test_a_source_with_other_modes_is_shown_and_asks_for_nothing(bench):
    other = FakeBench(bench.make)
    other.modes = lambda: {name: each.default for name, each in TECHNIQUES.items()}
    other.default, other.largest = Workload(1, 7, 2), Workload(1, 9, 3)
    made = Dashboard(Workspace({"fake": lambda: bench, "other": lambda: other}, toggles=tuple(TECHNIQUES)))
    made.wait(10)
    browser_sets(made.source, index=1)
    made.wait(10)
    assert made.workspace.errors == {} and other.calls == bench.calls == []
    assert made.toggles.modes["draft_extend"].value == "graph" and made.workspace.source == "other"
    assert made.workspace.workload == other.default  # smaller than what stood in the boxes
    assert [(box.value, box.max) for box in made.sizes.values()] == [(1, 1), (7, 9), (2, 3)]
    made.close()


def test_n05_a_mode_that_cannot_be_captured_flips_back_and_says_why(board, bench, monkeypatch):
    bench.errors["choose"] = CaptureError("attention <reads> the host")
    radio = board.toggles.modes["decode"]
    before = radio.index
    with sent_messages(monkeypatch) as sent:
        browser_sets(radio, index=0)
        board.wait(10)
    assert radio.value == "eager" and {"index": before} in [
        {key: value for key, value in state.items() if key == "index"} for _, state in sent
    ]
    assert 'role="alert"' in board.toggles.notes["decode"].value
    assert "CaptureError: attention &lt;reads&gt; the host" in board.toggles.notes["decode"].value
    bench.errors.clear()
    browser_sets(radio, index=0)
    board.wait(10)
    assert radio.value == "full" and "alert" not in board.toggles.notes["decode"].value


def test_n05_an_error_of_a_run_is_shown_with_the_old_results_and_cleared_by_the_next(board, bench):
    board.run()
    board.wait(10)
    before = board.results.tables["step"].value
    bench.errors["run"] = ValueError("batch 3 does not fit")
    browser_clicks(board.start)
    board.wait(10)
    assert "ValueError: batch 3 does not fit" in board.error.value
    assert board.results.tables["step"].value == before and not board.start.disabled
    bench.errors.clear()
    browser_clicks(board.start)
    board.wait(10)
    assert board.error.value == ""


def test_n05_a_result_that_cannot_be_drawn_is_shown_too(board, bench):
    bench.run = lambda *_: Results("broken", None, {})
    browser_clicks(board.start)
    board.wait(10)
    assert "AttributeError" in board.error.value and not board.workspace.running


def test_stop_is_on_and_the_rest_off_while_a_run_is_under_way(board, bench):
    seen = []
    plain = bench.run

    def look(*call):
        seen.append((board.start.disabled, board.halt.disabled, board.toggles.modes["decode"].disabled))
        return plain(*call)

    bench.run = look
    browser_clicks(board.start)
    board.wait(10)
    assert seen == [(True, False, True)]
    assert (board.start.disabled, board.halt.disabled, board.toggles.modes["decode"].disabled) == (
        False,
        True,
        False,
    )


@pytest.mark.parametrize("name", ["decode", "prefill", "seed_step", "pp_prefill"])
def test_a_toggle_sends_few_messages(board, monkeypatch, name):
    with sent_messages(monkeypatch) as sent:
        browser_sets(board.toggles.modes[name], index=1)
        board.wait(10)
    assert 1 <= len(sent) <= MESSAGES_OF_A_TOGGLE, sent
    assert len(json.dumps([state for _, state in sent])) < 4096


def test_n08_the_same_results_are_the_same_messages(board, monkeypatch):
    board.run()
    board.wait(10)
    results = board.workspace.results
    pages = []
    for _ in range(2):
        board.results.show(None)
        board.results.show(results)
        pages.append([widget.outputs for widget in board.results.plots.values()] + [
            widget.value for widget in (*board.results.tables.values(), board.results.export)
        ])  # fmt: skip
    assert pages[0] == pages[1] and len(json.dumps(pages[0])) < 400_000


def test_fifty_toggles_and_runs_leave_as_many_widgets_as_before(board):
    board.run()
    board.wait(10)
    before = len(_instances)
    for turn in range(50):
        browser_sets(board.toggles.modes["decode"], index=turn % 3)
    board.run()
    board.wait(10)
    assert len(_instances) == before


def test_close_leaves_no_widget_behind(bench):
    before = set(_instances)
    made = Dashboard(Workspace({"fake": lambda: bench}, toggles=("decode",)))
    made.run()
    made.wait(10)
    assert len(set(_instances) - before) > 10
    made.close()
    made.close()
    assert set(_instances) == before


@pytest.fixture(scope="module")
def lab():
    with cglab.open("pico-gqa", device="cpu", max_batch=2, max_context=32, buckets=[2]) as opened:
        yield opened


def test_a_real_lab_is_toggled_and_measured(lab):
    board = lab.dashboard()
    board.choose("decode", "breakable")
    board.wait(60)
    assert (board.workspace.errors, lab.captures.decode) == ({}, "breakable")
    board.run()
    board.wait(60)
    results = board.workspace.results
    assert board.workspace.errors == {} and dict(results.parity) == {"breakable": "bitwise"}
    assert set(results.sections) == set(HEADINGS) - {"checks"} and lab.captures.decode == "breakable"
    assert results.sections["users"].table["tokens"].tolist() == ["reference", "equal"]
    # Three turns of eight steps, five where a difference had to be confirmed.
    assert results.sections["coverage"].text in ("eager: 24 x backend eager", "eager: 40 x backend eager")
    assert lab_dashboard(lab) is not board
    lab_dashboard(lab).close()


def test_prefill_steps_are_measured_at_the_prompt_s_size(lab):
    board = lab.dashboard("prefill")
    assert list(board.toggles.modes) == ["prefill"]
    board.wait(10)
    browser_sets(board.sizes["prompt"], value=11)
    browser_sets(board.toggles.modes["prefill"], index=0)
    board.wait(60)
    assert (board.workspace.errors, lab.captures.prefill) == ({}, "full")
    assert lab.runner("full", "prefill").captured.captured_sizes == [12]
    board.run()
    board.wait(60)
    results = board.workspace.results
    assert results.comparison.workload["tokens"] == 11 and results.parity["full"] == "bitwise"
    with pytest.raises(ToggleError, match="decode"):
        lab.dashboard("decoding")
    board.close()


@pytest.mark.parametrize("part", ["timing", "tracing", "load on"])
def test_a_real_run_that_is_stopped_leaves_toggles_and_requests_as_they_were(lab, part):
    lab.captures.decode = "full"
    board = lab.dashboard("decode")
    board.wait(10)
    board.workspace.observe(lambda change: change.new.startswith(part) and board.workspace.stop(), "doing")
    board.run()
    assert board.wait(60)
    assert board.workspace.errors == {"run": "stopped"} and board.workspace.results is None
    assert lab.engine.idle and lab.captures.decode == "full"
    assert lab.generate([[1, 2, 3]], max_new_tokens=2, stop_at_end=False).coverage.captured > 0
    board.close()


@pytest.mark.parametrize(
    ("name", "mode", "broken", "replacement", "told"),
    [
        ("decode", "full", "cglab.models.decoder.Decoder.logits", lambda self, hidden: hidden * hidden.max().item(),
         "hidden.max().item()"),
        ("prefill", "breakable", "cglab.models.spans.PrefillAttention.__call__", lambda *_: torch.ones(()).item(), "item"),
    ],
)  # fmt: skip
def test_n05_a_real_capture_that_fails_leaves_the_lab_s_toggle(
    lab, monkeypatch, name, mode, broken, replacement, told
):
    setattr(lab.captures, name, "eager")
    board = lab.dashboard(name)
    board.wait(10)
    monkeypatch.setitem(lab.phases._made, name, {})
    monkeypatch.setattr(broken, replacement)
    browser_sets(board.toggles.modes[name], index=TECHNIQUES[name].values.index(mode))
    board.wait(60)
    assert getattr(lab.captures, name) == board.toggles.modes[name].value == "eager"
    assert f"CaptureError: {mode} cannot be captured" in board.workspace.errors[name]
    assert told in board.workspace.errors[name]
    board.close()


def test_n02_running_the_cell_again_leaves_one_board_and_one_model():
    cell = (
        "lab = cglab.open('pico-gqa', device='cpu', max_batch=1, max_context=32)\n"
        "board = lab.dashboard()\nboard = lab.dashboard()\nboard.wait(10)"
    )
    names, before = {"cglab": cglab}, len(_instances)
    counts = []
    for _ in range(3):
        exec(cell, names)
        gc.collect()
        labs = sum(type(item).__name__ == "Lab" for item in gc.get_objects())
        counts.append((labs, len(_instances) - before))
    names["lab"].close()
    names["board"].close()
    assert len(set(counts)) == 1, counts
    assert len(_instances) == before


def test_a_lab_that_closes_stops_the_run_of_its_board_and_takes_it_off_the_page():
    before = set(_instances)
    lab = cglab.open("pico-gqa", device="cpu", max_batch=1, max_context=32)
    board = lab.dashboard("decode")
    assert lab.dashboard("decode") is not board
    board = lab.dashboard("decode")
    board.wait(10)
    begun = threading.Event()
    board.workspace.observe(lambda change: "timing" in change.new and begun.set(), "doing")
    board.run()
    assert begun.wait(60)
    assert lab.close().allocated == 0
    assert board.wait(10) and board.workspace.results is None and set(_instances) == before


def test_n03_a_lab_that_was_closed_or_is_gone_is_said():
    lab = cglab.open("pico-gqa", device="cpu", max_batch=1, max_context=32)
    bench = LabBench(lab)
    board = Dashboard(Workspace({"lab": lambda: bench}, toggles=("decode",)))
    board.wait(10)
    held = lab.close()
    assert held is not None and held.allocated == 0
    board.run()
    board.wait(10)
    assert "ClosedError: the lab on pico-gqa was closed" in board.error.value
    del lab
    gc.collect()
    with pytest.raises(ClosedError, match="gone"):
        bench.choose("decode", "full", bench.default)
    board.close()


def test_parts_of_sparse_attention_are_toggled_and_measured_on_a_latent_model():
    with cglab.open(
        "dsa-tiny", draft="nextn", device="cpu", max_batch=2, max_context=64, bucket_floor=1
    ) as lab:
        board = lab.dashboard("dsa_attention", "dsa_indexer_prep", "draft_extend", "verify")
        board.wait(60)
        assert board.workspace.unavailable == {}
        board.choose("draft_extend", "eager")
        board.workspace.batch, board.workspace.prompt, board.workspace.new = 2, 24, 2
        board.choose("dsa_attention", "eager")
        board.choose("dsa_attention", "graph")
        board.choose("dsa_indexer_prep", "eager")
        board.run()
        board.wait(120)
        space = board.workspace
        assert space.errors == {} and lab.captures.dsa_indexer_prep == lab.captures.draft_extend == "eager"
        assert dict(space.results.parity) == {"graph": "bitwise"}
        assert space.results.sections["users"].table["tokens"].tolist() == ["reference", "equal"]
