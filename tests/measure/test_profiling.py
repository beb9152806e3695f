"""The profiling helper: on the CPU here, on a GPU where there is one."""

import os
import subprocess
import sys

import pytest
import torch

from cglab.errors import DeviceError, InputError, ResultsError
from cglab.measure.prediction import outcome, predict_gain, same_work
from cglab.measure.profiling import STEP, profile
from cglab.measure.trace_file import load_trace


def step():
    step.calls += 1
    return torch.ones(16, 16) @ torch.ones(16, 16)


def test_cpu_profile_says_that_there_are_no_device_records(tmp_path):
    step.calls = 0
    trace = profile(step, steps=3, warmup=2, save=tmp_path / "step.json.gz")
    assert step.calls == 2 + 1 + 3
    assert trace.steps == 3
    assert "no device records" in trace.unreliable
    assert trace.busy_us() is None
    lanes = {row["lane"].split()[0] for row in trace.rows(step=2)}
    assert lanes == {"operations"}
    again = load_trace(tmp_path / "step.json.gz").window(STEP)
    assert again.rows() == trace.rows()
    assert [path.name for path in tmp_path.iterdir()] == ["step.json.gz"]


def test_a_trace_that_cannot_be_kept_leaves_the_earlier_one(tmp_path, monkeypatch):
    kept = tmp_path / "step.json"
    kept.write_text("earlier")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ResultsError, match="No space left"):
        profile(step, steps=1, save=kept)
    assert kept.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [kept]


def test_wrong_arguments_are_refused():
    with pytest.raises(InputError, match="at least one step"):
        profile(step, steps=0)
    with pytest.raises(DeviceError):
        profile(step, device=f"cuda:{torch.cuda.device_count()}")


@pytest.mark.gpu
def test_gpu_profile_of_eager_and_replayed_steps():
    """The same 100 kernels eager and replayed: one launch, as much busy time, the predicted gap."""
    x = torch.randn(256, 256, device="cuda")
    out = torch.empty_like(x)

    def work():
        for _ in range(100):
            torch.mul(x, 1.5, out=out)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    eager, replayed = (profile(each, steps=5, device="cuda") for each in (work, graph.replay))
    for trace in (eager, replayed):
        assert trace.reliable, trace.unreliable
        assert len(trace.device_events) == 5 * 100
        assert trace.busy_us() <= trace.wall_us
        assert trace.idle().total == pytest.approx(trace.wall_us - trace.busy_us())
    assert (eager.launches, eager.graph_launches) == (500, 0)
    assert (replayed.launches, replayed.graph_launches) == (5, 5)
    assert same_work(eager, replayed).only_base == {}
    assert outcome(predict_gain(eager), replayed.wall_us / 5, replayed).verdict != "unexplained"


def test_another_thread_may_profile_without_a_word_on_standard_error(environment):
    code = (
        "import threading, torch\n"
        "from cglab.measure.profiling import prepare, profile\n"
        "prepare()\n"
        "work = threading.Thread(target=lambda: print(profile(lambda: torch.ones(3) + 1, steps=2).steps))\n"
        "work.start(); work.join()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (run.stdout, run.stderr) == ("2\n", "")
