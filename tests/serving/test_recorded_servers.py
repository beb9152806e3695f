"""Recorded comparisons are judged from their samples, and the newest of a kind is shown."""

from dataclasses import replace

import pytest

from cglab.measure.machine import Device
from cglab.measure.record import make_record
from cglab.measure.records import append
from cglab.measure.statistics import false_positive_rate
from cglab.serving.recorded import newest, recorded_servers


def turn(run, arm, instance, ms, name="a point", **fields):
    samples = {measure: [ms, ms * 1.01] for measure in ("ttft_ms", "tpot_ms", "e2e_ms")}
    return make_record(
        bench="servers", arm=arm, device="cpu", run=run, model="pico-gqa", weights="trained",
        workload={"name": name, "instance": instance}, metrics={}, samples=samples, software={"sglang": "0.5.23"},
        **fields,
    )  # fmt: skip


def run_of(run, off, on, **fields):
    return [
        turn(run, arm, instance, ms, **fields)
        for instance in range(3)
        for arm, ms in (("off", off), ("on", on))
    ]


def test_the_newest_run_of_a_kind_is_judged_by_s3s_rule():
    found = newest([*run_of("1", 10, 10), *run_of("2", 10.0, 5.0)])
    assert len(found.runs) == 1
    rows = found.rows()
    assert [row["measure"] for row in rows[::2]] == ["TTFT", "TPOT", "E2E"]
    assert [row["verdict"] for row in rows[:2]] == [None, "faster"]
    assert rows[1]["change_percent"] == pytest.approx(-50) and rows[0]["ms"] == pytest.approx(10.05)
    assert rows[1]["error_rate_percent"] == 100 * false_positive_rate(3) and rows[1]["instances"] == 3
    assert len(found.as_frame()) == 6


def test_other_devices_models_and_arms_stand_beside_it_and_other_benches_do_not():
    mine = run_of("1", 10, 10)
    gpu = [replace(each, run="2", device=Device("NVIDIA H200", "cuda")) for each in mine]
    found = newest([*mine, *gpu, replace(mine[0], bench="decode", run="3")])
    assert [run[0].device.kind for run in found.runs] == ["cpu", "cuda"]
    cpu, cuda = str(found).splitlines()
    assert "has no graphs" in cpu and "has no graphs" not in cuda and "SGLang 0.5.23" in cuda


def test_a_folder_without_any_says_how_to_record_one(tmp_path):
    assert not recorded_servers(tmp_path / "none")
    assert "cglab serve-compare RECIPE --save" in str(recorded_servers(tmp_path))
    append(tmp_path / "servers.jsonl", run_of("1", 10, 10))
    assert recorded_servers(tmp_path) and recorded_servers(tmp_path).rows()[1]["verdict"] == "no difference"
