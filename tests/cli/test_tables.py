"""techniques, results and published: the formats that other programs read."""

import json
import re
from importlib.util import find_spec

import pytest

from cglab.lab.techniques import TECHNIQUES
from cglab.measure.claims import load_claims
from cglab.measure.record import make_record, new_run
from cglab.measure.records import append

KEYS = {"id", "name", "toggle", "values", "default", "module", "notebook", "available", "reason", "sglang"}


@pytest.fixture
def data(root, tmp_path, monkeypatch):
    """A data folder with the shipped tables and no results of its own."""
    folder = tmp_path / "data"
    folder.mkdir()
    for shipped in ("published", "claims.toml"):
        (folder / shipped).symlink_to(root / "data" / shipped)
    monkeypatch.setenv("CGLAB_DATA", str(folder))
    return folder


def record(**fields):
    facts = {"bench": "decode", "arm": "full", "device": "cpu", "run": new_run(), "metrics": {"step_ms": 2.0}}
    return make_record(**{**facts, "workload": {"batch": 1}, "model": "pico-gqa", **fields})


def test_all_techniques_are_listed_each_with_where_it_is_built_and_shown(ask_json, root):
    status, rows = ask_json("techniques")
    assert status == 0
    assert [row["id"] for row in rows] == [f"T{number}" for number in range(1, len(TECHNIQUES) + 1)]
    for row in rows:
        assert row.keys() >= KEYS
        assert row["name"] == row["toggle"] and row["default"] in row["values"]
        assert find_spec(row["module"]) and (root / row["notebook"]).exists()
        assert (row["available"], row["reason"]) == (True, None)


def test_techniques_say_what_drives_each_in_sglang_or_why_nothing_does(ask_json):
    _, rows = ask_json("techniques")
    driven = {row["id"]: row["sglang"] for row in rows}
    assert driven["T6"]["0.5.16"]["flag"] == "--cuda-graph-backend-prefill"
    for row in rows:
        assert set(row["sglang"]) == {"0.5.16", "0.5.23"}
        for found in row["sglang"].values():
            if "none" in found:
                assert found["none"]
            else:
                assert list(found["values"]) == row["values"] and ("flag" in found) != (
                    "environment" in found
                )


def test_techniques_for_people_name_every_toggle(ask):
    status, out, _ = ask("techniques")
    assert status == 0
    assert all(name in out for name in TECHNIQUES)


def test_results_of_a_fresh_clone_are_none_and_say_how_to_get_some(ask, data):
    assert ask("results")[0:2] == (0, "nothing yet\n")
    status, out, error = ask("results", "--json")
    assert (status, json.loads(out)) == (0, [])
    assert "cglab bench" in error


def test_results_are_the_records(ask, ask_json, data):
    kept = record(parity={"verdict": "bitwise"})
    append(data / "results" / "decode.jsonl", [kept])
    assert ask_json("results") == (0, [kept.as_dict()])
    status, out, _ = ask("results")
    assert status == 0
    assert all(word in out for word in ("decode", "pico-gqa", "full", "batch 1", "2 ms a step", "bitwise"))


@pytest.mark.parametrize(
    ("name", "told"), [("ttft_ms", "2 ms to the first token"), ("time_ms", "2 ms for the trace")]
)
def test_a_result_is_told_by_its_own_time(ask, data, name, told):
    append(data / "results" / "x.jsonl", [record(metrics={name: 2.0})])
    assert told in ask("results")[1]


@pytest.mark.parametrize(("held", "told"), [(True, "holds"), (False, "does not hold")])
def test_a_record_without_a_step_time_says_whether_it_held(ask, data, held, told):
    append(data / "results" / "parity.jsonl", [record(bench="parity", metrics={"ok": held})])
    assert f"  {told} " in ask("results")[1]


def test_a_line_that_is_no_record_is_told_and_loses_no_other(ask, data):
    kept = record()
    append(data / "results" / "decode.jsonl", [kept])
    with (data / "results" / "decode.jsonl").open("a") as file:
        file.write('{"schema": 1, "half a')
    status, out, error = ask("results", "--json")
    assert (status, len(json.loads(out))) == (0, 1)
    assert "not a record" in error and "line 2" in error


def test_claims_are_unmeasured_before_anything_is_recorded(ask_json, data):
    status, claims = ask_json("results", "--claims")
    assert status == 0
    assert [claim["id"] for claim in claims] == [*(f"G{number}" for number in range(1, 10)), "E1"]
    for claim in claims:
        assert claim.keys() >= {"id", "text", "target", "value", "status", "runs"}
        assert (claim["status"], claim["value"], claim["runs"]) == ("unmeasured", None, [])


@pytest.mark.parametrize(("step_ms", "state", "exit_status"), [(1.2, "met", 0), (9.0, "unmet", 1)])
def test_an_unmet_claim_is_status_1(ask, ask_json, data, monkeypatch, step_ms, state, exit_status):
    # The first part of the first claim, alone: a step over its floor.
    claim = load_claims()[0]
    alone = type(claim)(claim.id, claim.text, claim.parts[:1])
    monkeypatch.setattr("cglab.commands.tables.load_claims", lambda: (alone,))
    made = record(model="qwen3-8b", metrics={"step_ms": step_ms, "floor_ms": 1.0}).as_dict()
    made["workload"] = {"batch": 1, "ops": "compiled"}
    made["device"]["kind"] = "cuda"
    (data / "results").mkdir()
    (data / "results" / "gpu.jsonl").write_text(json.dumps(made) + "\n")
    status, (found,) = ask_json("results", "--claims")
    assert (status, found["status"], found["value"], found["runs"]) == (
        exit_status,
        state,
        step_ms,
        [made["id"]],
    )
    status, out, _ = ask("results", "--claims")
    assert status == exit_status
    assert re.search(rf"^G1 +{state} .* {step_ms:.4g} +<= 1.3$", out, re.MULTILINE)
    assert out.startswith(f"{int(state == 'met')} met, ") and "; 0 of them by older code" in out
    status, out, _ = ask("results", "--claims", "G1")
    assert status == exit_status
    assert f"G1 {state}, by this code" in out and f"{step_ms:.4g}, wanted <= 1.3" in out


def test_claims_are_a_line_each_and_those_asked_for_are_told_with_their_parts(ask, data):
    claims = {claim.id: claim for claim in load_claims()}
    lines = ask("results", "--claims")[1].splitlines()
    assert [sum(line.startswith(f"{name} ") for line in lines) for name in claims] == [1] * len(claims)
    assert max(map(len, lines)) <= 150
    told = ask("results", "--claims", "G2")[1]
    assert told.startswith("G2 unmeasured\n") and "G1 " not in told
    assert all(f"{part.name}: not recorded" in told for part in claims["G2"].parts)
    everything = ask("results", "--claims", "all")[1]
    assert all(part.name in everything for claim in claims.values() for part in claim.parts)


def test_an_unknown_claim_is_told_with_those_that_there_are(ask, data):
    status, out, error = ask("results", "--claims", "G77")
    assert (status, out) == (2, "")
    assert "'G77' is no claim" in error and "good names: G1, " in error


def test_published_tables_are_whole(ask, ask_json):
    status, tables = ask_json("published")
    assert status == 0
    assert {table["source"] for table in tables} == {"S0", "S2", "S3", "S1", "S4"}
    status, out, _ = ask("published")
    assert status == 0
    assert all(table["id"] in out for table in tables)
    widest = next(table for table in tables if table["id"] == "s2-stage-profile")
    for row in widest["rows"]:
        assert str(row[widest["columns"][0]["name"]]) in out


def test_published_needs_its_folder(ask, data):
    (data / "published").unlink()
    status, out, error = ask("published")
    assert (status, out) == (1, "")
    assert "no published tables" in error
