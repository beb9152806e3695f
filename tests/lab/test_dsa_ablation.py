"""The ablation of T8, T9 and T10 in small, on the tape: which combinations there are, and what was captured in each."""

from itertools import islice

import pytest
import torch

from cglab.errors import InputError
from cglab.lab import dsa_ablation_bench
from cglab.lab.arm_turns import INSTANCES, rounds
from cglab.lab.dsa_ablation_bench import ARMS, BENCH, INVALID, POINTS, dsa_ablation
from cglab.lab.kept_turns import turn_of
from cglab.measure.records import append

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def records():
    made = dsa_ablation(CPU, quick=True, tokens=(12,), new_tokens=3)
    return {each.arm: each for each in made if each.bench == BENCH}


def test_s3_six_of_the_eight_combinations_are_arms_and_the_others_have_a_reason(records):
    assert list(records) == list(ARMS) == ["none", "T10", "T8", "T8+T10", "T8+T9", "T8+T9+T10"]
    assert list(INVALID) == ["T9", "T9+T10"]
    for record in records.values():
        assert record.workload["invalid"] == dict(INVALID)
    assert len(POINTS) == 4 and {bool(point.cached) for point in POINTS} == {False, True}


def test_t10_each_switch_captures_its_own_part_and_nothing_else(records):
    for name, switches in ARMS.items():
        counted = records[name].coverage
        on = {
            "dsa_attention": switches.attention, "dsa_indexer_prep": switches.preparation,
            "draft_extend": switches.extend, "prefill": True, "verify": True,
        }  # fmt: skip
        for phase, captured in on.items():
            assert (counted[phase]["captured"] > 0) is captured, (name, phase)
            assert captured or set(counted[phase]["reasons"]) == {"BACKEND_EAGER"}, (name, phase)


def test_all_arms_did_the_same_work_in_a_cache_of_the_same_size(records):
    arms = list(records.values())
    assert len({record.workload["payload"] for record in arms}) == 1
    for name in ("cache_gb", "accept_length", "errors"):
        assert len({record.metrics[name] for record in arms}) == 1, name
    assert all(record.metrics["tokens_equal"] for record in arms[1:])
    for name in ("ttft_ms", "tpot_ms", "e2e_ms", "graph_gb"):
        assert all(record.metrics[name] > 0 for record in arms), name
    for name, switches in ARMS.items():
        assert (records[name].metrics["draft_graph_gb"] > 0) is switches.extend


@pytest.mark.parametrize("options", [{"tokens": (3,)}, {"new_tokens": 1}])
def test_what_would_measure_nothing_is_told_before_a_model_is_opened(monkeypatch, options):
    monkeypatch.setattr("cglab.lab.dsa_ablation_bench.open_for", None)
    with pytest.raises(InputError, match="two tokens or more"):
        next(dsa_ablation(CPU, quick=True, **options))


def test_a_run_that_is_cut_within_a_point_goes_on_with_the_round_that_it_was_in(monkeypatch, tmp_path):
    monkeypatch.setenv("CGLAB_DATA", str(tmp_path))
    begun, lines = [], []

    def noted(*given, first, **named):
        begun.append(first)
        return rounds(*given, first=first, **named)

    def run(**options):
        return dsa_ablation(
            CPU, quick=True, tokens=(12,), new_tokens=3, memory=False, progress=lines.append, **options
        )

    monkeypatch.setattr(dsa_ablation_bench, "rounds", noted)
    cut = list(islice(run(), len(ARMS) + 2))  # a round, and of the next one two arms were written
    append(tmp_path / "results/dsa-ablation.jsonl", cut)
    made = list(run())
    assert begun == [0, 1] and "rounds 1 to 1 of 3" in "".join(lines)
    points = {each.arm: each for each in made if each.bench == BENCH}
    assert [each.bench for each in made] == [f"{BENCH}_turn"] * len(ARMS) + [BENCH] * len(ARMS)
    for kept in cut[: len(ARMS)]:
        found, turn = points[kept.arm], turn_of(kept)
        assert (
            found.metrics["instances"] == INSTANCES and cut[0].run in found.notes and found.run != cut[0].run
        )
        assert found.samples["ttft_ms"][: len(turn.outputs)] == list(turn.times["ttft"])
        assert len(found.samples["ttft_ms"]) == INSTANCES * len(turn.outputs)
        assert found.metrics.get("tokens_equal", True) and found.workload["payload"] == turn.payload
    append(tmp_path / "results/dsa-ablation.jsonl", made)
    assert list(run()) == [] and begun == [0, 1], "the point stands"
    next(run(again=True))
    assert begun == [0, 1, 0]
