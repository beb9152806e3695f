"""Must-show of sparse prefill: every arm bitwise on mixed requests from the floor on; what the toggles and switches say."""

import pytest
import torch

import cglab
from cglab.errors import InputError, ToggleError
from cglab.lab.bucket_floor import BucketFloor, bucket_floor
from cglab.lab.dsa_arms_bench import dsa_arms
from cglab.lab.sparse_arms import ARMS, check_arms, mixed_prompts, toggled
from cglab.lab.sparse_prefill import SparseArm
from cglab.settings import KILL_SWITCHES

SIZES = {
    "max_batch": 4,
    "max_context": 96,
    "token_budget": 32,
    "prefill_buckets": (4, 8, 16, 32),
    "buckets": (1, 2, 4),
}


def opened(device="cpu", **options):
    return cglab.open("dsa-tiny", device=device, **SIZES | options)


@pytest.fixture(scope="module")
def lab():
    with opened() as one:
        yield one


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_arm_is_bitwise_on_mixed_requests_from_the_measured_floor_on(device, dtype):
    with opened(device, dtype=dtype) as one:
        floors = [bucket_floor(one, arm).measured for arm in ARMS[1:]]
    with opened(device, dtype=dtype, bucket_floor=max(floors)) as one:
        found = check_arms(one)
        rounds = mixed_prompts(one)
    assert sum(map(len, rounds)) >= 13 and max(map(len, rounds)) == 4
    assert [each.arm for each in found] == [arm.name for arm in ARMS]
    assert all(each.ok and each.requests == sum(map(len, rounds)) for each in found), found
    assert len({each.coverage["prefill"].steps for each in found}) == 1, "one schedule, whatever the arm"
    assert len({each.coverage["prefill"].captured for each in found}) == 1, "T9b has room for all of it"


@pytest.mark.slow
def test_the_bench_records_what_was_compared_from_which_floor_on():
    records = list(dsa_arms(torch.device("cpu"), quick=True))
    assert [record.arm for record in records] == [arm.name for arm in ARMS]
    for record in records:
        assert (
            record.metrics["ok"]
            and record.metrics["requests"] >= 13
            and record.parity["verdict"] == "bitwise"
        )
        assert record.metrics["captured"] > 0 and record.workload["bucket_floor"] <= 33
    assert all("by S3's rule" in record.notes for record in records[1:])
    for wrong, told in (({"model": "pico-gqa"}, "needs latent attention"), ({"dtypes": ()}, "no dtype")):
        with pytest.raises(InputError, match=told):
            next(dsa_arms(torch.device("cpu"), **wrong))


def test_the_requests_are_what_they_are_said_to_be(lab):
    *alone, together, again = mixed_prompts(lab)
    lengths = [len(prompt) for (prompt,) in alone]
    for edge in (*lab.prefill_buckets, lab.config.index_topk):
        assert {edge - 1, edge} <= set(lengths)
    assert max(map(len, together)) > lab.engine.scheduler.options.token_budget, "in chunks"
    assert all(one[:12] == other[:12] for one, other in zip(together, again, strict=True)), "a cached prefix"


def test_p81_the_floor_is_swept_over_every_live_size_and_printed_beside_the_rule(lab):
    found = bucket_floor(lab)
    assert found.buckets == (4, 8, 16, 32) and found.by_rule == 8
    told = BucketFloor("T9", (4, 8, 16), {4: (2, 3), 8: (5, 6, 8)}, 66)
    assert (told.measured, told.by_rule) == (16, 17)
    assert str(told) == (
        "T9: floor 16 measured, 17 by S3's rule (66 rows); not bitwise: bucket 4 at 2-3, bucket 8 at 5-6, 8"
    )


def test_arms_are_compared_and_covered_by_technique(lab):
    found = lab.compare("dsa_attention", arms=("eager", "graph"), tokens=24, repeats=1)
    assert found.parity["graph"].verdict == "bitwise" and found.workload["bucket"] == 32
    counted = lab.coverage("dsa_attention")
    assert counted["breakable"].captured > 0
    assert counted["breakable, dsa_attention eager"].reasons.keys() == {"BACKEND_EAGER"}
    preparation = lab.coverage("dsa_indexer_prep")["breakable, dsa_attention eager"]
    assert preparation.reasons.keys() == {"NEEDS_ATTENTION"}


def test_b81_prefill_of_all_three_modes_gives_the_same_tokens(lab):
    prompts, found = [[5] * 40, [6, 7, 8], [9, 4] * 15], {}
    for mode in ("eager", "breakable", "full"):
        with toggled(lab, SparseArm(mode)):
            found[mode] = lab.generate(prompts, 5, stop_at_end=False).tokens
    assert found["eager"] == found["breakable"] == found["full"]


@pytest.mark.parametrize(
    ("switch", "name"), [(KILL_SWITCHES[0], "dsa_attention"), (KILL_SWITCHES[1], "dsa_indexer_prep")]
)
def test_a_kill_switch_keeps_the_part_a_break_and_is_counted_by_its_name(monkeypatch, switch, name):
    monkeypatch.setenv(switch, "1")
    with opened() as one:
        one.generate([[3] * 30], 1)
        counted = one.coverage(name)["breakable"]
        assert counted.captured == 0 and counted.last_facts == {"KILL_SWITCH": f"{switch}=1"}
        assert one.coverage("prefill")["breakable"].captured == 1
        one.captures.prefill = "full"
        one.generate([[4] * 30], 1)
        lines = one.phases.prefill().captured.inspect(32)
    assert any("select" in line for line in lines if line.startswith("break ")), "T9b is off with it"


def test_a_model_of_another_kind_has_no_arms():
    with cglab.open("pico-gqa", device="cpu", max_batch=2, max_context=32) as one:
        with pytest.raises(ToggleError, match="has none; open another model"):
            one.runner("graph", "dsa_attention")
        with pytest.raises(ToggleError, match="an arm of sparse prefill needs"):
            check_arms(one)
