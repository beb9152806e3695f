"""parity and bench: formats, exit statuses, planted faults, and where records go."""

import itertools
import json

import pytest

from cglab.commands import measuring
from cglab.commands.console import progress_bar
from cglab.lab.benches import BENCHES, Bench
from cglab.lab.checking import CASES
from cglab.lab.parity_matrix import ArmRow, ParityMatrix
from cglab.lab.plants import PLANTS
from cglab.lab.verdicts import TechniqueParity
from cglab.measure.parity import Verdict
from cglab.measure.record import make_record, new_run
from cglab.measure.records import load


def fake_bench(verdict="bitwise"):
    def run(device, *, quick, progress):
        progress("one stage")
        return [
            make_record(
                bench="fake",
                arm="full",
                device=device,
                run=new_run(),
                metrics={"quick": quick},
                parity={"verdict": verdict},
            )
        ]

    return {"fake": Bench("nothing real", run)}


def test_parity_of_decode_holds_and_its_progress_is_on_standard_error(command):
    run = command("parity", "--technique", "decode", "--cases", "4", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["technique"], found["cases"], found["mismatches"]) == ("decode", 4, [])
    assert found["bitwise"] is True and found["tokens_equal"] is True
    assert "parity of decode" in run.stderr and "4/4" in run.stderr


@pytest.mark.parametrize(
    ("cases", "told"),
    [
        pytest.param(4, "parity of decode: 100%", id="over before a line is due"),
        pytest.param(0, "", id="refused at once"),
    ],
)
def test_a_log_is_told_of_every_run_that_came_to_something(capsys, cases, told):
    with progress_bar(4, "parity of decode", "case") as bar:
        for _ in range(cases):
            bar.update()
    said = capsys.readouterr().err
    assert said.startswith(told) and (("4/4" in said) if cases else not said)


def matrix_of(*verdicts):
    """``run_matrix`` that gives the techniques these verdicts in turn, and tells of every case."""

    def run(planned, not_run, *, cases, progress, **_):
        rows = []
        for part, verdict in zip(planned, itertools.cycle(verdicts), strict=False):
            for _case in range(cases):
                progress(part)
            told = "" if verdict is Verdict.BITWISE else "case 1, step 0, row 3: logits"
            rows.append(
                ArmRow(
                    part.technique, "full", "", "tape", True, part.ops, cases, 9, 5, verdict, 0.25, 0.5, told
                )
            )
        return ParityMatrix(tuple(rows), tuple(not_run), tuple(planned))

    return run


def test_all_is_one_table_of_what_this_version_has_and_a_plan_of_what_was_not_run(ask, monkeypatch):
    monkeypatch.setattr(measuring, "run_matrix", matrix_of(Verdict.BITWISE))
    status, out, _ = ask("parity", "--all", "--cases", "3")
    assert status == 0
    table, left = out.split("not run:")
    assert [line.split()[0] for line in table.splitlines()[1:]] == list(CASES)
    assert all(line.split()[-3:] == ["bitwise", "-", "-"] for line in table.splitlines()[1:])
    assert "compiled ops: it needs a CUDA device" in left


@pytest.mark.parametrize(
    ("verdicts", "status"), [((Verdict.DRIFT,), 0), ((Verdict.DRIFT, Verdict.CORRUPTED), 1)]
)
def test_drift_holds_and_one_corrupted_arm_is_status_1(ask, ask_json, monkeypatch, verdicts, status):
    monkeypatch.setattr(measuring, "run_matrix", matrix_of(*verdicts))
    told, out, _ = ask("parity", "--all", "--cases", "1", "--plant", "rounding")
    assert told == status and f"planted rounding: told as {verdicts[-1]}" in out
    assert (
        "decode full, padded (tape, portable): case 1, step 0, row 3: logits" in out and "0.25   0.5" in out
    )
    told, value = ask_json("parity", "--all", "--cases", "1")
    assert told == status and value["ok"] == (not status) and value["not_run"]
    assert {row["verdict"] for row in value["rows"]} == set(map(str, verdicts))


def test_a_planted_fault_is_caught_by_one_command(ask):
    status, out, _ = ask("parity", "--technique", "decode", "--cases", "8", "--plant", "stale-tail")
    assert status == 1
    assert "FAILED" in out and "planted stale-tail: caught" in out


@pytest.mark.parametrize("plant", PLANTS)
def test_every_fault_can_be_planted_by_the_command(ask, monkeypatch, plant):
    asked = []

    def differing(name, cases, *, plant, **_):
        asked.append(plant)
        return TechniqueParity(name, cases, bitwise=False)

    monkeypatch.setattr(measuring, "check_technique", differing)
    assert ask("parity", "--technique", "decode", "--plant", plant)[0] == 1
    assert asked == [plant]


def test_a_fault_that_nobody_sees_is_said(ask, monkeypatch):
    monkeypatch.setattr(
        measuring, "check_technique", lambda name, cases, **_: TechniqueParity(name, cases, captured=1)
    )
    status, out, _ = ask("parity", "--technique", "decode", "--plant", "stale-tail")
    assert status == 0
    assert "NOT caught" in out


def test_mismatches_reach_the_json_and_the_status(ask_json, monkeypatch):
    def differing(name, cases, **_):
        found = TechniqueParity(name, cases, captured=1)
        found.fault(2, {"case": 3}, "another token")
        return found

    monkeypatch.setattr(measuring, "check_technique", differing)
    status, found = ask_json("parity", "--technique", "decode")
    assert (status, found["bitwise"], found["tokens_equal"]) == (1, True, False)
    assert found["mismatches"] == [{"oracle": 2, "case": 3, "detail": "another token"}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parity", "--technique", "decod"], ["'decod' is no technique", "decode, verify"]),
        (["parity", "--technique", "draft_extent"], ["no technique", "draft_extend"]),
        (["parity", "--technique", "decode", "--plant", "rot"], ["'rot'", "stale-tail"]),
        (["bench", "decod"], ["'decod' is no bench (did you mean decode?)", "decode, ", "recovery, "]),
    ],
)
def test_an_unknown_name_lists_the_good_ones(ask, words, said):
    status, out, error = ask(*words)
    assert (status, out) == (2, "")
    assert all(word in error for word in said)
    assert error.count("\n") == 1


def test_without_a_name_all_benches_are_listed_with_their_settings(ask, ask_json):
    status, out, _ = ask("bench")
    assert status == 0 and [line.split()[0] for line in out.splitlines()[1:]] == list(BENCHES)
    assert max(map(len, out.splitlines())) < 140
    status, rows = ask_json("bench")
    parity = next(row for row in rows if row["bench"] == "parity")
    assert status == 0 and parity["settings"]["dtypes"] == "float32|bfloat16|float16[,...]"


@pytest.mark.parametrize("words", [("--quick",), ("--set", "cases=2"), ("--save",), ("--record", "out")])
def test_options_without_a_bench_are_refused(ask, words):
    status, out, error = ask("bench", *words)
    assert (status, out) == (2, "") and "no bench is named" in error


def test_a_bench_measures_and_keeps_nothing_by_itself(ask, monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "BENCHES", fake_bench())
    monkeypatch.setenv("CGLAB_DATA", str(tmp_path))
    status, out, _ = ask("bench", "fake", "--quick")
    assert status == 0
    assert "fake" in out and "bitwise" in out
    assert not list(tmp_path.iterdir())


def test_records_are_added_where_they_are_wanted(ask_json, monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "BENCHES", fake_bench())
    monkeypatch.setenv("CGLAB_DATA", str(tmp_path))
    status, first = ask_json("bench", "fake", "--save")
    _, second = ask_json("bench", "fake", "--quick", "--record", tmp_path / "results")
    assert status == 0
    kept = load(tmp_path / "results" / "fake.jsonl").records
    assert [record.as_dict() for record in kept] == first + second
    assert [record.metrics["quick"] for record in kept] == [False, True]


def test_what_a_bench_measured_before_it_was_stopped_is_kept(ask, monkeypatch, tmp_path):
    def stopped(device, **options):
        yield from fake_bench()["fake"].run(device, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "BENCHES", {"fake": Bench("stopped halfway", stopped)})
    assert ask("bench", "fake", "--record", tmp_path)[0] == 130
    assert [record.arm for record in load(tmp_path / "fake.jsonl").records] == ["full"]


def test_a_bench_whose_arm_is_corrupted_is_status_1(ask_json, monkeypatch):
    monkeypatch.setattr(measuring, "BENCHES", fake_bench("corrupted"))
    assert ask_json("bench", "fake")[0] == 1


def test_a_real_bench_runs_quickly_and_says_that_tape_times_are_no_graph_times(ask):
    status, out, _ = ask("bench", "decode", "--quick")
    assert status == 0
    assert "breakable" in out and "tape" in out
