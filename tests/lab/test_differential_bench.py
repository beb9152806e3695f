"""Random steps of every technique beside padded eager: ten thousand here, a hundred thousand in `make soak`."""

from functools import partial

import pytest
import torch

from cglab.errors import InputError, ToggleError
from cglab.graphs.captured import Captured
from cglab.graphs.coverage import Miss, Reason
from cglab.graphs.recordings import Recordings
from cglab.lab.checking import CASES
from cglab.lab.differential_bench import QUICK_STEPS, STEPS, compared, differential
from cglab.lab.plants import PLANTS, planted
from cglab.lab.techniques import TECHNIQUES

CPU = torch.device("cpu")
IN_CI = 10_000


@pytest.mark.slow
@pytest.mark.end_to_end
@pytest.mark.parametrize("name", sorted(TECHNIQUES))
def test_p11_p12_p13_p14_p15_b26_b28_ten_thousand_random_steps_are_padded_eager_to_the_bit(name):
    found = compared(name, IN_CI // len(TECHNIQUES), CPU)
    assert found.result.ok and not found.deviations, found.result
    assert found.result.steps >= IN_CI // len(TECHNIQUES) and found.result.captured > found.result.steps / 2
    assert all(each.captured for each in found.counts.values()), (
        "a runner that replayed nothing shows nothing"
    )


@pytest.mark.soak
def test_p11_p12_p13_p14_p15_b26_b28_a_hundred_thousand_random_steps_are_padded_eager_to_the_bit():
    *each, total = differential(CPU, seed=1)
    assert {record.arm for record in each} == set(TECHNIQUES)
    assert total.metrics["total_steps"] >= STEPS and total.metrics["ok"], [record.notes for record in each]


@pytest.mark.parametrize(
    ("name", "plant"),
    [("decode", plant) for plant in sorted(PLANTS)]
    + [
        ("prefill", plant) for plant in sorted(PLANTS) if plant != "live-slot-in-padding"
    ],  # that is of decode alone
)
def test_a_planted_fault_is_caught(name, plant):
    with planted(plant):
        found = compared(name, 60, CPU)
    assert found.deviations and not found.result.ok


def test_a_quick_bench_has_a_record_of_every_technique_and_their_sum():
    *each, total = differential(CPU, quick=True, techniques=("decode", "draft_extend"))
    assert [record.arm for record in each] == ["decode", "draft_extend"] and total.arm == "all"
    assert all(record.metrics["ok"] and record.metrics["least_captured"] > 0 for record in each)
    assert (
        total.metrics["ok"]
        and total.metrics["different"] == 0
        and total.metrics["total_steps"] >= QUICK_STEPS
    )
    assert total.metrics["total_steps"] == sum(record.metrics["total_steps"] for record in each)
    assert total.metrics["arms"] == 8 and total.workload["steps"] == QUICK_STEPS


def test_one_bit_that_differs_is_counted_and_told(monkeypatch):
    base = CASES["decode"].make_runners

    def flipped(self):
        runners = base(self)
        runner = runners["full", True]
        run, calls = runner.run, []

        def one_bit_off(live, **inputs):
            tokens, logits = run(live, **inputs)
            calls.append(live)
            if len(calls) == 9:
                logits.view(torch.int32)[0, 3] ^= 1
            return tokens, logits

        monkeypatch.setattr(runner, "run", one_bit_off)
        return runners

    monkeypatch.setattr(CASES["decode"], "make_runners", flipped)
    record, total = differential(CPU, steps=200, techniques=("decode",))
    assert record.metrics["different"] == 1 and not record.metrics["ok"] and not total.metrics["ok"]
    assert "output 1 differ in bits" in record.notes


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(InputError, match="steps=0 leave nothing for 10 techniques"):
        list(differential(CPU, steps=0))
    with pytest.raises(ToggleError, match="good names: decode"):
        list(differential(CPU, techniques=("decod",)))


def _told(monkeypatch, wrong):
    """What is told of decode once ``wrong(run, live, **inputs)`` stands for a run of its full runner."""
    base = CASES["decode"].make_runners

    def changed(self):
        runners = base(self)
        runner = runners["full", True]
        monkeypatch.setattr(runner, "run", partial(wrong, runner.run, runner))
        return runners

    monkeypatch.setattr(CASES["decode"], "make_runners", changed)
    return {found.what for found in compared("decode", 60, CPU).deviations}


def test_a_step_that_writes_to_its_inputs_is_told(monkeypatch):
    """The eager run beside it must not start from what the step left of them."""

    def wrong(run, runner, live, **inputs):
        output = run(live, **inputs)
        inputs["input_ids"].add_(1)
        return output

    assert "the step wrote to its inputs input_ids" in _told(monkeypatch, wrong)


def test_a_result_that_is_not_handed_out_is_told(monkeypatch):
    told = _told(monkeypatch, lambda run, runner, live, **inputs: run(live, **inputs)[:1])
    assert told == {"output 1: of one run only"}


def test_a_step_that_fits_a_bucket_and_runs_eager_is_told(monkeypatch):
    """It is to the bit what eager is, being nothing else; such steps once counted as compared."""
    monkeypatch.setattr(Recordings, "serves", lambda self, size, values: Miss(Reason.CAPTURE_FAILED))
    found = compared("decode", 60, CPU).deviations
    assert found and all("ran eager, for CAPTURE_FAILED" in each.what for each in found)


def test_a_step_of_a_captured_size_that_runs_eager_for_its_size_is_told(monkeypatch):
    monkeypatch.setattr(Captured, "pad", lambda self, live: Miss(Reason.SIZE_NOT_CAPTURED))
    found = compared("decode", 60, CPU).deviations
    assert found and all("ran eager, for SIZE_NOT_CAPTURED" in each.what for each in found)


def test_a_step_that_runs_eager_without_a_reason_is_told(monkeypatch):
    def wrong(run, runner, live, **inputs):
        return runner.run_live_eager(live, **inputs)

    told = _told(monkeypatch, wrong)
    assert told and all("ran eager, for no reason" in each for each in told)
