"""The DSA bench in small, on the tape: what its records hold, and that claim G6 can be computed from them."""

from dataclasses import replace

import pytest
import torch

from cglab.errors import InputError
from cglab.lab.dsa_bench import GRID, NAMES, QUICK_GRID, dsa
from cglab.lab.dsa_sweep import load_of
from cglab.lab.profiles import results_folder
from cglab.lab.ttft_grid import Point
from cglab.measure.claims import evaluate, load_claims
from cglab.measure.records import append

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Of two runs, each with a part of the grid; the first one's were kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CGLAB_DATA", str(tmp_path_factory.mktemp("data")))
        first = list(dsa(CPU, quick=True, new_tokens=2, tokens=(40,), floor_tokens=0, memory=False))
        partial = of(first, "dsa_prefill_sweep")
        assert [record.metrics for record in partial] == [{"points": 1.0, "of_points": 2.0}] * len(NAMES)
        append(results_folder() / "dsa_prefill.jsonl", of(first, "dsa_prefill"))
        return [*of(first, "dsa_prefill"), *dsa(CPU, quick=True, new_tokens=2, tokens=(12,))]


def of(records, bench):
    return [record for record in records if record.bench == bench]


def test_s3_every_arm_did_the_same_work_bitwise_with_fewer_breaks(records):
    points = of(records, "dsa_prefill")
    assert [record.arm for record in points] == [*NAMES] * len(QUICK_GRID)
    for first in range(0, len(points), len(NAMES)):
        arms = points[first : first + len(NAMES)]
        assert len({record.workload["payload"] for record in arms}) == 1
        assert all(record.metrics["bitwise"] and record.metrics["errors"] == 0 for record in arms)
        assert all(record.metrics["tokens_equal"] for record in arms[1:])
        assert [record.metrics["breaks"] for record in arms] == [7.0, 3.0, 3.0, 0.0]
        assert len({record.metrics["cache_gb"] for record in arms}) == 1
        attention = [record.coverage["dsa_attention"] for record in arms]
        assert attention[0]["captured"] == 0 and set(attention[0]["reasons"]) == {"BACKEND_EAGER"}
        assert all(each["captured"] > 0 for each in attention[1:])


def test_a_recording_without_breaks_has_room_for_what_the_point_has_cached(records):
    whole = [record for record in of(records, "dsa_prefill") if record.arm == "whole"]
    assert [record.workload["toggles"] for record in whole] == ["full", "full, room for 64 cached"]
    assert all(record.coverage["prefill"]["reasons"].get("MORE_KEYS", 0) == 0 for record in whole)


def test_p81_the_floor_stands_beside_s3_s_rule(records):
    floors = of(records, "dsa_floor")
    assert [record.arm for record in floors] == ["attention", "graph", "whole"]
    for record in floors:
        assert record.metrics["floor_by_rule"] == 8 and record.metrics["floor"] in (4, 8, 16, 17)
        assert f"floor {record.metrics['floor']:.0f} measured, 8 by S3's rule" in record.notes


def test_memory_is_that_of_each_arm_alone(records):
    swept = of(records, "dsa_prefill_sweep")
    assert [record.arm for record in swept] == [*NAMES]
    assert all(record.metrics["graph_gb"] > 0 and record.metrics["points"] == 2 for record in swept)


def test_t9b_is_preferred_where_the_records_of_both_runs_say_that_it_wins(records):
    (found,) = of(records, "dsa_choice")
    assert found.arm == "whole" and found.metrics["points"] == len(QUICK_GRID)
    assert [room for room, _ in found.workload["limits"]] == [0, 64], (
        "of the points with nothing cached, and with 32 of two"
    )
    assert found.metrics["recorded"] <= len(QUICK_GRID) - found.metrics["slower"]
    assert found.notes.startswith("the selection is recorded ")


def test_g6_is_computed_from_such_records_once_a_gpu_made_them(records):
    claims = [each for each in load_claims() if each.id == "G6"]
    on_gpu = [
        replace(
            record, device=replace(record.device, kind="cuda"), model="dsa-24",
            metrics={**record.metrics, "gap_ms": 1.0},
            workload=record.workload | ({"fresh": 512} if record.workload.get("fresh") == 40 else {}),
        )
        for record in records
    ]  # fmt: skip
    drafting = [
        replace(on_gpu[0], bench="dsa_ablation", arm=arm, metrics={"graph_gb": graph_gb, "cache_gb": 2.0})
        for arm, graph_gb in (("none", 1.0), ("T8+T9+T10", 0.9))
    ]
    (found,) = evaluate(claims, [*on_gpu, *drafting], tree="")
    states = {part.name: part.status for part in found.parts}
    assert states["bitwise against the arm with breaks"] == "met"
    assert states["KV pool over that without T8, T9 and T10"] == "met"
    assert "unmeasured" not in states.values()


def test_the_grid_is_s3_s_but_for_its_longest_prefixes():
    fresh = {(point.tokens, point.concurrency) for point in GRID if not point.cached}
    assert fresh == {(tokens, many) for tokens in (512, 1024, 2048, 8192) for many in (1, 4)}
    cached = {(point.tokens, point.concurrency) for point in GRID if point.cached == 32768}
    assert cached == {(tokens, many) for tokens in (1024, 4096) for many in (1, 4, 16)}
    assert len(GRID) == len(fresh) + len(cached)


def test_s3_a_lane_has_eight_requests_or_as_many_as_are_asked_for():
    gpu = torch.device("cuda")
    assert [load_of(Point(512, 0, many), 2, gpu).count for many in (1, 4, 16)] == [16, 32, 128]
    assert [load_of(Point(512, 0, many), 2, gpu, 2).count for many in (1, 4, 16)] == [16, 8, 32]


@pytest.mark.parametrize("options", [{"tokens": (3,)}, {"new_tokens": 0}, {"per_lane": 0}])
def test_what_asks_for_nothing_is_told_before_a_model_is_opened(monkeypatch, options):
    monkeypatch.setattr("cglab.lab.dsa_bench.open_for", None)
    with pytest.raises(InputError, match=r"ask for some of the grid's"):
        next(dsa(CPU, quick=True, **options))
