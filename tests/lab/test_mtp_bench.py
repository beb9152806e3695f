"""The MTP bench in small, on the tape: what its records hold, and that claim G4 can be computed from them."""

from dataclasses import replace

import pytest
import torch

from cglab.errors import InputError
from cglab.lab.arm_turns import INSTANCES
from cglab.lab.mtp_bench import ARMS, LOADS, PINNED, mtp
from cglab.measure.claims import evaluate, load_claims

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def records():
    return list(mtp(CPU, quick=True, loads=("chat",), new_tokens=16))


def test_s0_every_arm_did_the_same_work_and_said_how(records):
    assert [record.arm for record in records] == list(ARMS)
    assert len({record.workload["payload"] for record in records}) == 1
    for record in records:
        told = record.metrics
        assert told["errors"] == 0 and told["instances"] == INSTANCES
        assert told["accept_length"] == records[0].metrics["accept_length"] > 2
        assert record.workload["pinned"] == PINNED and record.workload["new_tokens"] == 16
        assert set(record.coverage) >= {"prefill", "draft_loop", "verify"}
        assert record.coverage["verify"]["eager"] == 0
    eager, graph, fused = records
    assert eager.coverage["seed_step"]["reasons"] and not eager.coverage["seed_step"]["captured"]
    assert graph.coverage["seed_step"]["eager"] == 0 and "seed_step" not in fused.coverage
    assert graph.parity["verdict"] == fused.parity["verdict"] == "bitwise"
    assert graph.metrics["tokens_equal"] and fused.metrics["tokens_equal"]


def test_queueing_is_told_apart_and_the_seed_s_share_of_a_step_is_a_share(records):
    eager, graph, fused = (record.metrics for record in records)
    assert all(
        "queueing_ms" in told and told["ttft_ms"] >= told["queueing_ms"] for told in (eager, graph, fused)
    )
    assert 0 < eager["seed_share"] < 1 and eager["seed_wall_ms"] > 0
    assert "seed_step_ms" in graph and "seed_step_ms" not in fused


def test_g4_is_computed_from_such_records_once_a_gpu_made_them(records):
    claims = [each for each in load_claims() if each.id == "G4"]
    on_gpu = [
        replace(record, device=replace(record.device, kind="cuda"), metrics={**record.metrics, "gap_ms": 1.0})
        for record in records
    ]
    (found,) = evaluate(claims, on_gpu, tree="")
    states = {part.name: part.status for part in found.parts}
    assert states["chat, difference in accept length"] == "met"
    assert states["chat, tok/s"] in ("met", "unmet") and states["summarisation, tok/s"] == "unmeasured"


def test_the_loads_are_s0_s_lengths_and_80_requests_for_chat():
    assert LOADS["chat"].prompt_tokens == LOADS["chat"].new_tokens == 1000
    assert LOADS["chat"].count * INSTANCES >= 80
    assert LOADS["summarisation"].prompt_tokens == 8000


def test_an_unknown_load_is_told_before_a_model_is_opened():
    with pytest.raises(InputError, match="'talk' is no load; good names: chat, summarisation"):
        next(mtp(CPU, quick=True, loads=("talk",)))


@pytest.mark.parametrize("new_tokens", [0, 1])
def test_requests_that_never_draft_are_told_before_a_model_is_opened(monkeypatch, new_tokens):
    monkeypatch.setattr("cglab.lab.mtp_bench.open_lab", None)
    with pytest.raises(InputError, match=f"{new_tokens} new tokens draft nothing; give new_tokens=2"):
        next(mtp(CPU, quick=True, new_tokens=new_tokens))
