"""Formulas, and claims computed from records."""

import json

import pytest

from cglab.errors import ResultsError
from cglab.measure.claims import evaluate, load_claims
from cglab.measure.formula import parse_formula
from cglab.measure.machine import Device
from cglab.measure.record import Record

NOW = "tree-now"
GPU = Device("NVIDIA H200", "cuda", "580.1", 132)
METRICS = {"step_ms": 4.0, "floor_ms": 3.6, "busy_ms": 3.9, "gap_ms": 0.1, "kernels": 300, "host_us": 25.0}


def record(number, model="qwen3-8b", batch=1, arm="full", bench="decode", **fields):
    facts = {
        "id": f"id{number}",
        "run": f"run{number}",
        "created": f"2026-01-01T00:00:{number:02}",
        "tree": NOW,
    }
    facts |= {"device": GPU, "bench": bench, "arm": arm, "model": model, "metrics": METRICS}
    workload = {"batch": batch, "context": 1024, "ops": "compiled"}
    return Record(**(facts | {"workload": workload} | fields))


def g1(*records, wanted="G1"):
    claims = [claim for claim in load_claims() if claim.id == wanted]
    return evaluate(claims, records, NOW)[0]


ALL_OF_G1 = (record(1), record(2, batch=16), record(3, model="qwen3-0.6b"))


def test_the_claims_are_g1_to_g9_and_the_honest_eager_arm_and_unmeasured_without_records():
    claims = load_claims()
    assert [claim.id for claim in claims] == [*(f"G{number}" for number in range(1, 10)), "E1"]
    for result in evaluate(claims, [], NOW):
        assert result.status == "unmeasured"
        assert result.value is None
        assert result.runs == ()
        assert not result.current
        assert all(part.reason for part in result.parts)


def test_met_with_every_part_measured():
    result = g1(*ALL_OF_G1)
    assert result.status == "met"
    assert result.value == pytest.approx(4.0 / 3.6)
    assert result.target == 1.30  # the part with the least to spare decides
    assert result.runs == ("id1", "id2", "id3")
    assert result.current
    told = json.loads(json.dumps(result.as_dict()))
    assert {"id", "text", "target", "value", "status", "runs", "current", "parts"} == set(told)
    assert [part["status"] for part in told["parts"]] == ["met"] * 3


def test_one_part_missing_is_unmeasured_and_one_part_missed_is_unmet():
    assert g1(*ALL_OF_G1[:2]).status == "unmeasured"
    slow = record(9, batch=16, metrics=METRICS | {"step_ms": 5.0})
    missed = g1(ALL_OF_G1[0], slow)
    assert missed.status == "unmet"
    assert (missed.value, missed.target) == (pytest.approx(5.0 / 3.6), 1.35)


def test_the_target_itself_is_met():
    exact = record(1, metrics=METRICS | {"step_ms": 1.30, "floor_ms": 1.0})
    assert g1(exact).parts[0].status == "met"
    over = record(1, metrics=METRICS | {"step_ms": 1.3001, "floor_ms": 1.0})
    assert g1(over).parts[0].status == "unmet"


def test_a_stretch_target_is_told_and_decides_nothing():
    for step, stretch in ((2.4, True), (3.0, False)):
        small = record(3, model="qwen3-0.6b", metrics={"step_ms": step, "floor_ms": 1.0})
        part = g1(small).parts[2]
        assert (part.status, part.stretch) == ("met", stretch)
    assert g1(ALL_OF_G1[0]).parts[0].stretch is None


def test_tape_times_never_meet_a_claim():
    tape = record(1, device=Device("a CPU", "cpu"))
    assert g1(tape).parts[0].status == "unmeasured"


def test_corrupted_runs_never_meet_a_claim():
    assert g1(record(1, parity={"verdict": "corrupted"})).parts[0].status == "unmeasured"
    assert g1(record(1, parity={"verdict": "drift"})).parts[0].status == "met"


def test_older_state_of_the_package_is_shown_as_older():
    older = record(1, tree="tree-then")
    assert not g1(older).current
    assert g1(older).parts[0].status == "met"
    mixed = g1(older, *ALL_OF_G1[1:])
    assert mixed.status == "met"
    assert not mixed.current


def test_the_newest_run_that_has_the_metrics_counts():
    newer = record(7, metrics=METRICS | {"step_ms": 3.8})
    without = record(8, metrics={"step_ms": 3.7, "floor_ms": None})
    part = g1(ALL_OF_G1[0], newer, without).parts[0]
    assert part.runs == ("id7",)
    assert part.value == pytest.approx(3.8 / 3.6)
    assert "floor_ms is None, no number" in g1(without).parts[0].reason


def test_another_arm_batch_or_bench_does_not_count():
    others = (
        record(1, arm="eager"),
        record(2, batch=2),
        record(3, bench="token"),
        record(4, model="pico-gqa"),
    )
    assert {part.status for part in g1(*others).parts} == {"unmeasured"}


def test_records_of_the_portable_form_and_from_before_there_was_a_choice_are_history():
    compiled, portable = (
        record(n, workload={"batch": 1, "ops": ops}) for n, ops in ((1, "compiled"), (2, "portable"))
    )
    older = record(3, workload={"batch": 1})
    for wanted in ("G1", "G3"):
        assert g1(compiled, portable, older, wanted=wanted).runs == ("id1",)
        assert g1(portable, older, wanted=wanted).status == "unmeasured"


def test_g8_reads_first_captures_of_the_capture_bench_by_phase_and_number_of_buckets():
    def capture(number, phase, buckets, seconds, kernels="first use"):
        workload = {"phase": phase, "buckets": buckets, "kernels": kernels, "ops": "compiled"}
        metrics = {"total_s": seconds, "compile_s": 9.0, "held_gb": 0.05}
        arm = "full" if phase == "decode" else "breakable"
        return record(number, bench="capture", arm=arm, workload=workload, metrics=metrics)

    parts = g1(
        capture(1, "decode", 12, 1.5), capture(2, "decode", 36, 7.0), capture(3, "prefill", 58, 5.5),
        capture(4, "prefill", 12, 1.0), capture(5, "decode", 12, 0.5, "used before"), wanted="G8",
    ).parts  # fmt: skip
    assert [part.value for part in parts] == [1.5, 0.05, 9.0, 5.5, 0.05, 9.0]
    assert {part.status for part in parts} == {"met"}


def test_e1_is_the_eager_arm_over_transformers_and_allows_no_more_than_counts_as_equal():
    for ratio, status in ((0.8, "met"), (1.03, "met"), (1.04, "unmet")):
        eager = record(1, arm="eager", metrics=METRICS | {"ratio_to_transformers": ratio})
        assert g1(eager, wanted="E1").parts[2].status == status
    assert g1(record(1, arm="eager"), wanted="E1").parts[2].status == "unmeasured"


def test_g2_compares_arms_of_one_run_only():
    def arms(run, ours, sglang, first):
        shared = {"bench": "token", "run": run}
        return (
            record(first, arm="full", metrics={"token_ms": ours}, **shared),
            record(first + 1, arm="sglang-0.5.16", metrics={"token_ms": sglang}, **shared),
        )

    apart = (arms("r1", 4.0, 6.0, 1)[0], arms("r2", 4.0, 6.0, 3)[1])
    assert g1(*apart, wanted="G2").parts[0].status == "unmeasured"
    together = g1(*arms("r1", 4.0, 6.0, 1), *arms("r2", 4.0, 5.0, 3), wanted="G2").parts[0]
    assert together.value == pytest.approx(0.8)
    assert together.runs == ("id3", "id4")


def test_g4_is_met_by_the_published_ratio_or_by_the_launch_gap():
    def seed_step(tokens, step):
        shared = {"bench": "mtp", "run": "r", "workload": {"dataset": "chat"}}
        return (
            record(1, arm="eager", metrics={"tokens_s": 100.0, "round_ms": 10.0, "gap_ms": 2.0}, **shared),
            record(2, arm="graph", metrics={"tokens_s": tokens, "round_ms": step, "gap_ms": 0.1}, **shared),
        )

    by_ratio = g1(*seed_step(107.0, 9.9), wanted="G4").parts[0]
    assert (by_ratio.status, by_ratio.target) == ("met", 0.068)
    by_gap = g1(*seed_step(103.0, 8.05), wanted="G4").parts[0]
    assert (by_gap.status, by_gap.target) == ("met", 0.95)
    neither = g1(*seed_step(103.0, 9.0), wanted="G4").parts[0]
    assert (neither.status, neither.target) == ("unmet", 0.068)


def test_truth_values_are_numbers():
    metrics = {"rounds": 1000, "hashes_equal": False, "memory_growth_bytes": 0}
    soak = record(1, model="pico-gqa", bench="soak", workload={"steps": 1000}, metrics=metrics)
    assert [part.status for part in g1(soak, wanted="G9").parts[:3]] == ["met", "unmet", "met"]


def test_every_formula_of_the_file_computes():
    for claim in load_claims():
        for part in claim.parts:
            conditions = [part.condition] + ([part.alternative] if part.alternative else [])
            for condition in conditions:
                metrics = {name: {} for name in part.select}
                for number, (selection, metric) in enumerate(sorted(condition.formula.metrics)):
                    metrics[selection][metric] = 2.0 + number
                value = condition.formula.value(metrics)
                assert isinstance(condition.holds(value), bool)
                assert condition.formula.metrics


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a / b", 2.0),
        ("run.a - -b * 2", 12.0),
        ("min(a, b, 3) + max(a, 1)", 9.0),
        ("abs(b - a)", 3.0),
        ("1.5", 1.5),
        ("+a", 6.0),
    ],
)
def test_formulas(text, value):
    assert parse_formula(text, ("run",)).value({"run": {"a": 6.0, "b": 3.0}}) == value


@pytest.mark.parametrize(
    "text",
    [
        "a ** 9",
        "a.__class__",
        "__import__('os')",
        "other.a",
        "a if b else 1",
        "[a]",
        "a < b",
        "'x'",
        "True",
        "open(a)",
        "min()",
        "max(a, key=b)",
        "a.b.c",
        "a[0]",
        "lambda: 1",
        "a and b",
        "a := 1",
        "",
        "a +",
        "\0",
    ],
)
def test_what_is_no_arithmetic_over_metrics_is_refused(text):
    with pytest.raises(ResultsError, match="formula"):
        parse_formula(text, ("run",))


def test_a_bare_metric_needs_a_single_selection():
    with pytest.raises(ResultsError, match="not allowed"):
        parse_formula("a", ("ours", "theirs"))


@pytest.mark.parametrize(
    "metrics", [{"a": 1.0}, {"a": 1.0, "b": 0.0}, {"a": 1.0, "b": "x"}, {"a": 1.0, "b": None}]
)
def test_formulas_that_cannot_be_computed(metrics):
    with pytest.raises(ResultsError):
        parse_formula("a / b", ("run",)).value({"run": metrics})


PART = 'name = "p"\nwhere = {}\nformula = "a"\ncomparison = "<="\ntarget = 1\n'


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[[claim", "cannot read"),
        ('[[claim]]\nid = "X"\n', "claim 'X'.*'text'"),
        ('[[claim]]\nid = "X"\ntext = "t"\npart = []\n', "no parts"),
        (
            '[[claim]]\nid = "X"\ntext = "t"\n[[claim.part]]\n' + PART.replace("<=", "~"),
            "claim 'X'.*comparison '~'",
        ),
        (
            '[[claim]]\nid = "X"\ntext = "t"\n[[claim.part]]\n' + PART.replace('"a"', '"a**2"'),
            "claim 'X'.*not allowed",
        ),
        (
            '[[claim]]\nid = "X"\ntext = "t"\n[[claim.part]]\n' + PART.replace("target = 1", ""),
            "claim 'X'.*'target'",
        ),
    ],
)
def test_broken_claims_are_named(tmp_path, content, reason):
    path = tmp_path / "claims.toml"
    path.write_text(content)
    with pytest.raises(ResultsError, match=f"(?s){reason}"):
        load_claims(path)
    with pytest.raises(ResultsError, match="cannot read"):
        load_claims(tmp_path / "missing.toml")


def test_an_unmet_part_says_what_bounds_it_with_values_of_the_records_that_were_judged(tmp_path):
    path = tmp_path / "claims.toml"
    path.write_text("""
[[claim]]
id = "X"
text = "a target"
[[claim.part]]
name = "part"
where = { bench = "decode" }
formula = "step_ms / floor_ms"
comparison = "<="
target = 1.2
bound = "its {kernels} kernels take {busy_ms / floor_ms}"
""")
    claims = load_claims(path)
    (unmet,) = evaluate(claims, [record(1, metrics=METRICS | {"step_ms": 8.0})], NOW)[0].parts
    assert (unmet.status, unmet.reason) == ("unmet", "its 300 kernels take 1.08")
    (met,) = evaluate(claims, [record(1)], NOW)[0].parts
    assert (met.status, met.reason) == ("met", None)
    lacking = {name: value for name, value in METRICS.items() if name != "kernels"}
    (untold,) = evaluate(claims, [record(1, metrics=lacking | {"step_ms": 8.0, "busy_ms": 0.0})], NOW)[
        0
    ].parts
    assert untold.status == "unmet"  # what it says lacks a number, what it is does not
    assert untold.reason == "its (unknown: run.kernels is None, no number) kernels take 0"
    text = path.read_text()
    for wrong in ("{open(1)}", "{kernels", "{}"):
        path.write_text(text.replace("{kernels}", wrong))
        with pytest.raises(ResultsError, match="'X'"):
            load_claims(path)
