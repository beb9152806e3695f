"""Recorded mode: the same panels, no device, predictions that are told from recordings."""

from dataclasses import replace

import pytest

from cglab.errors import ResultsError
from cglab.lab.recorded import recorded
from cglab.measure.records import append
from cglab.ui.controls import PLOTLY
from cglab.ui.dashboard import Dashboard
from cglab.ui.recorded_bench import ARMS, FORM, RecordedBench, recorded_sources
from cglab.ui.sections import HEADINGS
from cglab.ui.workspace import Workload, Workspace


def unwatched(what, share):
    pass


@pytest.fixture(scope="module")
def bench():
    return RecordedBench("qwen3-8b")


def test_a_recorded_size_shows_prediction_recording_and_error(bench):
    results = bench.run("decode", {"decode": "full"}, Workload(16, 512, 64), unwatched)
    rows = results.sections["step"].table.set_index("arm")
    assert list(rows.index) == ["eager", "full"]
    assert rows.loc["full", "predicted_ms"] == pytest.approx(rows.loc["full", "recorded_ms"], rel=0.15)
    assert rows.loc["eager", "low_ms"] < rows.loc["eager", "high_ms"]
    assert "predicted" in results.title and results.sections["step"].text.startswith("Prediction")
    assert "in the mean" in results.sections["step"].text and "at worst" in results.sections["step"].text
    assert results.parity == {"full": "bitwise"}
    assert {"full: predicted", "full: recorded"} <= {bar.name for bar in results.sections["step"].figure.data}
    assert results.sections["coverage"].table["arm"].tolist() == ["eager", "full"]
    assert results.sections["buckets"].table["bucket"].tolist() == ["16"]


def test_a_size_that_was_not_recorded_is_predicted_and_says_from_what(bench):
    results = bench.run("decode", {"decode": "full"}, Workload(6, 3000, 64), unwatched)
    row = results.sections["step"].table.set_index("arm").loc["full"]
    assert row["predicted_ms"] > 4 and row["recorded_ms"] is None and "KV bytes" in row["from"]
    rates = results.sections["users"].table.set_index("arm").loc["full"]
    assert rates["tok_s_predicted"] == pytest.approx(6 / row["predicted_ms"] * 1e3)
    assert results.parity == {}


def test_toggling_changes_the_prediction_and_eager_shows_every_arm(bench):
    full, broken = (
        bench.run("decode", {"decode": mode}, Workload(16, 512, 64), unwatched).sections["step"].table.set_index("arm")
        for mode in ("full", "breakable")
    )  # fmt: skip
    assert full.loc["full", "predicted_ms"] < broken.loc["breakable", "predicted_ms"]
    every = bench.run("decode", {"decode": "eager"}, Workload(16, 512, 64), unwatched)
    assert list(every.sections["step"].table["arm"]) == ["eager", "breakable", "full"]


def test_the_own_recording_of_a_combination_is_left_out_of_its_prediction(bench, tmp_path):
    """Spoil the very step that is asked for: the prediction stays, the recording changes."""
    for name in ("decode", "growth", "replay"):
        append(tmp_path / f"{name}.jsonl", recorded(name).records)
    for path in (tmp_path / "decode.jsonl", tmp_path / "growth.jsonl"):
        spoilt = []
        for each in recorded(path.stem).records:
            if (each.model, each.arm, each.workload.get("batch"), each.workload.get("context")) == (
                "qwen3-8b", "full", 16, 512,
            ):  # fmt: skip
                each.metrics["step_ms"] *= 3
            spoilt.append(each)
        path.unlink()
        append(path, spoilt)
    asked = ("decode", {"decode": "full"}, Workload(16, 512, 64), unwatched)
    true, false = (
        each.run(*asked).sections["step"].table.set_index("arm").loc["full"]
        for each in (bench, RecordedBench("qwen3-8b", tmp_path))
    )
    assert false["predicted_ms"] == pytest.approx(true["predicted_ms"])
    assert false["recorded_ms"] == pytest.approx(3 * true["recorded_ms"])


def test_the_panels_are_those_of_a_lab_and_other_toggles_say_why_not():
    sources = recorded_sources()
    assert {"recorded: qwen3-8b", "recorded: qwen3-0.6b"} <= set(sources)
    board = Dashboard(Workspace({"recorded": sources["recorded: qwen3-0.6b"]}, toggles=("decode", "prefill")))
    board.wait(60)
    assert "no parts of it are recorded" in board.toggles.notes["prefill"].value
    assert "nothing is measured here" in board.title_line.value
    board.run()
    board.wait(60)
    assert board.workspace.errors == {}
    assert set(board.workspace.results.sections) == set(HEADINGS)
    (output,) = board.results.plots["checks"].outputs
    assert output["data"][PLOTLY]["layout"]["title"]["text"] == "Predictions against recordings"
    (timeline,) = board.results.plots["timeline"].outputs  # hundreds of recorded kernels, in slices
    assert len(timeline["data"][PLOTLY]["data"]) >= 4
    assert "data:application/gzip" in board.results.export.value
    board.close()


def test_no_records_are_no_source(tmp_path):
    assert recorded_sources(tmp_path) == {}


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("metrics", "step_ms", None),
        ("metrics", "step_ms", 0.0),
        ("metrics", "busy_ms", None),
        ("metrics", "launches", None),
        ("workload", "batch", 0),
        ("workload", "context", "long"),
    ],
)
def test_records_that_lack_what_a_prediction_is_made_of_say_so(tmp_path, part, name, value):
    whole = next(
        each for each in recorded("decode").records if each.arm in ARMS and each.workload.get("ops") == FORM
    )
    broken = replace(whole, **{part: {**getattr(whole, part), name: value}})
    append(tmp_path / "broken.jsonl", [broken])
    (opened,) = recorded_sources(tmp_path).values()
    with pytest.raises(ResultsError, match="step_ms, busy_ms, launches"):
        opened()
