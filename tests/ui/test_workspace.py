"""The workspace without a widget: what is asked for, what is the case, and the thread that does the work."""

import gc
import threading
import time
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from cglab.errors import CaptureError, ClosedError, ToggleError
from cglab.ui.sections import Results
from cglab.ui.worker import StoppedError, Worker
from cglab.ui.workspace import Workload, Workspace

TOGGLES = ("decode", "prefill", "verify")


class FakeBench:
    """Does as told, and notes who asked: errors where planted, gates where a test wants to look in between."""

    title, default, largest = "a stand-in", Workload(2, 32, 4), Workload(8, 128, 64)

    def __init__(self):
        self.calls, self.errors, self.threads = [], {}, set()
        self.parts, self.between = 1, lambda: None

    def _called(self, *call):
        self.calls.append(call)
        self.threads.add(threading.get_ident())
        if call[0] in self.errors:
            raise self.errors[call[0]]

    def modes(self):
        self._called("modes")
        return {"decode": "eager", "prefill": "breakable", "verify": "full"}

    def unavailable(self):
        return {"verify": "needs a draft"}

    def choose(self, name, mode, workload):
        self._called("choose", name, mode)

    def run(self, name, modes, workload, watch):
        self._called("run", name, modes[name], workload)
        for part in range(self.parts):
            watch(f"part {part}", part / self.parts)
            self.between()
        return Results(f"{name} {modes[name]}", {}, {})


@pytest.fixture
def bench():
    return FakeBench()


@pytest.fixture
def space(bench):
    made = Workspace({"fake": lambda: bench}, toggles=TOGGLES)
    assert made.wait(10)
    yield made
    made.close()


def test_a_bench_says_what_is_the_case_and_what_cannot_be_used(space):
    assert space.actual == space.requested == {"decode": "eager", "prefill": "breakable", "verify": "full"}
    assert space.unavailable == {"verify": "needs a draft"}
    assert (space.title, space.technique, space.workload) == ("a stand-in", "decode", Workload(2, 32, 4))


def test_choosing_is_answered_at_once_and_done_by_the_worker_alone(space, bench):
    bench.between = None
    gate = threading.Event()
    space.worker.submit(lambda _: gate.wait(10), space._tell)
    space.choose("decode", "full")
    assert (space.requested["decode"], space.actual["decode"]) == ("full", "eager")
    gate.set()
    assert space.wait(10) and space.actual["decode"] == "full"
    assert bench.threads == {space.worker.thread} != {threading.get_ident()}


def test_of_many_toggles_in_a_row_only_the_latest_is_captured(space, bench):
    gate = threading.Event()
    space.worker.submit(lambda _: gate.wait(10), space._tell)
    for mode in ("full", "breakable") * 25:
        space.choose("decode", mode)
    gate.set()
    space.wait(10)
    assert [call for call in bench.calls if call[0] == "choose"] == [("choose", "decode", "breakable")]
    assert space.requested == space.actual


def test_n05_a_toggle_that_cannot_be_captured_goes_back_and_says_why_until_it_succeeds(space, bench):
    bench.errors["choose"] = CaptureError("reads the host")
    space.choose("decode", "full")
    space.wait(10)
    assert space.requested["decode"] == space.actual["decode"] == "eager"
    assert space.errors == {"decode": "CaptureError: reads the host"}
    space.choose("prefill", "full")
    space.wait(10)
    assert set(space.errors) == {"decode", "prefill"}
    bench.errors.clear()
    space.choose("decode", "full")
    space.wait(10)
    assert set(space.errors) == {"prefill"} and space.actual["decode"] == "full"


def test_a_toggle_that_is_not_available_goes_back_without_asking_the_bench(space, bench):
    space.choose("verify", "eager")
    assert space.requested["verify"] == "full" and space.errors == {"verify": "needs a draft"}
    assert not [call for call in bench.calls if call[0] == "choose"]
    with pytest.raises(ToggleError, match="decode, prefill, verify"):
        space.choose("draft_loop", "full")
    with pytest.raises(ToggleError, match="breakable"):
        space.choose("decode", "fast")
    with pytest.raises(ToggleError, match="fake"):
        space.open("other")


def test_a_run_has_its_workload_and_an_error_of_it_is_cleared_by_the_next(space, bench):
    space.batch, space.prompt, space.new = 3, 20, 5
    bench.errors["run"] = ValueError("does not fit")
    space.run()
    space.wait(10)
    assert space.errors == {"run": "ValueError: does not fit"} and not space.running
    bench.errors.clear()
    space.run()
    space.wait(10)
    assert bench.calls[-1] == ("run", "decode", "eager", Workload(3, 20, 5))
    assert space.results.title == "decode eager" and space.errors == {}


def test_a_second_run_is_none_while_one_is_under_way(space, bench):
    gate = threading.Event()
    bench.between = lambda: gate.wait(10)
    space.run()
    space.run()
    gate.set()
    space.wait(10)
    assert [call[0] for call in bench.calls].count("run") == 1


@pytest.mark.parametrize("begun", [True, False], ids=["in mid-run", "before it begins"])
def test_stop_ends_a_run_between_its_parts_and_leaves_all_usable(space, bench, begun):
    bench.parts, seen = 1000, threading.Event()
    gate = threading.Event()
    bench.between = lambda: (seen.set(), gate.wait(10))
    if not begun:
        space.worker.submit(lambda _: gate.wait(10), space._tell)
    space.run()
    assert not begun or seen.wait(10)
    space.stop()
    assert space.doing == "stopping ..."
    gate.set()
    assert space.wait(10)
    assert space.errors == {"run": "stopped"} and not space.running and space.results is None
    bench.parts = 1
    space.run()
    space.wait(10)
    assert space.results is not None and space.errors == {}


def test_progress_is_told_and_taken_back(space, bench):
    seen = []
    space.observe(lambda change: seen.append(change.new), "progress")
    bench.parts = 4
    space.run()
    space.wait(10)
    assert seen == [0.25, 0.5, 0.75, 0.0] and space.doing == ""


class Everything(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_jobs_have_modes_of_their_own_whatever_their_caller_has_entered(space):
    seen = []

    def look(_):
        seen.append(
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _get_current_dispatch_mode())
        )

    with torch.inference_mode(), Everything():
        space.worker.submit(look, space._tell)
        space.wait(10)
    space.worker.submit(look, space._tell)
    space.wait(10)
    assert seen == [(False, False, None)] * 2 and torch.is_grad_enabled()


def test_n02_an_idle_worker_keeps_nothing_of_its_jobs(space):
    class Model:
        pass

    model = Model()
    gone = weakref.ref(model)
    space.worker.submit(lambda _, model=model: None, space._tell)
    space.wait(10)
    del model
    gc.collect()
    assert gone() is None


def test_n01_an_error_s_message_is_kept_and_not_its_frames(space, bench):
    class Model:
        pass

    def fail(*_):
        model = Model()
        gone.append(weakref.ref(model))
        raise CaptureError("no")

    gone = []
    bench.choose = fail
    space.choose("decode", "full")
    space.wait(10)
    gc.collect()
    assert "no" in space.errors["decode"] and gone[0]() is None


def test_closing_stops_the_run_and_ends_the_thread(bench):
    space = Workspace({"fake": lambda: bench}, toggles=TOGGLES)
    space.wait(10)
    bench.parts, begun = 10_000, threading.Event()
    bench.between = lambda: (begun.set(), time.sleep(0.001))
    space.run()
    begun.wait(10)
    space.close()
    assert not space.worker._thread.is_alive()
    with pytest.raises(ClosedError):
        space.run()
    assert not space.running


def test_a_worker_can_be_closed_by_a_job_of_its_own():
    worker = Worker()
    worker.submit(lambda _: worker.close(), lambda *_: None)
    assert worker.wait(10)
    worker._thread.join(10)
    assert not worker._thread.is_alive()


def test_a_job_whose_error_nobody_took_does_not_end_the_worker(space, monkeypatch):
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    space.worker.submit(lambda _: (_ for _ in ()).throw(StoppedError), space._tell)
    assert space.wait(10)
    space.choose("decode", "full")
    assert space.wait(10) and space.actual["decode"] == "full"
    assert [each.exc_type for each in told] == [StoppedError]
