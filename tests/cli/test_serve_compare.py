"""``cglab serve-compare``: thin over the comparison, which has its own tests."""

import json

import pytest

from cglab.commands import serving
from cglab.measure.statistics import false_positive_rate
from tests.serving.test_compare import POINT, synthetic
from tests.serving.test_recorded_servers import turn


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """Stands in for the servers: three instances, the second arm twice as fast; what it was asked is kept."""
    asked = {}

    def compare(arms, workloads, *, keep, **settings):
        asked.update(settings, arms=arms, workloads=workloads)
        return synthetic(tmp_path, [(0.2, 0.1)] * 3)

    monkeypatch.setattr(serving, "compare_servers", compare)
    return asked


def test_a_recipe_runs_at_the_scale_of_the_device_and_says_what_it_cannot(ask, compared, tmp_path):
    status, out, err = ask("serve-compare", "s3", "--instances", "4", "--out", tmp_path)
    assert status == 0, err
    assert status == 0 and compared["instances"] == 4 and compared["devices"] == 1
    assert [arm.name for arm in compared["arms"]] == ["first", "second"]
    assert len(compared["workloads"]) == 2 and compared["facts"]["weights"] == "trained"
    assert "faster" in out and "-50" in out and "Neither version has these captures" in out
    assert f"errs in {false_positive_rate(3):.1%} of equal pairs" in " ".join(out.split())
    assert "s3-graph-memory" in out and "logs are in" in err


def test_json_is_one_value_with_the_published_tables_named(ask_json, compared, tmp_path):
    status, value = ask_json("serve-compare", "s3-dsa-prefill", "--variant", "gpu", "--out", tmp_path)
    assert status == 0 and value["variant"] == "gpu" and value["order"] == "ABABAB"
    assert {row["point"] for row in value["rows"]} == {POINT.name}
    assert value["false_positive_rate"] == false_positive_rate(3) and "s3-ttft" in value["tables"]
    assert [arm.toggles["prefill"] for arm in compared["arms"]] == ["eager", "breakable", "full"]
    assert compared["facts"]["weights"] == "random"
    json.dumps(value)


def test_instances_of_several_commands_are_one_run(ask_json, ask, monkeypatch, compared, tmp_path):
    def compare(arms, workloads, *, keep, run, **_):
        for arm, ms in ("off", 10.0), ("on", 5.0):
            keep(turn(run, arm, 0, ms))
        return synthetic(tmp_path, [(0.2, 0.1)])

    monkeypatch.setattr(serving, "compare_servers", compare)
    words = ("serve-compare", "s1", "--instances", "1", "--run", "mine", "--out", tmp_path / "out")
    verdicts = [ask_json(*words)[1]["run"][1]["verdict"] for _ in range(3)]
    assert verdicts == ["undecided", "undecided", "faster"]
    assert "All instances of run mine" in ask(*words)[1]


def test_another_model_may_be_named(ask, compared, tmp_path):
    ask("serve-compare", "s1", "--model", "mine/model", "--out", tmp_path)
    assert {arm.model for arm in compared["arms"]} == {"mine/model"}


def test_bad_input_is_one_message(ask, monkeypatch, tmp_path):
    status, _, err = ask("serve-compare", "s9", "--out", tmp_path)
    assert status == 2 and "good names: s0-seed-step" in err
    status, _, err = ask("serve-compare", "s1", "--variant", "published", "--out", tmp_path)
    assert status == 2 and "good names: gpu, cpu" in err
    monkeypatch.setenv("CGLAB_SGLANG_PYTHON", str(tmp_path / "none"))
    status, _, err = ask("serve-compare", "s1", "--out", tmp_path)
    assert status == 2 and "make test-sglang" in err and err.count("Traceback") == 0


def test_a_run_takes_no_records_of_another_comparison(ask, monkeypatch, compared, tmp_path):
    def compare(arms, workloads, *, keep, run, facts, **_):
        keep(turn(run, "first", 0, 10.0, notes=facts["notes"]))
        return synthetic(tmp_path, [(0.2, 0.1)])

    monkeypatch.setattr(serving, "compare_servers", compare)
    words = ("--run", "mine", "--out", tmp_path / "out")
    assert ask("serve-compare", "s1", *words)[0] == 0
    before = (tmp_path / "out" / "servers.jsonl").read_text()
    status, _, err = ask("serve-compare", "s2", *words)
    assert status == 2 and "run mine is of two comparisons: recipe was" in err
    assert (tmp_path / "out" / "servers.jsonl").read_text() == before


def test_a_published_table_that_is_not_there_is_told_before_anything_starts(
    ask, monkeypatch, compared, tmp_path
):
    monkeypatch.setattr(serving, "load_published", dict)
    status, _, err = ask("serve-compare", "s3", "--variant", "published", "--out", tmp_path)
    assert status == 2 and "there is no published table" in err and not compared


def test_ids_are_drawn_below_the_vocabulary_of_the_model_that_is_named(ask, compared, tmp_path):
    """An id that it does not have ends a server."""
    for size, config in ((300, {"vocab_size": 300}), (70, {"text_config": {"vocab_size": 70}})):
        folder = tmp_path / f"small-{size}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        ask("serve-compare", "s1", "--model", folder, "--out", tmp_path)
        assert {each.vocabulary for each in compared["workloads"]} == {size}
        assert compared["facts"]["model"] == folder.name  # and no path of this machine
    ask("serve-compare", "s1", "--variant", "gpu", "--model", "llama-3.1-8b", "--out", tmp_path)
    assert {each.vocabulary for each in compared["workloads"]} == {128256}
    (folder / "config.json").write_text("{}")
    status, _, err = ask("serve-compare", "s1", "--model", folder, "--out", tmp_path)
    assert status == 2 and "names no vocab_size" in err
