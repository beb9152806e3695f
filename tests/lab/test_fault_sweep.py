"""An exception and no memory in the captures of every technique's runners; and that the sweep notices what is wrong."""

import pytest
import torch

from cglab.errors import InputError
from cglab.graphs import faults
from cglab.graphs.coverage import Coverage
from cglab.graphs.recordings import Recordings
from cglab.graphs.writes import WriteJournal
from cglab.lab import fault_sweep
from cglab.lab.fault_sweep import SWEPT, fault_bench, sweep_faults
from cglab.lab.techniques import TECHNIQUES
from cglab.runners.base import Runner
from cglab.runners.decode import DecodeRunner

CPU = torch.device("cpu")
swept_ones = pytest.mark.parametrize(
    ("name", "latent"), SWEPT, ids=[f"{name}, latent" if latent else name for name, latent in SWEPT]
)


def check(name, latent, device, sample, forms=None):
    swept = sweep_faults(name, device, sample=sample, forms=forms, latent=latent)
    assert all(padding for _, padding in swept)
    for arm, found in swept.items():
        assert not found.failed and found.growth == 0, arm
        assert found.tried[0] == 0 and found.tried[-1] == found.operations - 1 and found.operations > 20
        assert len(found.exhausted) == 4, "every bucket of the sequences' runners"


@pytest.mark.slow
@swept_ones
def test_b13_b15_p28_a_fault_at_sampled_operations_and_no_memory_at_every_bucket(name, latent):
    check(name, latent, CPU, sample=2, forms=1)


@pytest.mark.soak
@swept_ones
def test_b13_b15_p28_a_fault_at_every_operation_and_no_memory_at_every_bucket(name, latent):
    check(name, latent, CPU, sample=None)


@pytest.mark.gpu
@swept_ones
def test_b13_b15_faults_of_every_technique_on_a_gpu(name, latent):
    check(name, latent, torch.device("cuda", 0), sample=2, forms=1)


def test_every_kind_of_runner_is_swept(monkeypatch):
    """A runner that no technique's sequences are made of would be in no sweep."""

    def below(kind):
        return {kind}.union(*map(below, kind.__subclasses__()))

    made, init = set(), Runner.__init__

    def noted(self, *args, **named):
        made.add(type(self))
        init(self, *args, **named)

    monkeypatch.setattr(Runner, "__init__", noted)
    monkeypatch.setattr(Runner, "capture", lambda self: None)
    assert {name for name, _ in SWEPT} == set(TECHNIQUES)
    for name, latent in SWEPT:
        with fault_sweep.opened_small(name, fault_sweep.Faulty, CPU, latent=latent):
            pass
    concrete = {
        kind
        for kind in below(Runner)
        if kind.__module__.startswith("cglab.") and not kind.__abstractmethods__
    }
    assert concrete - made == set()


@pytest.mark.parametrize(
    ("owner", "method", "wrong", "told"),
    [
        (WriteJournal, "restore", lambda self: None, "the failed capture wrote to"),
        (Recordings, "_failed", lambda self, sizes, error: {}, "eager for"),
    ],
    ids=["writes that stay", "a reason that is lost"],
)
def test_what_a_failed_capture_leaves_behind_is_told(monkeypatch, owner, method, wrong, told):
    monkeypatch.setattr(owner, method, wrong)
    found = sweep_faults("decode", CPU, sample=2)
    assert any(told in line for each in found.values() for line in each.failed)


def test_a_step_that_is_wrong_after_a_fault_is_told(monkeypatch):
    run = DecodeRunner.run

    def wrong(self, live, **inputs):
        tokens, logits = run(self, live, **inputs)
        return tokens, logits + (1 if self.coverage().eager else 0)

    monkeypatch.setattr(DecodeRunner, "run", wrong)
    found = sweep_faults("decode", CPU, sample=2)["full", True]
    assert any("the eager step after it: output 1 differ" in line for line in found.failed)


def test_a_step_that_neither_replays_nor_says_why_is_told(monkeypatch):
    monkeypatch.setattr(Coverage, "hit", lambda *_: None)
    found = sweep_faults("decode", CPU, sample=2)["full", True]
    assert any("the replay after it: nothing was replayed" in line for line in found.failed)


def test_a_capture_that_fails_of_something_else_is_told(monkeypatch):
    """It would be taken for the planned fault, which then proved nothing."""
    reach = faults.reach

    def broken(operation):
        plan = faults._plan.get()
        if plan is not None and plan.at is not None:
            raise RuntimeError("broken otherwise")
        reach(operation)

    monkeypatch.setattr(faults, "reach", broken)
    found = sweep_faults("decode", CPU, sample=2)["full", True]
    told = "operation 0: the fault did not fail the capture, which ended with"
    assert any(line.startswith(told) and "broken otherwise" in line for line in found.failed), found.failed


def test_a_record_of_faults_says_what_was_tried():
    (record,) = fault_bench(CPU, quick=True, techniques=("draft_extend",))
    assert record.metrics["ok"] and record.metrics["failed"] == 0
    assert record.metrics["tried"] == 2 * len(record.workload["runners"]) < record.metrics["operations"]
    assert record.metrics["exhausted"] == 4 * len(record.workload["runners"])


def test_a_technique_that_draws_no_step_for_a_runner_is_an_error(monkeypatch):
    monkeypatch.setattr(fault_sweep, "TRIES", 0)
    with pytest.raises(InputError, match="0 sequences of decode drew no step that full replays"):
        sweep_faults("decode", CPU, sample=2)


def test_a_sample_has_both_ends():
    with pytest.raises(InputError, match="sample=1 leaves out the first or the last operation"):
        sweep_faults("decode", CPU, sample=1)
