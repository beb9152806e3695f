"""The scheduler bench: a step touches every request that runs once, and none that waits."""

import pytest
import torch

from cglab.engine.batches import DecodeBatch
from cglab.engine.scheduler import Scheduler
from cglab.lab.scheduler_bench import COUNTED, PAGE, STEPS, Crowd, scheduler

CPU = torch.device("cpu")


def test_the_books_stay_right_over_all_the_steps_that_are_measured():
    crowd = Crowd(3, 2, CPU)
    for _ in range(STEPS + COUNTED):
        crowd.step()
    crowd.scheduler.check_invariants()
    assert len(crowd.scheduler.running) == 3 and len(crowd.scheduler.waiting) == 2
    assert all(request.finish is None for request in crowd.scheduler.running)
    assert all(len(request.output) == STEPS + COUNTED + 1 for request in crowd.scheduler.running)


def test_a_step_of_2000_calls_as_much_for_each_as_one_of_8():
    calls = {size: Crowd(size, 0, CPU).calls() for size in (1, 8, 2000)}
    each = (calls[8] - calls[1]) / 7
    assert calls[2000] == calls[1] + each * 1999


@pytest.mark.parametrize("waiting", [1, 2000])
def test_those_that_wait_cost_a_step_no_call(waiting):
    assert Crowd(4, waiting, CPU).calls() == Crowd(4, 0, CPU).calls()


def test_the_guard_sees_a_scheduler_that_looks_at_those_that_wait(monkeypatch):
    plan = Scheduler.plan

    def looks(self, now):
        [request.length for request in self.waiting]
        return plan(self, now)

    monkeypatch.setattr(Scheduler, "plan", looks)
    fit = list(scheduler(CPU, quick=True))[-1]
    assert fit.metrics["calls_waiting"] == 16 and fit.metrics["ok"] is False


def test_records_have_every_size_and_a_fit_that_holds():
    *sizes, fit = scheduler(CPU, quick=True, running=(1, 2, 5))
    assert [(r.arm, r.workload["running"], r.workload["waiting"]) for r in sizes] == [
        ("running", 1, 0), ("running", 2, 0), ("running", 5, 0), ("waiting", 5, 0), ("waiting", 5, 16),
    ]  # fmt: skip
    for record in sizes:
        parts = [record.metrics[f"{part}_us"] for part in ("plan", "inputs", "commit")]
        assert record.metrics["step_us"] == pytest.approx(sum(parts)) and min(parts) > 0
        assert len(record.samples["plan_us"]) == STEPS
    assert fit.arm == "fit" and fit.metrics["ok"] is True and fit.metrics["calls_linear"] is True


def test_measured_steps_begin_pages_as_often_as_steps_do():
    assert STEPS % PAGE == 0
    crowd = Crowd(2, 0, CPU)
    before = sum(len(request.pages) for request in crowd.scheduler.running)
    for _ in range(STEPS):
        crowd.step()
    batch = crowd.scheduler.plan(0.0)
    assert isinstance(batch, DecodeBatch)
    held = sum(len(request.pages) for request in crowd.scheduler.running)
    assert held - before in (2 * STEPS // PAGE, 2 * (STEPS // PAGE + 1))
