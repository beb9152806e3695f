"""What the lab's measuring calls return: tables, words, files."""

import json
import re

import pytest
import torch

import cglab
from cglab.errors import ClosedError, InputError, ResultsError
from cglab.lab.benches import BENCHES
from cglab.lab.profiles import recorded_profile, trace_path
from cglab.lab.prompts import LENGTH, TEXTS, encode, sample_prompts
from cglab.lab.recorded import newest, recorded
from cglab.measure.machine import Device
from cglab.measure.record import Record
from cglab.measure.records import append


@pytest.fixture(scope="module")
def lab():
    with cglab.open("pico-gqa", device="cpu", max_batch=4, max_context=48, buckets=[1, 2]) as opened:
        yield opened


def test_a_sweep_has_a_row_for_each_batch_and_arm_and_says_where_it_lost(lab):
    sweep = lab.sweep("decode", ("eager", "full"), (1, 2, 4), repeats=1, context=20)
    frame = sweep.as_frame()
    assert frame[["batch", "arm"]].values.tolist() == [
        [batch, arm] for batch in (1, 2, 4) for arm in ("eager", "full")
    ]
    beyond = frame[(frame["batch"] == 4) & (frame["arm"] == "full")].iloc[0]
    assert beyond["reasons"] == "above_largest" and beyond["captured"].startswith("0/")
    assert frame["bucket"].isna().tolist() == [False] * 4 + [True] * 2


def test_a_sweep_takes_every_bucket_by_default(lab):
    sizes = [c.workload["batch"] for c in lab.sweep(repeats=1, context=20).comparisons]
    assert sizes == lab.buckets


def test_a_profile_that_was_saved_is_read_again(lab, tmp_path):
    made = lab.profile("decode", ("eager", "full"), batch=2, context=20, repeats=2, save=tmp_path)
    again = recorded_profile("decode", tmp_path)
    assert (again.technique, again.model, again.workload) == ("decode", "pico-gqa", made.workload)
    assert again.bars().drop(columns=["arm"]).equals(made.bars().drop(columns=["arm"]))
    assert again.as_frame()["wall_us"].tolist() == pytest.approx(made.as_frame()["wall_us"].tolist())
    assert made.recorded is None and " on 20" in again.recorded and again.recorded in again.title


def test_a_damaged_recorded_profile_is_named(lab, tmp_path):
    lab.profile("decode", ("eager",), batch=1, context=20, repeats=1, save=tmp_path)
    trace_path(tmp_path, "decode", "eager").write_bytes(b"")
    with pytest.raises(ResultsError, match="decode-eager"):
        recorded_profile("decode", tmp_path)
    path = tmp_path / "decode.profile.json"
    path.write_text(json.dumps({"technique": "decode"}))
    with pytest.raises(ResultsError, match="no recorded profile"):
        recorded_profile("decode", tmp_path)


def test_no_recorded_profile_is_an_empty_one(tmp_path):
    assert recorded_profile("decode", tmp_path).traces == {}


def test_a_profile_explains_nothing_without_device_records(lab):
    comparison = lab.compare("decode", ("eager", "full"), batch=2, context=20, repeats=1)
    profile = lab.profile("decode", ("eager", "full"), batch=2, context=20, repeats=1)
    assert profile.explain(comparison).startswith("no prediction: the trace has no device records")


def test_a_closed_lab_says_so_whatever_is_asked():
    lab = cglab.open("pico-gqa", device="cpu", max_batch=1, max_context=32)
    lab.close()
    for call in (lab.compare, lab.profile, lab.sweep, lambda: lab.generate("x", 2)):
        with pytest.raises(ClosedError, match="pico-gqa was closed"):
            call()


def test_sample_prompts_fit_any_model():
    assert sample_prompts(10, vocabulary=9, has_text=True) == [*TEXTS, *TEXTS][:10]
    ids = sample_prompts(3, vocabulary=9, has_text=False)
    assert [len(prompt) for prompt in ids] == [LENGTH] * 3 and max(map(max, ids)) < 9
    assert ids == sample_prompts(3, vocabulary=9, has_text=False)
    assert encode(ids, None, "a model") == ids


def test_prompts_of_a_wrong_kind_are_refused_by_position():
    with pytest.raises(InputError, match="a model has no tokenizer"):
        encode("text", None, "a model")
    with pytest.raises(InputError, match="prompt 1 is a Tensor"):
        encode([[1], torch.ones(2)], None, "a model")


def record(run, arm, day, *, batch=1, kind="cuda", bench="decode", **workload):
    return Record(
        bench=bench, arm=arm, run=run, id=f"{run}-{arm}-{batch}", created=f"2026-12-{day:02}T00:00:00",
        device=Device("NVIDIA H200", kind), model="qwen3-8b", workload={"batch": batch, **workload},
        metrics={"step_ms": 6.0}, tree="older",
    )  # fmt: skip


def test_recorded_keeps_the_newest_run_of_each_workload_whole(tmp_path):
    records = [
        record("a", "eager", 1), record("a", "full", 1), record("a", "full", 1, batch=16),
        record("b", "eager", 2), record("b", "full", 2),
        record("c", "full", 3, kind="cpu"), record("d", "full", 4, bench="parity"),
    ]  # fmt: skip
    append(tmp_path / "decode.jsonl", records)
    found = recorded("decode", tmp_path)
    assert [(r.run, r.arm, r.workload["batch"]) for r in found.records] == [
        ("a", "full", 16), ("b", "eager", 1), ("b", "full", 1),
    ]  # fmt: skip
    assert found.where == "NVIDIA H200 on 2026-12-02"
    assert str(found) == "3 decode results recorded on NVIDIA H200 on 2026-12-02"
    assert found.as_frame()["step_ms"].tolist() == [6.0] * 3
    assert found.as_frame()["recorded"].tolist() == ["2026-12-01", "2026-12-02", "2026-12-02"]


def test_a_newer_run_on_another_form_of_the_operations_replaces_an_older_one():
    records = [
        record("a", "eager", 1), record("a", "full", 1), record("b", "eager", 2, ops="compiled"),
        record("c", "eager", 1, batch=16, ops="compiled"), record("d", "full", 2, batch=16, ops="portable"),
    ]  # fmt: skip
    assert [each.id for each in newest("decode", records).records] == ["b-eager-1", "d-full-16"]


def test_no_folder_and_no_records_are_nothing_recorded(tmp_path):
    for found in (recorded("decode", tmp_path / "none"), recorded("decode", tmp_path), newest("decode", [])):
        assert not found
        assert "no decode result of a GPU is recorded yet; `cglab bench decode`" in str(found)


def test_whatever_is_not_recorded_names_a_command_that_there_is(root):
    sources = [path.read_text(encoding="utf-8") for path in (root / "cglab/lab").glob("*.py")]
    notebooks = [path.read_text(encoding="utf-8") for path in (root / "notebooks").glob("*.ipynb")]
    made = re.compile(r"""\b(?:bench=|BENCH: Final = |PeerTurns\()"(\w[\w-]*)\"""")
    asked = re.compile(r"""\brecorded\(\\?"([\w-]+)\\?"\)""")
    names = {name for source in sources for name in made.findall(source)}
    names |= {name for source in [*sources, *notebooks] for name in asked.findall(source)}
    assert names >= {"decode", "token", "ttft_crossover", "dsa_prefill", "pp_prefill"}
    prose = ["".join(cell["source"]) for each in notebooks for cell in json.loads(each)["cells"]]
    said = "\n".join([*sources, *prose, *(str(newest(name, [])) for name in names)])
    assert set(re.findall(r"`cglab bench (\w[\w-]*)", said)) <= set(BENCHES)
