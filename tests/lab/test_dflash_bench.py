"""The DFLASH bench in small, on the tape: what its records hold, and that claim G7 can be computed from them."""

from dataclasses import replace

import pytest
import torch

import cglab
from cglab import errors
from cglab.lab.arm_turns import INSTANCES
from cglab.lab.dflash_bench import ARMS, PINNED, choose, dflash
from cglab.measure.claims import evaluate, load_claims

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def records():
    return list(dflash(CPU, quick=True, batches=(1, 2), new_tokens=24))


def test_s4_every_arm_did_the_same_work_and_said_where_its_sampler_was(records):
    assert [(record.workload["batch"], record.arm) for record in records] == [
        (batch, arm) for batch in (1, 2) for arm in ARMS
    ]
    for number, record in enumerate(records):
        told, first = record.metrics, records[number // 3 * 3]
        assert record.workload["payload"] == first.workload["payload"]
        assert told["errors"] == 0 and told["instances"] == INSTANCES
        assert told["accept_length"] == first.metrics["accept_length"] > 2
        assert record.workload["pinned"] == PINNED and record.workload["width"] == 8
        assert record.coverage["block_draft"]["eager"] == record.coverage["verify"]["eager"] == 0
        inside = record.arm == "graph"
        assert (record.coverage["draft_sampler"]["captured"] > 0) == inside
        assert bool(record.coverage["draft_sampler"]["reasons"]) == (not inside)
        assert record is first or told["tokens_equal"]
    assert [record.parity["verdict"] for record in records if record.arm == "graph"] == ["bitwise"] * 2


def test_points_of_accounting_are_told_from_real_ones(records):
    untimed, _, graph = (record.metrics for record in records[:3])
    assert untimed["sampler_wall_ms"] > 0 and "sampler_wall_ms" not in graph
    points = graph["whole_accounting"] + graph["whole_real"]
    assert points == pytest.approx(graph["whole_percent"] - untimed["whole_percent"])


def test_g7_is_computed_from_such_records_once_a_gpu_made_them(records):
    percent = dict(zip(ARMS, (90.0, 94.0, 96.0), strict=True))
    on_gpu = [
        replace(
            record,
            device=replace(record.device, kind="cuda"),
            metrics=record.metrics
            | {"gap_ms": 1.0, "occupancy_percent": percent[record.arm], "step_ms": 5.0},
        )
        for record in records
    ]
    (found,) = evaluate([each for each in load_claims() if each.id == "G7"], on_gpu, tree="")
    values = {part.name: (part.status, part.value) for part in found.parts}
    assert values["points over the untimed eager sampler"] == ("met", 6.0)
    assert values["forward occupancy, percent"] == ("met", 96.0)
    assert values["points that are accounting (any number: that it is known)"] == ("met", 4.0)
    served_many = {status for name, (status, _) in values.items() if name.startswith("16 requests")}
    assert served_many == {"unmeasured"}, "these records are of one request at a time"
    assert sum(status == "met" for status, _ in values.values()) == len(values) - 2


def test_an_unknown_arm_and_a_lab_without_a_block_draft_are_refused():
    with cglab.open("pico-gqa", device="cpu", max_batch=1, max_context=64) as lab:
        with pytest.raises(errors.InputError, match="good names: eager-untimed, eager-timed, graph"):
            choose(lab, "eager")
        with pytest.raises(errors.InputError, match="open the lab with a block draft"):
            choose(lab, "graph")


@pytest.mark.parametrize("new_tokens", [0, 1])
def test_requests_that_draft_nothing_are_refused_before_a_model_is_opened(new_tokens):
    with pytest.raises(errors.InputError, match="new_tokens=2 or more"):
        next(dflash(torch.device("cpu"), quick=True, new_tokens=new_tokens))
