"""Benches that go on where an earlier run ended: which recorded points stand, and that no other is passed over."""

from dataclasses import replace

import pytest
import torch

from cglab.engine.load import Load
from cglab.lab import dsa_ablation_bench, dsa_bench
from cglab.lab.dsa_recorded import Earlier, asked_of, told
from cglab.lab.profiles import results_folder
from cglab.lab.ttft_grid import Point
from cglab.measure.record import make_record
from cglab.measure.records import append

CPU = torch.device("cpu")
HERE, ASKED = Point(12, 32, 2), Load(4, 2, 12, 3, shared_prefix=32)
LIKE = ("tiny", torch.float32, CPU)


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path):
    """No results but those of a test."""
    monkeypatch.setenv("CGLAB_DATA", str(tmp_path))
    (tmp_path / "results").mkdir()


def record(arm, run="first", *, asked=ASKED, point=HERE, bench="dsa_prefill", model="tiny", **metrics):
    return make_record(
        bench=bench, arm=arm, device=CPU, run=run, model=model, dtype="float32",
        metrics={"bitwise": True, "ttft_ratio": 1.0, "instances": 3.0, **metrics}, samples={"ttft_ms": [1.0] * 3},
        workload={**asked_of(point, asked), "step": {"tokens": 12, "cached": point.cached, "requests": 1}},
    )  # fmt: skip


def kept(*records):
    append(results_folder() / "any.jsonl", list(records))
    return Earlier.kept(*LIKE)


def test_a_point_stands_where_one_run_has_all_arms_of_it_and_the_newest_such_run_is_taken():
    earlier = kept(*(record(arm, run) for run in ("first", "second") for arm in "ab"), record("a", "third"))
    found = earlier.run("dsa_prefill", "ab", asked_of(HERE, ASKED))
    assert {arm: each.run for arm, each in found.items()} == {"a": "second", "b": "second"}
    assert told(HERE, found).endswith("in run second; again=true measures it again")
    assert not earlier.run("dsa_prefill", "abc", asked_of(HERE, ASKED)), (
        "arms of several runs are no comparison"
    )


@pytest.mark.parametrize(
    "other",
    [
        record("a", asked=replace(ASKED, new_tokens=64)), record("a", point=Point(12, 64, 2)),
        record("a", bench="dsa_ablation"), record("a", model="dsa-24"), replace(record("a"), tree="0" * 40),
        replace(record("a"), dtype="bfloat16"),
        replace(record("a"), device=replace(record("a").device, name="another GPU")),
    ],
    ids=["load", "point", "bench", "model", "code", "dtype", "device"],
)  # fmt: skip
def test_nothing_of_another_kind_stands_for_a_point(other):
    assert not kept(other).run("dsa_prefill", "a", asked_of(HERE, ASKED))
    assert kept(other, record("a")).run("dsa_prefill", "a", asked_of(HERE, ASKED))


def test_costs_are_those_measured_last_and_a_run_without_any_takes_none_away():
    earlier = kept(record("a", graph_gb=1.0, capture_s=2.0), record("a", graph_gb=3.0), record("a"))
    assert earlier.costs("dsa_prefill", "a") == {"graph_gb": 3.0} and earlier.costs("dsa_prefill", "b") == {}


@pytest.fixture
def measured(monkeypatch):
    """Points that the bench measured, without measuring."""
    points = []

    def point_of(lab, point, asked, run):
        points.append(point)
        for arm in dsa_bench.NAMES:
            yield record(arm, run, asked=asked, point=point, model="dsa-tiny")

    monkeypatch.setattr(dsa_bench, "_point", point_of)
    return points


def test_a_grid_is_filled_by_several_runs_and_each_sweep_is_over_all_of_it(measured):
    def run(**options):
        lines = []
        made = list(
            dsa_bench.dsa(
                CPU, quick=True, floor_tokens=0, memory=False, new_tokens=3, progress=lines.append, **options
            )
        )
        append(results_folder() / "dsa.jsonl", made)
        sweep = [each.metrics["points"] for each in made if each.bench == "dsa_prefill_sweep"]
        return sweep, [line for line in lines if "again=true" in line]

    first, second = dsa_bench.QUICK_GRID
    assert run(tokens=(first.tokens,)) == ([1.0] * 4, []) and measured == [first]
    sweep, lines = run()
    assert sweep == [2.0] * 4 and measured == [first, second] and len(lines) == 1 and str(first) in lines[0]
    assert run()[0] == [2.0] * 4 and measured == [first, second], "nothing is left to measure"
    assert run(again=True) == ([2.0] * 4, []) and measured == [first, second] * 2


def test_an_ablation_of_which_all_is_recorded_captures_nothing(monkeypatch):
    point = dsa_bench.QUICK_GRID[1]
    asked = dsa_ablation_bench.load_of(point, 3, CPU)
    append(
        results_folder() / "dsa-ablation.jsonl",
        [record(arm, asked=asked, point=point, bench="dsa_ablation", model="dsa-tiny") for arm in dsa_ablation_bench.ARMS],
    )  # fmt: skip
    monkeypatch.setattr(dsa_ablation_bench, "_memory", None)
    monkeypatch.setattr(dsa_ablation_bench, "_point", None)
    lines = []
    made = dsa_ablation_bench.dsa_ablation(
        CPU, quick=True, tokens=(point.tokens,), new_tokens=3, progress=lines.append
    )
    assert list(made) == [] and "again=true" in lines[-1]
