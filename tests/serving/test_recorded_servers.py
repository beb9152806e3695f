"""Recorded comparisons are judged from their samples, and the newest of a kind is shown."""

from dataclasses import replace

import pytest

from cglab.errors import InputError
from cglab.lab.server_tables import Engines, Servers
from cglab.measure.machine import Device
from cglab.measure.record import make_record
from cglab.measure.records import append
from cglab.measure.statistics import false_positive_rate
from cglab.serving.recorded import newest, recorded_servers


def turn(run, arm, instance, ms, name="a point", asked=(), errors=0, **fields):
    samples = {measure: [ms, ms * 1.01] for measure in ("ttft_ms", "tpot_ms", "e2e_ms")}
    return make_record(
        bench="servers", arm=arm, device="cpu", run=run, weights="trained",
        workload={"name": name, "instance": instance, **dict(asked)}, metrics={"errors": errors}, samples=samples,
        software={"sglang": "0.5.23"}, **{"model": "pico-gqa", **fields},
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


def test_fewer_instances_than_a_verdict_takes_have_no_rate_of_error():
    pair = newest(run_of("1", 10, 5)[:4]).rows()[1]
    assert (pair["instances"], pair["verdict"], pair["error_rate_percent"]) == (2, "undecided", None)


def test_other_devices_models_and_arms_stand_beside_it_and_other_benches_do_not():
    mine = run_of("1", 10, 10)
    gpu = [replace(each, run="2", device=Device("NVIDIA H200", "cuda")) for each in mine]
    older = [replace(each, run="4", versions={"sglang": "0.5.16"}) for each in mine]
    points = run_of("5", 10, 10, name="another point")  # of another recipe, whose arms have the same names
    assert len(newest([*mine, *older, *points]).runs) == 3
    found = newest([*mine, *gpu, replace(mine[0], bench="decode", run="3")])
    assert [run[0].device.kind for run in found.runs] == ["cpu", "cuda"]
    cpu, cuda = str(found).splitlines()
    assert "has no graphs" in cpu and "has no graphs" not in cuda and "SGLang 0.5.23" in cuda


def test_a_folder_without_any_says_how_to_record_one(tmp_path):
    assert not recorded_servers(tmp_path / "none")
    assert "cglab serve-compare RECIPE --save" in str(recorded_servers(tmp_path))
    append(tmp_path / "servers.jsonl", run_of("1", 10, 10))
    assert recorded_servers(tmp_path) and recorded_servers(tmp_path).rows()[1]["verdict"] == "no difference"


def test_the_base_is_the_base_whoever_had_the_first_turn():
    turns = [
        turn("1", arm, instance, {"off": 10.0, "on": 5.0}[arm], asked={"base": "off"})
        for arm, instance in (("on", 0), ("off", 0), ("off", 1), ("on", 1), ("on", 2), ("off", 2))
    ]
    rows = newest(turns).rows()
    assert [(row["arm"], row["verdict"]) for row in rows[:2]] == [("off", None), ("on", "faster")]


def test_an_arm_of_which_requests_failed_has_no_verdict():
    failing = [
        turn("1", arm, instance, ms, errors=arm == "on")
        for instance in range(3)
        for arm, ms in (("off", 10.0), ("on", 5.0))
    ]
    assert newest(failing).rows()[1]["verdict"] == "undecided"


@pytest.mark.parametrize(
    "other",
    [
        {"model": "other"},
        {"notes": "recipe s2"},
        {"asked": {"payload": "b"}},
        {"asked": {"toggles": {"decode": "full"}}},
    ],
)
def test_two_comparisons_under_one_name_are_not_pooled(other):
    asked = {"payload": "a", "toggles": {}, **other.pop("asked", {})}
    first = turn("1", "off", 0, 10.0, notes="recipe s1", asked={"payload": "a", "toggles": {}})
    found = turn("1", "off", 0, 10.0, **{"notes": "recipe s1", "asked": asked, **other})
    with pytest.raises(InputError, match="run 1 is of two comparisons"):
        newest([first, found]).rows()


def on_gpu(records, **fields):
    return [replace(each, device=Device("NVIDIA H200", "cuda"), **fields) for each in records]


def test_the_table_has_a_row_a_point_and_what_failed_in_its_own_words(tmp_path):
    base = {"base": "off"}
    records = on_gpu(
        run_of("1", 10, 5, asked=base), notes="recipe s1-decode-runner, gpu. A note.", model="qwen3-8b"
    )
    told = {"outputs": 13, "equal_outputs": 12, "verdict": "tokens_differ"}
    records = [replace(each, parity=told) if each.arm == "on" else each for each in records]
    records[1] = replace(
        records[1], metrics={"graph_memory_gb": 1.37, "graph_share_decode": 1.0, "errors": 0}
    )
    broken = replace(records[0], bench="server_failures", arm="full", notes="it ended: no | such mode")
    other = on_gpu(
        run_of("2", 10, 5, asked=base, name="more"), notes="recipe s0-seed-step, gpu.", model="qwen3-8b"
    )
    append(tmp_path / "servers.jsonl", [*records, broken, *other, *run_of("3", 1, 1, asked=base)])
    text = Servers().text(tmp_path)
    assert (
        "3 of each arm or more" in text and "errs in 8.8% of equal pairs" in text and "pico-gqa" not in text
    )
    first, second = (line for line in text.splitlines() if line.startswith("| s"))
    times = "10.05 -> 5.03 faster"
    assert first == (
        f"| s1-decode-runner | off, on | a point | {times} | {times} | {times} | 1.37 | - | - | 100 % | 12 of 13 equal |"
    )
    assert second.startswith("| s0-seed-step | off, on | more | 10.05 -> 5.03 faster |") and second.endswith(
        "| - |"
    )
    assert text.endswith("* `full`, qwen3-8b, SGLang 0.5.23: it ended: no | such mode")


def test_a_table_without_records_of_a_gpu_says_how_to_make_them(tmp_path):
    append(tmp_path / "servers.jsonl", run_of("1", 10, 5))
    for block, command in (
        (Servers(), "cglab serve-compare s1 --save"),
        (Engines(), "cglab bench engines --save"),
    ):
        assert f"*Not recorded yet.* `{command}` on a GPU records" in block.text(tmp_path)


def test_engines_stand_beside_each_other_with_the_verdict_on_sglang(tmp_path):
    metrics = {"ttft_ms_p50": 13.5, "tpot_ms_p50": 4.6, "e2e_ms_p50": 600.0, "output_tok_s": 212.0}
    verdicts = {"ttft_verdict": "slower", "tpot_verdict": "no difference", "e2e_verdict": "faster"}
    made = [
        make_record(
            bench="engines", arm=arm, device="cpu", run="1", model="qwen3-8b", workload={"name": "a point"}, metrics=each
        )
        for arm, each in (("lab", metrics), ("sglang", metrics | verdicts))
    ]  # fmt: skip
    append(tmp_path / "engines.jsonl", on_gpu(made))
    text = Engines().text(tmp_path)
    assert text.splitlines()[-2:] == [
        "| qwen3-8b | a point | lab | 13.50 | 4.60 | 600.00 | 212.00 | - | - | - |",
        "| qwen3-8b | a point | sglang | 13.50 | 4.60 | 600.00 | 212.00 | slower | no difference | faster |",
    ]


def test_an_arm_that_ran_since_it_failed_is_no_failure_and_one_that_failed_since_is():
    ran = run_of("2", 10, 10)
    failed = replace(ran[1], run="1", bench="server_failures", notes="it ended")
    assert not newest([failed, *ran]).failures
    assert newest([*ran, failed]).failures == (failed,)
    other = replace(failed, model="pico-dsa")
    assert newest([failed, other, *ran]).failures == (other,)


def test_at_a_point_that_the_base_never_reached_no_other_arm_takes_its_place(tmp_path):
    asked = {"base": "off"}
    reached = run_of("1", 10, 5, asked=asked)
    alone = [turn("1", arm, i, 5.0, name="later", asked=asked) for i in range(3) for arm in ("on", "third")]
    gpu = Device("NVIDIA H200", "cuda")
    turns = [replace(each, device=gpu, notes="recipe s1, x") for each in (*reached, *alone)]
    rows = [row for row in newest(turns).rows() if row["point"] == "later" and row["measure"] == "TTFT"]
    assert [(row["arm"], row["verdict"]) for row in rows] == [
        ("off", None), ("on", "undecided"), ("third", "undecided"),
    ]  # fmt: skip
    assert [row["change_percent"] for row in rows] == [None] * 3 and rows[0]["ms"] is None
    append(tmp_path / "servers.jsonl", turns)
    assert "| off, on | later | - -> 5.03 undecided |" in " ".join(Servers().text(tmp_path).split())
