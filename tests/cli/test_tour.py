"""The main job itself: every bucket captured, checked and measured, on a small lab."""

import dataclasses

import pytest

from cglab.commands.tour import ARMS, live_sizes, stages
from cglab.measure.parity import Parity, Verdict


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [
        ([1, 2, 4, 8], [(1, 1), (2, 2), (3, 4), (5, 8)]),
        ([3], [(1, 3)]),
        ([1, 12, 16], [(1, 1), (2, 12), (13, 16)]),
    ],
)
def test_every_bucket_is_met_with_most_padding_and_with_none(buckets, expected):
    assert live_sizes(buckets) == expected


def test_every_bucket_and_arm_has_a_row_with_parity_coverage_and_times(tour):
    rows = tour.rows()
    assert [(row["bucket"], row["arm"]) for row in rows] == [(size, arm) for size in (1, 2) for arm in ARMS]
    for row in rows:
        assert row["parity"] == ("reference" if row["arm"] == "eager" else "bitwise")
        captured, steps = map(int, row["captured"].split("/"))
        assert captured == (0 if row["arm"] == "eager" else steps)
        assert float(row["step ms"]) > 0
        assert (row["capture ms"] is None) == (row["arm"] == "eager")


def test_generation_covers_every_arm_with_the_same_tokens(tour):
    rows = {row["arm"]: row for row in tour.generation_rows()}
    assert set(rows) == set(ARMS)
    assert {row["tokens as eager"] for row in rows.values()} == {"2/2"}
    assert (rows["eager"]["captured"], rows["eager"]["eager because"]) == (
        0,
        f"backend_eager {rows['eager']['steps']}",
    )
    assert (
        rows["full"]["captured"] == rows["full"]["steps"] == 15
    )  # limits of 8 and 16 tokens, one each from prefill


def test_records_hold_what_the_table_says(tour):
    assert len(tour.records) == 2 * len(ARMS)
    assert len({record.run for record in tour.records}) == 1
    for record, row in zip(tour.records, tour.rows(), strict=True):
        assert (record.bench, record.arm, record.workload["bucket"]) == ("demo", row["arm"], row["bucket"])
        assert f"{record.metrics['step_ms']:.3g}" == row["step ms"]
        assert len(record.samples["step_ms"]) >= 3 * 8
        assert "no graph speed-ups" in record.notes


def test_tape_times_are_said_to_be_no_graph_speed_ups(tour):
    assert "no graph speed-ups" in tour.note
    assert "no graph speed-ups" not in dataclasses.replace(tour, recorder="cuda").note


def test_one_corrupted_step_is_a_failure_and_shows_in_its_row(tour):
    assert tour.ok
    *rest, last = tour.checks
    bad = dataclasses.replace(last, parity=Parity(Verdict.CORRUPTED, 1, detail="stale"))
    spoilt = dataclasses.replace(tour, checks=(*rest, bad))
    assert not spoilt.ok
    assert [row["parity"] for row in spoilt.rows()][-1] == "corrupted"


def test_a_capture_that_never_replays_is_a_failure(tour):
    eager = tour.generations["eager"]
    assert not dataclasses.replace(tour, generations={**tour.generations, "full": eager}).ok


def test_progress_is_reported_as_often_as_announced(toured):
    assert len(toured[1]) == stages([1, 2])
