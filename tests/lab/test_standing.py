"""Where the lab stands: claims, published beside measured, losses; from records alone."""

from dataclasses import replace

import pytest

from cglab.errors import ResultsError
from cglab.lab.standing import PAIRS, Standing
from cglab.measure.claims import load_claims
from cglab.measure.published import load_published
from cglab.measure.record import Device, Record
from cglab.measure.records import append


def measured(bench, arm, workload, metrics, *, kind="cuda"):
    return Record(
        bench=bench, arm=arm, device=Device("NVIDIA H200", kind), id=f"{bench}{arm}{workload}", run="run", tree="old",
        created="2026-12-01T10:00:00", model="qwen3-8b", weights="random", dtype="bfloat16", workload=workload,
        metrics=metrics,
    )  # fmt: skip


CHAT = {"dataset": "chat", "batch": 16}
RECORDS = [
    measured("mtp", "eager", CHAT, {"tokens_s": 100.0, "tpot_ms": 10.0, "round_ms": 30.0, "gap_ms": 2.0}),
    measured(
        "mtp", "graph", CHAT,
        {"tokens_s": 105.0, "tpot_ms": 9.5, "round_ms": 28.0, "tpot_verdict": "faster", "tpot_ratio": 0.95},
    ),
    measured("prefill", "eager", {"tokens": 8192}, {"step_ms": 10.0}),
    measured("prefill", "breakable", {"tokens": 8192}, {"verdict": "slower", "ratio_to_eager": 1.07}),
    measured("decode", "transformers", {"batch": 1}, {"verdict": "slower", "ratio_to_eager": 1.5}),
    measured("token", "full", {"batch": 1}, {"token_ms": 4.0}),
    measured("token", "sglang-0.5.16", {"batch": 1}, {"token_ms": 6.0, "verdict": "slower", "ratio_to_ours": 1.5}),
    measured("token", "torch-compile", {"batch": 1}, {"token_ms": 3.6, "verdict": "faster", "ratio_to_ours": 0.9}),
    measured("token", "eager", {"batch": 2}, {"verdict": "faster", "ratio_to_ours": 0.5}, kind="cpu"),
]  # fmt: skip


@pytest.fixture
def standing(tmp_path):
    append(tmp_path / "all.jsonl", RECORDS)
    return Standing(tmp_path)


def test_every_part_of_every_claim_has_a_row(standing):
    frame = standing.claims_frame()
    assert len(frame) == sum(len(claim.parts) for claim in load_claims())
    chat = frame[(frame.claim == "G4") & (frame.part == "chat, tok/s")].iloc[0]
    assert chat.status == "met" and chat.value == pytest.approx(1.0)  # by the launch gap that was won
    assert set(frame[frame.claim == "G9"].status) == {"unmeasured"}


def test_a_published_figure_stands_beside_the_same_measure_and_never_beside_an_alternative(standing):
    frame = standing.published_frame().set_index("figure")
    assert frame.loc["throughput change, chat", "published"] == 6.8
    assert frame.loc["throughput change, chat", "measured"] == pytest.approx(5.0)
    assert frame.loc["TPOT change", "measured"] == pytest.approx(-5.0)
    assert frame.loc["forward occupancy change", ["published", "unit"]].tolist() == [5, "pp"]
    assert frame["measured"].isna().sum() == len(PAIRS) - 2


def test_every_pair_names_a_row_and_a_part_that_are_there():
    tables = load_published()
    parts = {(claim.id, part.name) for claim in load_claims() for part in claim.parts}
    for pair in PAIRS:
        assert pair.row in [row["name"] for row in tables[pair.table]["rows"]], pair
        assert (pair.claim, pair.part) in parts, pair


def test_losses_are_captured_arms_behind_eager_and_peers_ahead_of_ours(standing):
    frame = standing.losses_frame()
    assert frame[["bench", "arm", "measure", "ratio"]].values.tolist() == [
        ["prefill", "breakable", "time", 1.07], ["token", "torch-compile", "time", 0.9],
    ]  # fmt: skip
    assert frame.step.tolist() == ["tokens 8192", "batch 1"]


def test_without_losses_the_table_is_empty_and_keeps_its_columns(tmp_path):
    append(tmp_path / "all.jsonl", [replace(RECORDS[0])])
    assert list(Standing(tmp_path).losses_frame().columns)[:3] == ["bench", "model", "step"]


def test_no_folder_is_told(tmp_path):
    with pytest.raises(ResultsError, match="no results at"):
        Standing(tmp_path / "none")
